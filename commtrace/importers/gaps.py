"""Where a compute lane stood still, for traces that tell when it worked and when communication was in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Stall(NamedTuple):
    """The lane stood still from ``start`` to ``end``; ``on`` is a position in the communications given."""

    start: int
    end: int
    on: int


def stalls(work: Sequence[tuple[int, int]], communications: Sequence[tuple[int, int]], end: int) -> list[Stall]:
    """What the lane stood still for between its pieces of work.

    What ends last in a gap is what kept the next piece of work from beginning. Before it came into flight, what ends
    last before that; and so on. Time at which nothing was in flight is no stall.

    Args:
        work: start and end of what the lane did, not overlapping, ascending.
        communications: start and end of what was in flight.
        end: of the step, so that the time after the last piece of work is a gap too.
    """
    ordered = sorted(range(len(communications)), key=lambda position: communications[position][1])
    found: list[Stall] = []
    first = 0
    for begin, until in _gaps(work, end):
        while first < len(ordered) and communications[ordered[first]][1] <= begin:
            first += 1
        inside = [on for on in ordered[first:] if communications[on][0] < until]
        found += _stalls_of_gap(begin, until, inside, communications)
    return found


def _gaps(work: Sequence[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    for (_, before), (after, _) in pairwise([*work, (end, end)]):
        if before < after:
            yield before, after


def _stalls_of_gap(
    begin: int, until: int, inside: Sequence[int], communications: Sequence[tuple[int, int]]
) -> Iterator[Stall]:
    cursor = until
    # Of two that end together, or after the gap, the one that came into flight last is the reason.
    by_end = sorted(inside, key=lambda on: (min(communications[on][1], until), communications[on][0]), reverse=True)
    for on in by_end:
        start, end = communications[on]
        piece_begin, piece_end = max(start, begin), min(end, cursor)
        if piece_end > piece_begin:
            yield Stall(piece_begin, piece_end, on)
            cursor = piece_begin
