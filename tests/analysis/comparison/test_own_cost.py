"""The cost of recording from the steps of a run, against costs that are known."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.comparison.own_cost import FEWEST_STRETCHES, own_cost
from commtrace.findings.own_cost import OwnCost
from commtrace.trace.selection import QUIET_STEPS, QuietPlan
from commtrace.trace.spans import Bool, Int64


def job(steps: int, cost_ns: int, noise: float = 0.0, seed: int = 1) -> tuple[Int64, Int64, Bool]:
    """Numbers, lengths and quiet ones of steps of 10 ms that take ``cost_ns`` more while they are recorded."""
    random, plan = np.random.default_rng(seed), QuietPlan(3)
    number = np.arange(steps)
    is_quiet = np.array([plan.is_quiet(step) for step in range(steps)])
    plain = 10_000_000 + random.normal(0, noise * 10_000_000, steps)
    return number, np.round(plain + np.where(is_quiet, 0, cost_ns)).astype(np.int64), is_quiet


def cost(number: Int64, lengths: Int64, is_quiet: Bool) -> OwnCost:
    found = own_cost(number, lengths, is_quiet, np.ones(len(number), np.bool_))
    assert found is not None
    return found


def test_the_cost_of_even_steps_is_exact() -> None:
    found = cost(*job(1_000, 123_456))

    assert (found.stretches, found.quiet_ns, found.cost_ns, found.error_ns) == (9, 10_000_000, 123_456, 0)
    assert found.share == pytest.approx(0.0123456)
    assert found.sentence == (
        "Recording costs 1.2 % of a step: 123 µs ± 0 ns, by 9 stretches of steps that were not recorded."
    )


def test_the_cost_is_within_its_error_in_nineteen_of_twenty_jobs() -> None:
    found = [cost(*job(3_000, 100_000, noise=0.02, seed=seed)) for seed in range(200)]

    inside = sum(abs(each.cost_ns - 100_000) <= each.error_ns for each in found)
    assert 180 <= inside <= 199
    assert np.mean([each.cost_ns for each in found]) == pytest.approx(100_000, abs=10_000)


def test_a_drift_of_the_job_is_no_cost() -> None:
    number, lengths, is_quiet = job(2_000, 0)

    assert cost(number, lengths + 1_000 * number, is_quiet).cost_ns == 0


def test_a_cost_of_every_tenth_step_is_spread_over_all() -> None:
    number, lengths, is_quiet = job(30_000, 0)
    # A thread that works every so often, and rests in quiet steps; not in step with the stretches.
    lengths[(np.random.default_rng(3).random(len(number)) < 0.1) & ~is_quiet] += 300_000

    found = cost(number, lengths, is_quiet)
    assert abs(found.cost_ns - 30_000) <= found.error_ns
    assert found.error_ns < 10_000


def test_a_checkpoint_on_either_side_does_not_count() -> None:
    number, lengths, is_quiet = job(1_500, 50_000)
    first = np.flatnonzero(is_quiet)[::QUIET_STEPS]
    lengths[first[0]] += 5_000_000_000
    lengths[first[1] - 1] += 5_000_000_000

    found = cost(number, lengths, is_quiet)
    assert (found.stretches, found.cost_ns) == (12, 50_000)


@pytest.mark.parametrize("lost", [slice(0, 1), slice(1, 2), slice(-1, None)])
def test_a_stretch_with_a_step_missing_around_it_does_not_count(lost: slice) -> None:
    number, lengths, is_quiet = job(1_000, 50_000)
    at = np.flatnonzero(is_quiet)[0]
    around = np.arange(at - QUIET_STEPS, at + 2 * QUIET_STEPS)
    kept = ~np.isin(number, around[lost])

    assert cost(number[kept], lengths[kept], is_quiet[kept]).stretches in (8, 9)


def test_steps_that_are_not_comparable_do_not_count() -> None:
    number, lengths, is_quiet = job(1_000, 50_000)
    later = own_cost(number, lengths, is_quiet, number >= 500)

    assert later is not None
    assert later.stretches == 5
    assert own_cost(number, lengths, is_quiet, number >= 600) is None


def test_of_few_stretches_nothing_is_said() -> None:
    steps = next(n for n in range(1_000) if job(n, 0)[2].sum() == QUIET_STEPS * FEWEST_STRETCHES)

    assert own_cost(*job(steps - 1, 0), np.ones(steps - 1, np.bool_)) is None
    assert own_cost(*job(200, 0), np.ones(200, np.bool_)) is None
    nothing = np.zeros(0, np.int64)
    assert own_cost(nothing, nothing, nothing > 0, nothing > 0) is None


def test_a_bound_is_told_where_the_cost_cannot_be_seen() -> None:
    small = OwnCost(stretches=40, quiet_ns=100_000_000, cost_ns=-200_000, error_ns=500_000)
    uneven = OwnCost(stretches=9, quiet_ns=100_000_000, cost_ns=2_000_000, error_ns=40_000_000)

    assert small.sentence == (
        "Recording costs too little to be seen: at most 0.3 % of a step, by 40 stretches of steps that were not "
        "recorded."
    )
    assert uneven.sentence == (
        "What recording costs is lost in the noise of the steps so far: 2 % ± 40 % of a step, by 9 stretches of steps "
        "that were not recorded."
    )
