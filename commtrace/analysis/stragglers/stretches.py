"""Cuts a run where what a rank does changes against its peers, and judges each stretch by itself.

A change is found by binary segmentation with the CUSUM statistic (Page, Continuous Inspection Schemes, 1954;
Vostrikova, Detecting "disorder" in multidimensional random processes, 1981): of all ranks and all places to cut, the
one at which the means on both sides are furthest apart in standard errors; then the same on either side of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from commtrace.analysis.statistics import LOWER_QUARTILE_OF_DISTANCE, MAD_TO_SIGMA
from commtrace.analysis.straggler_costs import Bench
from commtrace.analysis.stragglers.limits import ALIKE, RECORDED, SIGMAS_OF_CHANGE
from commtrace.analysis.stragglers.normal import Float64
from commtrace.analysis.stragglers.slow_ranks import DEPENDENCE, SlowRanks, find_slow_ranks, of_steps, work_of_steps
from commtrace.trace.spans import Bool, Int64

_FILTER: Final = 5
"""Each step counts as the median of so many around it: one or two that the machine held up are no change."""

_NOISIEST: Final = 1.5
"""No rank counts as noisier than the typical one by more: of few steps, the noise of a single rank is badly known."""

_MOST_CHANGES: Final = 32
_SPARE: Final = 0.25
"""Share of the steps that may lie in ends in which nobody was slow yet, or any more."""


def judge_stretches(bench: Bench, baseline_ns: Mapping[int, float]) -> list[SlowRanks]:
    """Who was slow in each stretch of the run; a single one where who is slow does not change.

    Args:
        bench: all steps that count.
        baseline_ns: by rank, its work in a run in which the job was well; empty without one.
    """
    whole = find_slow_ranks(bench, baseline_ns)
    if not bench.noise_is_known:
        return [whole]
    bounds = [0, *find_changes(bench), bench.num_steps]
    if len(bounds) == 2:
        return [whole]
    found = _judge_each(bench, bounds, baseline_ns)
    same = [_are_alike(one, other) for one, other in pairwise(found)]
    if any(same):
        bounds = [0, *(at for at, is_same in zip(bounds[1:-1], same, strict=True) if not is_same), bench.num_steps]
        if len(bounds) == 2:
            return [whole]
        found = _judge_each(bench, bounds, baseline_ns)
    return found if any(one.slow for one in found) else [whole]


def find_changes(bench: Bench) -> list[int]:
    """Where what a rank does changes against its stage, as places among the steps that count; ascending.

    Compared are its work, its input and its garbage collection.
    """
    segments, shortest = bench.program.segments, bench.thresholds.fewest_steps
    level = np.median(work_of_steps(bench), axis=1)
    series = [_beyond_stage(bench, values) for values in (segments.work_ns, segments.data_ns, segments.gc_ns)]
    typical = [_without_single_steps(beyond) for beyond in series]
    work, *strikes = (_error_of_step(beyond, one, level, shortest) for beyond, one in zip(series, typical, strict=True))
    error = [work, *(np.maximum(own, _error_of_strikes(one)) for own, one in zip(strikes, typical[1:], strict=True))]
    least = np.maximum(RECORDED.share * level, RECORDED.least_ns) / 2  # where it comes and goes, means hold half of it
    return _cut(
        np.concatenate(typical),
        np.concatenate(error),
        np.tile(least, len(series)),
        shortest,
        _MOST_CHANGES,
        _SPARE * bench.num_steps,
    )


def common_change(bench: Bench) -> str:
    """Say since when all ranks work longer than before, and by how much; empty if they do not.

    It is the last change of a run: what has recovered is over.
    """
    if not bench.noise_is_known:
        return ""
    steps = work_of_steps(bench)
    of_rank = np.median(steps, axis=1, keepdims=True)
    level = np.median(of_rank, axis=0)
    typical = level * np.median(steps / np.maximum(of_rank, 1.0), axis=0)[np.newaxis]
    smooth, shortest = _without_single_steps(typical), bench.thresholds.fewest_steps
    error = _error_of_step(typical, smooth, level, shortest)
    cuts = _cut(smooth, error, RECORDED.clearly * level, shortest, _MOST_CHANGES, _SPARE * bench.num_steps)
    if not cuts:
        return ""
    before, after = (float(np.median(part)) for part in (smooth[0, : cuts[0]], smooth[0, cuts[-1] :]))
    if after <= (1 + RECORDED.clearly) * before:
        return ""
    since = int(bench.program.steps[bench.steady][cuts[-1]])
    return (
        f"All ranks work longer from step {since} on, by {after / before - 1:.0%}: none is slower than the others. "
        "They have more to do since then (longer sequences, a larger batch), or what they share is slower (power, "
        "clocks)."
    )


def _beyond_stage(bench: Bench, values_ns: Int64) -> Float64:
    """By rank and step: how much more of something it has than the typical rank of its stage, ns."""
    steps = of_steps(bench, values_ns)
    stage = np.array([bench.stage_of_rank[rank] for rank in bench.program.ranks.tolist()])
    beyond = np.zeros_like(steps)
    for one in np.unique(stage):
        beyond[stage == one] = steps[stage == one] - np.median(steps[stage == one], axis=0)
    return beyond


def _error_of_step(beyond: Float64, typical: Float64, level: Float64, shortest: int) -> Float64:
    """By rank: the standard error of a single step, for means over many."""
    noise = MAD_TO_SIGMA * np.median(np.abs(np.diff(beyond, axis=1)), axis=1) / np.sqrt(2)
    scatters = noise[noise > 0]  # not so the input of ranks that get theirs from another one
    most = _NOISIEST * np.median(scatters) if len(scatters) else 0.0
    noise = np.maximum(np.minimum(noise, most), 1e-3 * level + 1.0)
    return np.asarray(DEPENDENCE * noise * _wandering(typical, noise, shortest))


def _error_of_strikes(typical: Float64) -> Float64:
    """By rank: the same for what strikes in few steps, all others being alike: what the filter leaves of strikes."""
    return np.asarray(DEPENDENCE * np.sqrt((np.diff(typical, axis=1) ** 2).mean(axis=1) / 2))


def _wandering(steps: Float64, noise: Float64, length: int) -> float:
    """By how much the means of so many steps scatter more than they would if steps were independent; 1 at least.

    A device whose clock goes up and down with its temperature is fast for some steps, then slow for some: its steps are
    like their neighbours, and the noise between neighbours says nothing of it. It is that of the typical rank, and from
    the lower quartile of the differences between such means: a change of behaviour lies between many of them.
    """
    if steps.shape[1] < 3 * length:
        return 1.0
    means = np.lib.stride_tricks.sliding_window_view(steps, length, axis=1).mean(axis=2)
    differences = np.quantile(np.abs(means[:, length:] - means[:, :-length]), 0.25, axis=1)
    sigma = differences / LOWER_QUARTILE_OF_DISTANCE / np.sqrt(2)
    return max(1.0, float(np.median(sigma * np.sqrt(length) / noise)))


def _without_single_steps(values: Float64) -> Float64:
    half = _FILTER // 2
    padded = np.pad(values, ((0, 0), (half, half)), mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, _FILTER, axis=1), axis=2))


def _cut(values: Float64, error: Float64, least: Float64, shortest: int, most: int, spare: float) -> list[int]:
    """Places to cut; ends that are no slower and too short to be judged stay uncut, ``spare`` steps in all."""
    steps = values.shape[1]
    if most < 1 or steps < 2 * shortest:
        return []
    edge = _FILTER // 2 + 1
    left = np.arange(edge, steps - edge + 1)
    sums = np.cumsum(values, axis=1)
    before, total = sums[:, left - 1], sums[:, -1:]
    apart = np.abs((total - before) / (steps - left) - before / left)
    sigmas = apart * np.sqrt(left * (steps - left) / steps) / error[:, np.newaxis]
    sigmas[apart < least[:, np.newaxis]] = 0.0
    rank, place = np.unravel_index(int(np.argmax(sigmas)), sigmas.shape)
    if sigmas[rank, place] < SIGMAS_OF_CHANGE:
        return []
    at = int(left[place])
    if not shortest <= at <= steps - shortest:
        # One end differs that is too short to be judged by itself.
        is_first, length = at < shortest, min(at, steps - at)
        slower_first = before[:, place] / at > (total[:, 0] - before[:, place]) / (steps - at)
        is_slow = ((sigmas[:, place] >= SIGMAS_OF_CHANGE) & (slower_first == is_first)).any()
        if not is_slow and length <= spare:
            # It stays with its neighbours, as steps that cost nothing.
            rest = values[:, at:] if is_first else values[:, :at]
            return [one + at * is_first for one in _cut(rest, error, least, shortest, most, spare - length)]
        at = shortest if is_first else steps - shortest
    first = _cut(values[:, :at], error, least, shortest, most - 1, spare)
    second = _cut(values[:, at:], error, least, shortest, most - 1 - len(first), spare)
    return [*first, at, *(at + one for one in second)]


def _judge_each(bench: Bench, bounds: Sequence[int], baseline_ns: Mapping[int, float]) -> list[SlowRanks]:
    benches = [bench.within(_steps_between(bench, first, end)) for first, end in pairwise(bounds)]
    found = [find_slow_ranks(one, baseline_ns) for one in benches]
    judged = []
    for number, one in enumerate(found):
        before = {**baseline_ns, **_when_all_were_alike(found, number)}
        judged.append(find_slow_ranks(benches[number], before) if before else one)
    return judged


def _steps_between(bench: Bench, first: int, end: int) -> Bool:
    chosen = np.zeros(len(bench.steady), np.bool_)
    chosen[np.flatnonzero(bench.steady)[first:end]] = True
    return chosen


def _when_all_were_alike(found: Sequence[SlowRanks], number: int) -> dict[int, float]:
    """By rank, its work in the stretch nearest to this one in which its stage worked alike; the earlier of two."""
    nearest = sorted(range(len(found)), key=lambda other: (abs(other - number), other))
    before: dict[int, float] = {}
    for one in (found[other] for other in nearest if other != number):
        for stage in np.unique(one.work.peers):
            own = one.work.peers == stage
            if one.judged.is_normal[own].all():
                for rank, total in zip(one.work.rank[own].tolist(), one.work.total_ns[own].tolist(), strict=True):
                    before.setdefault(rank, total)
    return before


def _are_alike(one: SlowRanks, other: SlowRanks) -> bool:
    """Whether the same ranks are slow, for the same cause and by as much."""
    first, second = ({(slow.rank, slow.cause): slow for slow in found.slow} for found in (one, other))
    return first.keys() == second.keys() and all(
        abs(slow.total_ns - second[key].total_ns)
        <= max(RECORDED.share * slow.normal_ns, ALIKE * max(slow.total_ns, second[key].total_ns))
        for key, slow in first.items()
    )
