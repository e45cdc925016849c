"""Faults of a few steps: whether chance explains them, and that they are named, dated and priced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.stragglers.costs import occurrence, struck_steps
from commtrace.analysis.stragglers.strikes import StepRun, at_least, chance_of, not_by_chance, runs_of
from commtrace.findings.finding import Finding, ranked
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


def stretches(finding: Finding) -> list[tuple[int, int]]:
    return [(stretch.first, stretch.last) for stretch in finding.stretches]


def test_two_links_that_are_slow_in_the_same_steps_are_both_named() -> None:
    """Each costs little as long as the other is slow."""
    findings, cost_ms = judged(["slow-link=2:6@10:15", "slow-link=9:6@10:15"], **TWO_HOSTS)

    assert {finding.ranks for finding in findings.slow} == {(2,), (9,)}
    assert all(stretches(finding) == [(10, 14)] for finding in findings.slow)
    assert all(0.5 * cost_ms * 1e6 < (finding.cost_ns or 0.0) < cost_ms * 1e6 for finding in findings.slow)


def test_a_rank_that_is_always_slow_does_not_hide_a_host_that_is_slow_in_some_steps() -> None:
    findings = found(["slow-rank=2:1.4", "slow-host=1:1.8@10:13"], **TWO_HOSTS)

    assert [(finding.who, stretches(finding)) for finding in findings.slow] == [
        ("rank 2 on node0", []), ("host node1 (ranks 8–15)", [(10, 12)])]  # fmt: skip


def test_a_host_without_peers_is_compared_with_its_other_steps() -> None:
    """All of a stage is on it."""
    (finding,) = found(["slow-host=1:1.5@10:14"], **TWO_HOSTS).slow

    assert finding.norm == "past"
    assert "more than in their other steps, and the ranks of other hosts do not" in finding.evidence
    assert finding.evidence.endswith("in 4 of 39 steps.")


def test_a_rank_that_was_slow_for_long_is_named_with_its_later_strikes_too() -> None:
    findings = found(["slow-rank=5:1.4@1:30", "slow-rank=5:2@60:64"], dp=8, steps=90)

    assert [(finding.ranks, stretches(finding)) for finding in findings.slow] == [
        ((5,), [(1, 29)]), ((5,), [(60, 63)])]  # fmt: skip
    assert len({finding.id for finding in ranked(findings.slow)}) == 2


@pytest.mark.parametrize("fault", ["slow-rank=5:1.9", "slow-link=2:4"])
def test_steps_apart_are_all_in_the_occurrence_the_evidence_and_the_stretches(fault: str) -> None:
    (finding,) = found([f"{fault}@{first}:{first + 2}" for first in (4, 13, 24)], **TWO_HOSTS).slow

    assert finding.occurrence is not None
    assert finding.occurrence.steps == (4, 5, 13, 14, 24, 25)
    assert stretches(finding) == [(4, 5), (13, 14), (24, 25)]
    assert "in 6 of 39 steps" in finding.evidence or "times as long" in finding.evidence


def test_the_share_of_what_strikes_is_of_the_mean_step_as_its_cost_is() -> None:
    (finding,) = found(["slow-link=2:6@10:20"], **TWO_HOSTS).slow

    assert finding.share is not None
    assert finding.gpu_hours_per_day == pytest.approx(finding.share * 24 * 16)


def test_communications_that_are_slow_everywhere_in_some_steps_name_no_link() -> None:
    """As on a busy machine: a job with a single group cannot tell that from a slow link."""
    assert found(["slow-link=2:6@10:14"], dp=4, steps=30, sequence=8192).slow == ()


def test_a_network_between_hosts_that_is_slow_in_some_steps_is_named_beside_quick_groups_on_each_host() -> None:
    (finding,) = found(["slow-network=1:6@10:14"], **TWO_HOSTS).slow

    assert (finding.place, finding.cause, stretches(finding)) == ("network", "communication", [(10, 13)])


FAULTS = ("slow-rank=5:1.6", "slow-link=2:3", "gc=3:80", "data=3:60", "late-launch=3:60")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "windows",
    [
        ((10, 14),),  # more than a quarter of the steps
        ((1, 4),),
        ((15, 19),),
        ((12, 19),),
        ((1, 2), (18, 19)),
        ((3, 5), (12, 14)),
    ],
)
def test_the_first_and_the_last_step_of_each_stretch_are_exact(fault: str, windows: Sequence[tuple[int, int]]) -> None:
    (finding,) = found([f"{fault}@{first}:{last + 1}" for first, last in windows], pp=2, dp=4, steps=20).slow

    assert stretches(finding) == [*windows]


def test_a_fault_that_a_cut_divides_is_dated_in_both_parts() -> None:
    for fault in ("slow-rank=5:1.6", "slow-link=2:3"):
        findings = found([f"{fault}@5:14"], pp=2, dp=4, microbatches=4, steps=20, seed=3, jitter=0.01)

        assert [stretches(finding) for finding in findings.slow] == [[(5, 11)], [(12, 13)]]
        assert len({finding.ranks for finding in findings.slow}) == 1


def struck_in(saved_ms: Sequence[int], first: int = 0) -> list[tuple[int, int]] | None:
    steps = np.arange(first, first + len(saved_ms))
    saved_ns = np.array(saved_ms, np.int64) * 1_000_000
    struck = struck_steps(steps, saved_ns, occurrence(steps.tolist(), saved_ns))
    if struck is None:
        return None
    when, parts = struck
    assert [*when.steps] == [step for part in parts for step in range(part.first, part.last + 1)]
    return [(part.first, part.last) for part in parts]


def test_steps_that_save_about_the_same_are_all_struck() -> None:
    assert struck_in([0] * 9 + [30, 31, 30, 31, 31] + [0] * 5, first=1) == [(10, 14)]
    assert struck_in([30, 31, 31, 30] + [0] * 12) == [(0, 3)]
    assert struck_in([0] * 12 + [31, 31, 31, 30]) == [(12, 15)]
    assert struck_in([0, 30, 31, 0, 0, 0, 31, 30, 0, 0, 0, 0, 0, 0, 0, 31]) == [(1, 2), (6, 7), (15, 15)]
    assert struck_in([0, 30, 31, 14, 0, 0, 0, 0, 0, 0]) == [(1, 2)]  # less than half as much
    assert struck_in([0, 30, 31, 0, -20, 1, 0, 0, 0, 0]) == [(1, 2)]


def test_what_strikes_in_most_steps_or_every_now_and_then_is_no_matter_of_some_steps() -> None:
    assert struck_in([30] * 6 + [0] * 4) is None
    assert struck_in([30, 0, 0] * 6) is None
    assert struck_in([0] * 8) is None
