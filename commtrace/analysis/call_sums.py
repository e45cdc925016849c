"""Sums over calls, exact and in integers, so that those of parts of a run add up to those of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.calls import Calls
from commtrace.trace.spans import Bool, Int64


class Moved(NamedTuple):
    """What some calls sent.

    Attributes:
        calls: how many.
        num_bytes: full tensors.
        even, uneven: S of the bandwidth (:mod:`commtrace.analysis.bandwidth`): the tensors; of uneven all_to_alls only
            what went to others.
        time_ns: that they took.
    """

    calls: int
    num_bytes: int
    even: int
    uneven: int
    time_ns: int

    def plus(self, other: Moved) -> Moved:
        return Moved(*(one + another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class CallSums:
    """Sums over calls, and over stalls, which add to ``exposed_ns`` alone.

    Attributes:
        count, num_bytes, hidden_ns, wait_ns, mismatched: as of :class:`commtrace.analysis.calls.Calls`.
        complete: matched on all members.
        unfinished: their end was never seen.
        all: of all calls; without a time.
        finished: of those whose end was seen; the time is their duration.
        matched: of those of them that are complete; the time is their transfer.
        durations: of those whose end was seen, in parts, ns.
    """

    num_bytes: int
    exposed_ns: int
    hidden_ns: int
    wait_ns: int
    complete: int
    mismatched: int
    all: Moved
    finished: Moved
    matched: Moved
    durations: tuple[Int64, ...]

    @property
    def count(self) -> int:
        return self.all.calls

    @property
    def unfinished(self) -> int:
        return self.all.calls - self.finished.calls

    def __add__(self, other: CallSums) -> CallSums:
        return CallSums(
            self.num_bytes + other.num_bytes,
            self.exposed_ns + other.exposed_ns,
            self.hidden_ns + other.hidden_ns,
            self.wait_ns + other.wait_ns,
            self.complete + other.complete,
            self.mismatched + other.mismatched,
            self.all.plus(other.all),
            self.finished.plus(other.finished),
            self.matched.plus(other.matched),
            self.durations + other.durations,
        )


def sum_calls(calls: Calls, all_to_all: int, order: Int64, begins: Int64) -> list[CallSums]:
    """Sums of groups of calls.

    Args:
        calls: at least one.
        all_to_all: the code of that operation.
        order: brings the calls of each group together.
        begins: where in that order each group begins.
    """
    made = (calls.calls > 0)[order]
    finished = made & calls.finished[order]
    complete = made & calls.complete[order]
    num_bytes, self_bytes = calls.num_bytes[order], calls.self_bytes[order]
    uneven = (self_bytes >= 0) & (calls.name[order] == all_to_all)
    moved = np.where(uneven, num_bytes - self_bytes, num_bytes)
    duration, transfer = calls.duration[order], calls.transfer[order]

    def total(column: npt.NDArray[Any]) -> list[int]:
        sums: list[int] = np.add.reduceat(column, begins, dtype=np.int64).tolist()
        return sums

    def sent(chosen: Bool, time_ns: Int64) -> Iterator[Moved]:
        columns = (chosen, num_bytes * chosen, moved * (chosen & ~uneven), moved * (chosen & uneven), time_ns * chosen)
        return map(Moved, *map(total, columns))

    return [
        CallSums(*of_group)
        for of_group in zip(
            total(num_bytes),
            total(calls.exposed[order]),
            total(calls.hidden[order]),
            total(calls.wait[order]),
            total(complete),
            total(calls.mismatched[order]),
            sent(made, np.zeros_like(duration)),
            sent(finished, duration),
            sent(finished & complete, transfer),
            (
                (part[seen],)
                for part, seen in zip(np.split(duration, begins[1:]), np.split(finished, begins[1:]), strict=True)
            ),
            strict=True,
        )
    ]


def _parts(column: Int64, chosen: Bool, begins: Int64) -> Iterator[tuple[Int64]]:
    """What is chosen of each group's part of a column."""
    for part, wanted in zip(np.split(column, begins[1:]), np.split(chosen, begins[1:]), strict=True):
        yield (part[wanted],)
