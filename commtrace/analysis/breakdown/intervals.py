"""Interval arithmetic on columns. Intervals are half-open [start, end), ns; those with end ≤ start are empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import concatenated_ranges
from commtrace.trace.spans import Int64

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class IntervalUnion:
    """Disjoint intervals, ascending."""

    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def bounds(self) -> tuple[Int64, Int64]:
        return self.start, self.end

    @property
    def length(self) -> int:
        return int((self.end - self.start).sum())

    def before(self, times: Int64) -> Int64:
        """Return the length of the union before each time."""
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        begun = np.searchsorted(self.start, times, side="right")
        beyond = np.append(times.min(initial=0), self.end)[begun] - times  # rest of the interval that has begun last
        return np.asarray(total[begun] - np.maximum(beyond, 0))

    def holding(self, times: Int64) -> Int64:
        """Return the position of the interval that holds each time; −1 if none does."""
        return self.of_begun(np.searchsorted(self.start, times, side="right"), times)

    def of_begun(self, begun: Int64, times: Int64) -> Int64:
        """Return the same, given the number of intervals that have begun at each time."""
        index = begun - 1
        if not len(self.start):
            return index
        holds = (index >= 0) & (times < self.end[index])
        return np.asarray(begun * holds - 1)


def ranges(first: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Return all numbers of the ranges [first, end): the position of the range, and the number."""
    return np.repeat(np.arange(len(first)), end - first), concatenated_ranges(first, end)


def union(start: Int64, end: Int64) -> IntervalUnion:
    """Return the union of intervals."""
    filled = np.flatnonzero(end > start)
    start, end = start[filled], end[filled]
    if not len(start):
        return IntervalUnion(start, end)
    if not (start[1:] >= start[:-1]).all():  # rows usually come in the order of their starts
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.concatenate([[True], start[1:] > reach[:-1]])
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(start) - 1)
    return IntervalUnion(start[begins], reach[ends])


def begun_at(cuts: Int64, begins: Int64) -> Int64:
    """Return the number of ``begins`` at or before each cut; both ascend, and all ``begins`` are among the cuts."""
    at = np.searchsorted(cuts, begins)
    return np.repeat(np.arange(len(begins) + 1), np.diff(at, prepend=0, append=len(cuts)))


class IntervalSegments(NamedTuple):
    """Segments [edges[i], edges[i + 1]), each with the position of the interval that wins it; −1 for none."""

    edges: Int64
    winner: Int64


def paint(start: Int64, end: Int64, rank: Int64, cuts: Int64) -> IntervalSegments:
    """Assign every instant to the interval of the highest rank that holds it.

    Ranks are distinct numbers from 0 to n − 1; ``cuts`` are further instants at which segments must end.
    """
    edges, (left, right) = _numbered(np.concatenate([start, end, cuts]), len(start))
    best = _highest(left, right, rank, max(len(edges) - 1, 0))
    interval_of_rank = np.empty(len(rank) + 1, np.int64)
    interval_of_rank[rank] = np.arange(len(rank))
    interval_of_rank[_NOBODY] = _NOBODY
    return IntervalSegments(edges, interval_of_rank[best])


def distinct(times: Int64) -> Int64:
    """Return each time once, ascending."""
    ordered = np.sort(times, kind="stable")  # quick, as the times come in ascending runs; np.unique hashes them
    return ordered.compress(np.diff(ordered, prepend=ordered[:1] - 1) > 0)


def _numbered(times: Int64, count: int) -> tuple[Int64, tuple[Int64, Int64]]:
    """Return the distinct times, ascending, and the numbers among them of the first ``count`` times and of the next."""
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    is_new = np.diff(ordered, prepend=ordered[:1] - 1) > 0
    number = np.empty(len(times), np.int64)
    number[order] = np.cumsum(is_new) - 1
    return ordered.compress(is_new), (number[:count], number[count : 2 * count])


def _highest(left: Int64, right: Int64, rank: Int64, count: int) -> Int64:
    """Return the highest rank of the ranges [left, right) that hold each of ``count`` slots; −1 if none does.

    A sparse table, filled backwards: a range is the union of two blocks whose length is a power of two, and going down
    a level, each block hands its maximum to its halves.
    """
    filled = np.flatnonzero(right > left)  # by position: numpy is three times as slow with a mask
    left, right, rank = left[filled], right[filled], rank[filled]
    if not len(left):
        return np.full(count, _NOBODY, np.int64)
    level_of_range = np.frexp((right - left).astype(np.float64))[1] - 1
    highest_level = int(level_of_range.max())
    best = np.full(count, _NOBODY, np.int64)  # slot i holds the block [i, i + 2^level)
    for level in range(highest_level, -1, -1):
        here = level_of_range == level
        if here.any():
            np.maximum.at(best, left[here], rank[here])
            np.maximum.at(best, right[here] - 2**level, rank[here])
        if level:
            half = 2 ** (level - 1)
            handed_down = best.copy()
            np.maximum(handed_down[half:], best[:-half], out=handed_down[half:])
            best = handed_down
    return best
