"""Who pauses more than its peers, and what chance does to any rank."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from commtrace.analysis.stragglers.normal import Work
from commtrace.analysis.stragglers.pauses import PausesOf, chance_of_so_many, judge_on_purpose, judge_pauses

MS = 1e6
NONE = PausesOf((), 60)


def slow(*pauses: tuple[float, ...]) -> list[int]:
    """Who is slow of ranks that do the same work in 60 steps of half a second; of each the ms of its pauses."""
    of_ranks = [PausesOf(tuple(ms * MS for ms in own), 60) for own in pauses]
    count = len(of_ranks)
    work = Work(
        rank=np.arange(count),
        peers=np.zeros(count, np.int64),
        host=np.zeros(count, np.int64),
        total_ns=np.array([sum(one.ns) / one.steps for one in of_ranks]),
        error_ns=np.zeros(count),
        scale_ns=np.full(count, 500 * MS),
    )
    return judge_pauses(work, of_ranks).slow_ranks


def test_the_chance_that_all_pauses_hit_one_rank() -> None:
    assert chance_of_so_many(PausesOf((5.0,) * 6, 60), [NONE] * 3) == pytest.approx(comb(60, 6) / comb(240, 6))


def test_pauses_that_are_far_shorter_than_most_of_a_rank_do_not_count() -> None:
    others = [PausesOf((2.0,) * 30, 60)] * 3
    assert chance_of_so_many(PausesOf((5.0,) * 6 + (1.0,), 60), others) == pytest.approx(comb(60, 6) / comb(240, 6))


def test_a_rank_that_pauses_no_more_often_than_others_may_be_struck_by_chance() -> None:
    assert chance_of_so_many(PausesOf((5.0,) * 2, 60), [PausesOf((5.0,) * 2, 60)] * 3) == 1.0
    assert chance_of_so_many(NONE, [NONE]) == 1.0


@pytest.mark.parametrize(("ranks", "fewest"), [(2, 11), (4, 6), (8, 5), (64, 3), (1_024, 3)])
def test_so_many_pauses_of_one_rank_and_of_no_other_are_no_chance(ranks: int, fewest: int) -> None:
    for count in (fewest - 1, fewest):
        assert slow(*[()] * (ranks - 1), (500.0,) * count) == ([ranks - 1] if count == fewest else [])


def slow_on_purpose(*pauses: tuple[float, ...]) -> list[int]:
    """Who is slow of ranks that do the same work in 60 steps of half a second; of each the ms in the first steps."""
    of_steps = np.zeros((len(pauses), 60))
    for row, own in enumerate(pauses):
        of_steps[row, : len(own)] = np.array(own) * MS
    count = len(pauses)
    work = Work(
        rank=np.arange(count),
        peers=np.zeros(count, np.int64),
        host=np.zeros(count, np.int64),
        total_ns=of_steps.mean(axis=1),
        error_ns=np.zeros(count),
        scale_ns=np.full(count, 500 * MS),
    )
    return judge_on_purpose(work, of_steps).slow_ranks


def test_a_deliberate_activity_of_one_rank_is_named_at_once() -> None:
    assert slow_on_purpose((), (8_000.0,), ()) == [1]
    assert slow((), (8_000.0,), ()) == []


def test_a_deliberate_activity_of_all_is_compared_from_the_third_time_on() -> None:
    longer, others = (2_400.0, 2_600.0, 2_500.0), (1_000.0, 1_010.0, 990.0)
    assert slow_on_purpose(others[:2], longer[:2]) == []
    assert slow_on_purpose(others, longer) == [1]


def test_times_on_purpose_that_scatter_on_all_ranks_are_no_excess() -> None:
    assert slow_on_purpose((1_000.0, 3_000.0, 1_500.0, 2_600.0), (2_900.0, 1_200.0, 3_100.0, 2_700.0)) == []
    random = np.random.default_rng(7)
    of_jobs = [slow_on_purpose(*random.normal(2_000.0, 400.0, (4, 6)).tolist()) for _ in range(200)]
    assert sum(map(bool, of_jobs)) <= 4  # 2 %


def test_a_cost_below_two_percent_of_a_step_is_not_named() -> None:
    assert [slow((), (), (), (ms,) * 20) for ms in (29.0, 31.0)] == [[], [3]]


def test_each_of_two_ranks_is_compared_with_those_that_do_not_pause() -> None:
    assert slow(*[()] * 6, (500.0,) * 6, (500.0,) * 6) == [6, 7]
