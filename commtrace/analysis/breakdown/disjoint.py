"""Intervals that do not overlap, ascending: which of them holds an instant, and how much they cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Disjoint:
    """Disjoint half-open intervals, ascending; ns."""

    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def bounds(self) -> tuple[Int64, Int64]:
        return self.start, self.end

    def holding(self, times: Int64) -> Int64:
        """Index of the interval that holds each instant; −1 where none does."""
        return self.of_begun(np.searchsorted(self.start, times, side="right"), times)

    def of_begun(self, begun: Int64, times: Int64) -> Int64:
        """Return the same, where it is known how many intervals have begun at each instant."""
        index = begun - 1
        if not len(self.start):
            return index
        holds = (index >= 0) & (times < self.end[index])
        return np.asarray(begun * holds - 1)

    def covered_before(self, times: Int64) -> Int64:
        """Return how much of the time before each instant is covered."""
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        begun = np.searchsorted(self.start, times, side="right")
        if not len(self.start):
            return total[begun]
        last = np.maximum(begun - 1, 0)
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(self.end[last] - times, 0), 0))

    @classmethod
    def union(cls, start: Int64, end: Int64) -> Disjoint:
        """Return the instants that lie in any of these intervals."""
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        opens = np.concatenate([[True], start[1:] > reach[:-1]])
        closes = np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(start) - 1]])
        return cls(start[opens], reach[closes])


def begun_at(cuts: Int64, begins: Int64) -> Int64:
    """Of each of the ascending instants, how many of ``begins``, ascending and all among these, are not behind it."""
    at = np.searchsorted(cuts, begins)
    return np.repeat(np.arange(len(begins) + 1), np.diff(at, prepend=0, append=len(cuts)))
