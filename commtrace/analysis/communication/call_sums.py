"""Exact integer sums over calls: sums of parts of a run add up to those of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.communication.calls import Calls
from commtrace.analysis.distribution import Distribution
from commtrace.trace.spans import Bool, Int64


class Moved(NamedTuple):
    """Bytes and time of some calls.

    Attributes:
        calls: their number.
        num_bytes: full tensors.
        even, uneven: S of :mod:`commtrace.analysis.communication.bandwidth`; uneven all_to_alls apart.
        time_ns: total.
    """

    calls: int
    num_bytes: int
    even: int
    uneven: int
    time_ns: int

    def plus(self, other: Moved) -> Moved:
        return Moved(*(one + another for one, another in zip(self, other, strict=True)))


_NOTHING: Final = Moved(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class CallSums:
    """Sums over calls, and over stalls, which add to ``exposed_ns`` alone.

    Attributes:
        count, hidden_ns, wait_ns, mismatched, upper_bounds: as of
            :class:`commtrace.analysis.communication.calls.Calls`.
        complete: calls matched on all members.
        seen: calls with an end.
        all: calls of known bytes; without a time.
        finished: those with an end; the time is their duration.
        matched: those that are complete; the time is their transfer.
        duration_ns, durations: of calls with an end, total and single, ns.
    """

    count: int
    exposed_ns: int
    hidden_ns: int
    wait_ns: int
    complete: int
    mismatched: int
    upper_bounds: int
    seen: int
    all: Moved
    finished: Moved
    matched: Moved
    duration_ns: int
    durations: Distribution[int]

    @property
    def num_bytes(self) -> int | None:
        """Return the bytes of the calls of known bytes; None if there is none."""
        return self.all.num_bytes if self.all.calls else None

    @property
    def unsized(self) -> int:
        """Return the number of calls of unknown bytes."""
        return self.count - self.all.calls

    @property
    def unfinished(self) -> int:
        return self.count - self.seen

    def __add__(self, other: CallSums) -> CallSums:
        return CallSums(
            self.count + other.count,
            self.exposed_ns + other.exposed_ns,
            self.hidden_ns + other.hidden_ns,
            self.wait_ns + other.wait_ns,
            self.complete + other.complete,
            self.mismatched + other.mismatched,
            self.upper_bounds + other.upper_bounds,
            self.seen + other.seen,
            self.all.plus(other.all),
            self.finished.plus(other.finished),
            self.matched.plus(other.matched),
            self.duration_ns + other.duration_ns,
            self.durations + other.durations,
        )


def sum_calls(calls: Calls, all_to_all: int, order: Int64, begins: Int64) -> list[CallSums]:
    """Sum each group of calls.

    Args:
        calls: at least one.
        all_to_all: code of that operation.
        order: sorts the calls by group.
        begins: position of each group in that order.
    """
    made = (calls.calls > 0)[order]
    finished = made & calls.finished[order]
    complete = made & calls.complete[order]
    told, duration = calls.num_bytes[order], calls.duration[order]
    sized, num_bytes = made & (told >= 0), np.maximum(told, 0)
    uneven = ((calls.self_bytes >= 0) & (calls.name == all_to_all))[order]
    to_others = num_bytes - calls.self_bytes[order] if uneven.any() else num_bytes

    def total(column: npt.NDArray[np.generic]) -> list[int]:
        sums: list[int] = np.add.reduceat(column, begins, dtype=np.int64).tolist()
        return sums

    def sent(chosen: Bool, time_ns: Int64 | None) -> Iterator[Moved]:
        whole = total(num_bytes * chosen)
        even, others = whole, [0] * len(begins)
        if to_others is not num_bytes:
            even, others = total(num_bytes * (chosen & ~uneven)), total(to_others * (chosen & uneven))
        times = [0] * len(begins) if time_ns is None else total(time_ns * chosen)
        return map(Moved, total(chosen), whole, even, others, times)

    return [
        CallSums(*of_group)
        for of_group in zip(
            total(made),
            total(calls.exposed[order]),
            total(calls.hidden[order]),
            total(calls.wait[order]),
            total(complete),
            total(calls.mismatched[order]),
            total(calls.upper_bound[order]),
            total(finished),
            sent(sized, None),
            sent(sized & finished, duration),
            sent(sized & finished & complete, calls.transfer[order]),
            total(duration * finished),
            (
                Distribution.of(part[seen])
                for part, seen in zip(np.split(duration, begins[1:]), np.split(finished, begins[1:]), strict=True)
            ),
            strict=True,
        )
    ]


def sum_stalls(stalls: Calls, order: Int64, begins: Int64) -> list[CallSums]:
    """Sum each group of stalls likewise."""
    exposed = np.add.reduceat(stalls.exposed[order], begins, dtype=np.int64)
    none: Distribution[int] = Distribution.of(np.zeros(0, np.int64))
    return [CallSums(0, one, 0, 0, 0, 0, 0, 0, _NOTHING, _NOTHING, _NOTHING, 0, none) for one in exposed.tolist()]
