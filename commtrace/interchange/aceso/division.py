"""Divides the operators of a profile between the stages of a pipeline, so that the slowest is as fast as it can be.

A stage that does not fit recomputes. What to recompute first is the answer to one question with a price: where every
MiB that is not kept is worth so many ms, which operators are then worth the time of a second forward? A rising price
gives patterns that keep less and less; a stage takes the cheapest one that fits, for as many operators as it needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.statistics import Float64
from commtrace.interchange.aceso.prediction import begins_part, kept_mib, states_of_parameters
from commtrace.interchange.aceso.profile import AcesoProfile, Case
from commtrace.trace.spans import Bool

_PRICES_MS_PER_MIB: Final = tuple(10 ** (exponent / 8) for exponent in range(-32, 17))
_ROUNDS: Final = 12
"""Halvings of the interval in which the time of the slowest stage is: to a 4,000th of it."""

_NEIGHBOURS: Final = 10
_LARGEST_MESSAGE: Final = 2.0
"""Stages end where what is sent is at most this multiple of the median of so many operators on each side."""


class Division(NamedTuple):
    """The stages of a model."""

    ends: tuple[int, ...]  # by stage, the operator behind its last one
    recomputed: Bool  # by operator


class _Kept(NamedTuple):
    """A stage with what it recomputes: ``high`` up to an operator, and the next lower pattern behind it."""

    high: int
    switch: int
    recompute_ms: float


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Operators of the whole model that are recomputed, with running sums."""

    recomputed: Bool
    again_ms: Float64  # sums of forwards that are done again
    dropped_mib: Float64  # sums of activations that are not kept for the backward
    group_mib: Float64  # by operator: of those that are recomputed together, up to it


class OperatorChain:
    """The operators of a model in one form, with running sums that give any stage's time and memory at once."""

    def __init__(self, profile: AcesoProfile, family: str, names: Sequence[str], case: Case) -> None:
        costs = [profile.cost(name, case) for name in names]
        self.names = names
        self._forward_ms = np.array([cost.forward_us for cost in costs]) / 1000
        self._kept_mib = np.array([kept_mib(name, cost) for name, cost in zip(names, costs, strict=True)])
        self._begins = np.array([begins_part(name) for name in names])
        self._input_mib = [cost.input_mib for cost in costs]
        self._message_ms = [
            profile.message_ms(cost.input_mib, between_nodes=False) if index else 0.0
            for index, cost in enumerate(costs)
        ]
        self._message_ms.append(0.0)
        self._forward_reserved = np.array([cost.forward_reserved_mib for cost in costs])
        self._backward_reserved = np.array([cost.backward_reserved_mib for cost in costs])
        self._work_ms = _running(self._forward_ms + np.array([cost.backward_us for cost in costs]) / 1000)
        self._weights_mib = _running(np.array([cost.weights_mib for cost in costs]))
        self._kept_sums = _running(self._kept_mib)
        self._states = states_of_parameters(family)
        self._patterns = [self._pattern(flags) for flags in self._flags_by_price()]
        self._cuts = [cut for cut in range(1, len(names)) if self._is_small_message(cut)]

    @property
    def work_ms(self) -> float:
        """The forwards and backwards of one microbatch in all operators."""
        return float(self._work_ms[-1])

    def slowest_ms(self, ends: Sequence[int], recomputed: Bool) -> float:
        """Return the time of a microbatch in the slowest stage."""
        again = _running(np.where(recomputed, self._forward_ms, 0.0))
        return max(self._stage_ms(begin, end) + float(again[end] - again[begin]) for begin, end in _stages(ends))

    def largest_mib(self, ends: Sequence[int], recomputed: Bool) -> float:
        """Return the memory of the fullest stage; groups that are recomputed together count whole."""
        pattern = self._pattern(recomputed)
        memory = [
            self._memory_mib(begin, end, len(ends) - stage, pattern, pattern, end)
            for stage, (begin, end) in enumerate(_stages(ends))
        ]
        return max(memory)

    def divide(self, stages: int, limit_mib: float) -> Division | None:
        """Return the division whose slowest stage is fastest, of those that fit; None if none does."""
        if stages - 1 > len(self._cuts):
            return None
        best = self._placed(stages, limit_mib, float("inf"))
        if best is None:
            return None
        low = self.work_ms / stages
        high = self.slowest_ms(best.ends, best.recomputed)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            division = self._placed(stages, limit_mib, middle)
            if division is None:
                low = middle
            else:
                best, high = division, middle
        return best

    def _placed(self, stages: int, limit_mib: float, limit_ms: float) -> Division | None:
        """Return the division in which each stage has as many operators as fit into the memory and the time."""
        count = len(self.names)
        begin, ends = 0, []
        recomputed = np.zeros(count, np.bool_)
        for stage in range(stages):
            in_flight = stages - stage
            if stage == stages - 1:
                candidates = [count]
            else:
                first = bisect_left(self._cuts, begin + 1)
                candidates = self._cuts[first : len(self._cuts) - (stages - 2 - stage)]
            best: tuple[int, _Kept] | None = None
            low, high = 0, len(candidates)
            while low < high:
                middle = (low + high) // 2
                end = candidates[middle]
                kept = self._fitted(begin, end, in_flight, limit_mib, limit_ms)
                if kept is None:
                    high = middle
                else:
                    best, low = (end, kept), middle + 1
            if best is None:
                return None
            end, kept = best
            recomputed[begin : kept.switch] = self._patterns[kept.high].recomputed[begin : kept.switch]
            recomputed[kept.switch : end] = self._patterns[max(kept.high - 1, 0)].recomputed[kept.switch : end]
            ends.append(end)
            begin = end
        return Division(tuple(ends), recomputed)

    def _fitted(self, begin: int, end: int, in_flight: int, limit_mib: float, limit_ms: float) -> _Kept | None:
        """Return how little a stage may recompute to fit into the memory; None if it does not, or is too slow."""
        left_ms = limit_ms - self._stage_ms(begin, end)
        if left_ms < 0:
            return None
        for high, pattern in enumerate(self._patterns):
            if pattern.again_ms[end] - pattern.again_ms[begin] > left_ms and not high:
                return None
            if self._memory_mib(begin, end, in_flight, pattern, pattern, end) > limit_mib:
                continue
            lower = self._patterns[max(high - 1, 0)]
            first, last = begin, end
            while high and first < last:
                middle = (first + last) // 2
                if self._memory_mib(begin, end, in_flight, pattern, lower, middle) <= limit_mib:
                    last = middle
                else:
                    first = middle + 1
            switch = last if high else begin
            again_ms = pattern.again_ms[switch] - pattern.again_ms[begin] + lower.again_ms[end] - lower.again_ms[switch]
            return _Kept(high, switch, float(again_ms)) if again_ms <= left_ms else None
        return None

    def _stage_ms(self, begin: int, end: int) -> float:
        messages_ms = self._message_ms[begin] + self._message_ms[end]
        return float(self._work_ms[end] - self._work_ms[begin]) + messages_ms

    def _memory_mib(self, begin: int, end: int, in_flight: int, high: _Pattern, low: _Pattern, switch: int) -> float:
        """Return the memory of a stage in Aceso's model; with groups cut by its ends counted whole it is a bound."""
        weights_mib = float(self._weights_mib[end] - self._weights_mib[begin])
        kept = self._input_mib[begin] + float(self._kept_sums[end] - self._kept_sums[begin])
        group_mib = 0.0
        for pattern, first, last in ((high, begin, switch), (low, switch, end)):
            if last - first > 1:
                kept -= float(pattern.dropped_mib[last - 1] - pattern.dropped_mib[first])
                group_mib = max(group_mib, float(pattern.group_mib[first : last - 1].max()))
        reserved_mib = weights_mib
        if end - begin > 1:
            workspace = self._forward_reserved[begin : end - 1].max() + self._backward_reserved[begin : end - 1].max()
            reserved_mib = max(weights_mib, float(workspace))
        return self._states * weights_mib + in_flight * kept + group_mib + reserved_mib

    def _is_small_message(self, cut: int) -> bool:
        around = self._input_mib[max(cut - _NEIGHBOURS, 0) : cut + _NEIGHBOURS + 1]
        return self._input_mib[cut] <= _LARGEST_MESSAGE * sorted(around)[len(around) // 2]

    def _pattern(self, recomputed: Bool) -> _Pattern:
        pairs = recomputed[:-1] & recomputed[1:]
        dropped = np.where(pairs & ~self._begins[1:], self._kept_mib[:-1], 0.0)
        groups, group_mib = np.zeros(len(recomputed)), 0.0
        for index, is_pair in enumerate(pairs.tolist()):
            group_mib = group_mib + float(self._kept_mib[index]) if is_pair else 0.0
            groups[index] = group_mib
            if self._begins[index + 1]:
                group_mib = 0.0
        again = np.where(recomputed, self._forward_ms, 0.0)
        return _Pattern(recomputed, _running(again), _running(np.append(dropped, 0.0)), groups)

    def _flags_by_price(self) -> list[Bool]:
        flags_by_price = [np.zeros(len(self.names), np.bool_)]
        for price in _PRICES_MS_PER_MIB:
            flags = self._worth_recomputing(price)
            if not np.array_equal(flags, flags_by_price[-1]):
                flags_by_price.append(flags)
        return flags_by_price

    def _worth_recomputing(self, price: float) -> Bool:
        """Return the operators whose second forward costs less than what is then not kept: the best of all choices.

        An operator's activations are not kept if the next one is recomputed with it; the chain is taken from the front.
        """
        again = self._forward_ms.tolist()
        saved = np.where(self._begins[1:], 0.0, self._kept_mib[:-1] * price).tolist()
        kept_ms, recomputed_ms = 0.0, again[0]
        from_recomputed: list[tuple[bool, bool]] = []  # whether the one before is, of each choice
        for cost_ms, saved_ms in zip(again[1:], saved, strict=True):
            both_ms = recomputed_ms - saved_ms
            from_recomputed.append((recomputed_ms < kept_ms, both_ms < kept_ms))
            kept_ms, recomputed_ms = min(kept_ms, recomputed_ms), cost_ms + min(kept_ms, both_ms)
        flags = np.zeros(len(again), np.bool_)
        flags[-1] = recomputed_ms < kept_ms
        for index in range(len(again) - 2, -1, -1):
            flags[index] = from_recomputed[index][int(flags[index + 1])]
        return flags


def _running(values: Float64) -> Float64:
    return np.concatenate([[0.0], np.cumsum(values)])


def _stages(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise((0, *ends))
