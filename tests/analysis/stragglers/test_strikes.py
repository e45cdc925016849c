"""Faults of a few steps: whether chance explains them, and that they are named, dated and priced."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.analysis.stragglers.strikes import StepRun, at_least, chance_of, not_by_chance, runs_of
from tests.analysis.stragglers.judged_jobs import found, judged

TWO_HOSTS: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 4, "steps": 40}


def test_consecutive_steps_are_runs() -> None:
    assert [*runs_of([3, 4, 5, 9, 11, 12])] == [StepRun(3, 5), StepRun(9, 9), StepRun(11, 12)]
    assert [*runs_of([])] == []


def test_chance_of_consecutive_strikes_grows_with_the_strikes_elsewhere() -> None:
    """The rate of strikes in one of 100 cells is (strikes outside of the run + ½) / 100."""
    assert chance_of([4, 5], elsewhere=0, num_subjects=5, num_steps=20) == pytest.approx(100 * 0.005**2)
    assert chance_of([4, 5], elsewhere=2, num_subjects=5, num_steps=20) == pytest.approx(100 * 0.025**2)
    assert chance_of([4, 5, 6], elsewhere=2, num_subjects=5, num_steps=20) == pytest.approx(100 * 0.025**3)


def test_chance_of_strikes_on_one_of_many_falls_with_their_number() -> None:
    """Of 4 strikes, all on one of 10: 10 times the share of ways in which 20 of 200 cells hold them."""
    apart = [1, 5, 9, 13]
    expected = 10 * (20 * 19 * 18 * 17) / (200 * 199 * 198 * 197)
    assert chance_of(apart, elsewhere=0, num_subjects=10, num_steps=20) == pytest.approx(expected)
    assert at_least(4, 4, 20, 200) == pytest.approx(expected / 10)


def test_one_strike_says_nothing() -> None:
    assert chance_of([7], elsewhere=0, num_subjects=1000, num_steps=1000) == 1.0


def test_only_what_chance_does_not_explain_is_kept() -> None:
    assert not_by_chance({"a": [5, 6, 7], "b": [1]}, num_subjects=8, num_steps=40) == {"a": (5, 6, 7)}
    assert not_by_chance({"a": [5, 9], "b": [1, 30], "c": [2, 20]}, num_subjects=8, num_steps=40) == {}


@pytest.mark.parametrize("last", [11, 14])
@pytest.mark.parametrize(
    ("fault", "who", "cause"),
    [
        ("slow-rank=5:1.8", "rank 5 on node0", "compute"),
        ("slow-host=1:1.5", "host node1 (ranks 8–15)", "compute"),
        ("slow-link=2:3", "rank 2 on node0", "communication"),
        ("gc=3:80", "rank 3 on node0", "gc"),
        ("data=6:80", "rank 6 on node0", "data"),
    ],
)
def test_a_fault_of_some_steps_is_named_with_them_and_its_cost(fault: str, who: str, cause: str, last: int) -> None:
    findings, cost_ms = judged([f"{fault}@10:{last + 1}"], **TWO_HOSTS)

    (finding,) = findings.slow
    assert (finding.who, finding.cause) == (who, cause)
    assert [(stretch.first, stretch.last) for stretch in finding.stretches] == [(10, last)]
    assert (finding.cost_ns or 0.0) == pytest.approx(cost_ms * 1e6, rel=0.1)


def test_a_permanent_fault_and_one_of_some_steps_are_both_named() -> None:
    findings = found(["slow-rank=5:1.3", "slow-link=2:3@10:15"], **TWO_HOSTS)

    assert [(finding.ranks, finding.cause) for finding in findings.slow] == [
        ((5,), "compute"), ((2,), "communication")]  # fmt: skip
    assert [(stretch.first, stretch.last) for stretch in findings.slow[1].stretches] == [(10, 14)]


def test_single_steps_of_several_ranks_name_nobody() -> None:
    faults = [f"slow-rank={rank}:2@{step}:{step + 1}" for rank, step in ((1, 5), (6, 12), (11, 20), (14, 33))]
    assert found(faults, **TWO_HOSTS).slow == ()


def test_steps_that_are_longer_on_all_ranks_name_nobody() -> None:
    every_rank = ",".join(map(str, range(16)))
    assert found([f"slow-rank={every_rank}:2@10:13"], **TWO_HOSTS).slow == ()
