"""Step durations in buckets that show a change of 5 %, whatever a step takes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from commtrace.exporters.prometheus.step_histogram import BOUNDS_SECONDS, StepHistogram
from tests.exporters.prometheus.steps import summary


def histogram(seconds: Iterable[float]) -> StepHistogram:
    counted = StepHistogram()
    for step, one in enumerate(seconds):
        counted.add(summary(step, start_ns=step, duration_ns=round(one * 1e9)))
    return counted


def steps_by_bound(counted: StepHistogram) -> dict[float, int]:
    buckets = list(counted.buckets())
    below = [0, *(bucket.num_steps for bucket in buckets)]
    return {
        bucket.bound_seconds: after - before
        for bucket, (before, after) in zip(buckets, pairwise(below), strict=True)
        if after - before
    }


def test_neighbouring_bounds_are_five_per_cent_apart() -> None:
    assert all(later / earlier == pytest.approx(1.05, rel=1e-3) for earlier, later in pairwise(BOUNDS_SECONDS))
    assert (BOUNDS_SECONDS[0], BOUNDS_SECONDS[-1]) == (0.0008887, 3629.0)


@pytest.mark.parametrize("usual", [0.02, 0.7, 12.0, 300.0])
def test_a_change_of_five_per_cent_is_another_bucket_at_any_duration(usual: float) -> None:
    counted = histogram([5 * usual, *[usual] * 40, *[1.051 * usual] * 10])
    before, after, first = steps_by_bound(counted).items()
    assert (before[1], after[1], first[1]) == (40, 10, 1)
    assert usual <= before[0] < 1.051 * usual <= after[0] < 1.11 * usual


def test_before_a_duration_is_usual_there_are_only_coarse_bounds() -> None:
    assert [bucket.bound_seconds for bucket in StepHistogram().buckets()] == [
        0.0008887, 0.002866, 0.009243, 0.02981, 0.09614, 0.3101, 1.0, 3.225, 10.4, 33.55, 108.2, 348.9, 1125.0, 3629.0,
        float("inf"),
    ]  # fmt: skip


def test_there_are_never_more_than_36_buckets_and_fine_ones_follow_a_job_that_changes_for_good() -> None:
    counted = histogram([*[1.0] * 100, *[4.0] * 100])
    bounds = [bucket.bound_seconds for bucket in counted.buckets()]
    assert len(bounds) <= 36
    assert sum(4 / 1.7 < bound < 4 * 1.7 for bound in bounds) == 21
    assert sum(1 / 1.7 < bound < 1.7 for bound in bounds) == 1


def test_ranks_whose_steps_differ_a_little_have_most_bounds_in_common() -> None:
    first, second = ({bucket.bound_seconds for bucket in histogram([usual] * 10).buckets()} for usual in (1.999, 2.03))
    assert len(first ^ second) <= 2


def test_counts_are_cumulative_and_the_example_of_a_bucket_is_its_newest_step() -> None:
    buckets = list(histogram([0.2, 0.21, 2.0, 200.0]).buckets())
    assert {one.bound_seconds: (one.num_steps, one.example.step) for one in buckets if one.example} == {
        0.3101: (2, 1), 3.225: (3, 2), 348.9: (4, 3),
    }  # fmt: skip
    assert [one.num_steps for one in buckets] == sorted(one.num_steps for one in buckets)
