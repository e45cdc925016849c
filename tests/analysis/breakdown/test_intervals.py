"""Interval arithmetic against counting points one by one."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.breakdown.intervals import paint, union

points = st.integers(-20, 20)
intervals = st.lists(st.tuples(points, points), max_size=12)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(intervals)
def test_a_union_holds_the_points_of_its_intervals_in_disjoint_pieces(pairs: list[tuple[int, int]]) -> None:
    merged = union(*columns(pairs))
    held = {point for start, end in pairs for point in range(start, end)}
    assert {p for start, end in zip(*merged.bounds, strict=True) for p in range(start, end)} == held
    assert merged.length == len(held)
    assert (merged.start[1:] > merged.end[:-1]).all()


@given(intervals, points)
def test_time_before_an_instant_is_counted(pairs: list[tuple[int, int]], instant: int) -> None:
    held = {point for start, end in pairs for point in range(start, end)}
    assert union(*columns(pairs)).before(np.array([instant])) == [sum(point < instant for point in held)]


@given(intervals, st.randoms(use_true_random=False))
def test_every_instant_goes_to_the_highest_interval_that_holds_it(pairs: list[tuple[int, int]], random: Random) -> None:
    ranks = list(range(len(pairs)))
    random.shuffle(ranks)
    segments = paint(*columns(pairs), np.array(ranks, np.int64), np.array([-30, 30]))
    for point in range(-30, 30):
        holders = [position for position, (start, end) in enumerate(pairs) if start <= point < end]
        expected = max(holders, key=lambda position: ranks[position], default=-1)
        segment = np.searchsorted(segments.edges, point, side="right") - 1
        assert segments.winner[segment] == expected


def test_a_long_interval_under_many_short_ones() -> None:
    start = np.array([0, *range(10, 90, 2)])
    end = np.array([100, *range(11, 91, 2)])
    segments = paint(start, end, np.arange(len(start)), np.empty(0, np.int64))
    lengths = np.bincount(segments.winner, np.diff(segments.edges))
    assert lengths.tolist() == [60, *[1] * 40]


def test_nothing_is_in_no_interval() -> None:
    empty = np.empty(0, np.int64)
    assert union(empty, empty).length == 0
    assert union(empty, empty).before(np.array([5])).tolist() == [0]
    assert len(paint(empty, empty, empty, empty).winner) == 0
