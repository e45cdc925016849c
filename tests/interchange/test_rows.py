from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.interchange.rows import Intervals, gaps
from commtrace.interchange.rows import stalls as stalls_of_gaps


class Stall(NamedTuple):
    start: int
    end: int
    on: int


def intervals(pairs: Sequence[tuple[int, int]]) -> Intervals:
    starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
    return Intervals(starts, ends)


def stalls(work: list[tuple[int, int]], communications: list[tuple[int, int]], end: int) -> list[Stall]:
    """Of one step, which begins with the first piece of work."""
    step = intervals([(work[0][0] if work else end, end)])
    idle = gaps(step, intervals(work), np.zeros(len(work), np.int64))
    found = stalls_of_gaps(idle, intervals(communications))
    return [Stall(*stall) for stall in zip(*(column.tolist() for column in found), strict=True)]


def test_a_gap_waits_for_the_last_end_in_it() -> None:
    """work ##......####......  A .===........==  B ...===  C before the next step."""
    work = [(0, 2), (8, 12)]
    communications = [(1, 4), (3, 8), (5, 6), (14, 16)]

    assert stalls(work, communications, end=18) == [Stall(3, 8, 1), Stall(2, 3, 0), Stall(14, 16, 3)]


def test_an_end_just_after_the_gap_ended_it() -> None:
    assert stalls([(0, 200_000), (400_000, 900_000)], [(100_000, 450_000)], end=900_000) == [Stall(200_000, 400_000, 0)]


def test_communication_that_goes_on_after_a_gap_was_not_waited_for() -> None:
    """A receive that was posted early is in flight while the next microbatch is launched."""
    work, receive, send = [(0, 200_000), (400_000, 900_000)], (100_000, 450_001), (150_000, 300_000)
    assert stalls(work, [receive], end=900_000) == []
    assert stalls(work, [receive, send], end=900_000) == [Stall(200_000, 300_000, 1)]


def test_nothing_in_flight_makes_no_stall() -> None:
    assert stalls([(0, 2), (8, 9)], [(2, 3)], end=9) == [Stall(2, 3, 0)]
    assert stalls([], [(2, 3)], end=9) == []


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


@given(cuts=st.lists(st.integers(0, 60), max_size=8, unique=True), pairs=INTERVALS)
def test_stalls_are_the_time_in_flight_between_pieces_of_work(cuts: list[int], pairs: list[tuple[int, int]]) -> None:
    edges = sorted(cuts)[: len(cuts) // 2 * 2]
    work = list(zip(edges[::2], edges[1::2], strict=True))
    communications = [(start, start + length) for start, length in pairs]

    found = stalls(work, communications, end=70)

    covered = [instant for stall in found for instant in range(stall.start, stall.end)]
    working = {instant for start, end in work for instant in range(start, end)}
    in_flight = {instant for start, end in communications for instant in range(start, end)}
    begin = work[0][1] if work else 70
    assert len(covered) == len(set(covered)), "stalls do not overlap"
    assert set(covered) == {instant for instant in in_flight - working if begin <= instant < 70}
    for stall in found:
        assert communications[stall.on][0] <= stall.start
        assert stall.end <= communications[stall.on][1]


def test_time_between_two_steps_is_in_no_gap() -> None:
    """Steps 0 to 10 and 20 to 30; of the second one nothing is known."""
    idle = gaps(intervals([(0, 10), (20, 30)]), intervals([(0, 4), (6, 8)]), np.array([0, 0]))

    assert list(zip(idle.start.tolist(), idle.end.tolist(), strict=True)) == [(4, 6), (8, 10), (20, 30)]
