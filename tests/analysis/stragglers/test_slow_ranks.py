"""Ranks that are slow in a part of a run only."""

from __future__ import annotations

import pytest

from tests.analysis.stragglers.judged_jobs import found, judged
from tests.findings.reading import ms


def test_a_rank_that_becomes_slow_late_is_named_since_then_with_both_costs() -> None:
    findings, cost_ms = judged(("slow-rank=3:1.5@30:50",), dp=4, steps=50)

    (verdict,) = findings.slow
    assert (verdict.rank, verdict.cause) == (3, "compute")
    (stretch,) = verdict.stretches
    assert (stretch.first, stretch.last) == (30, 49)
    # The first step, a warm-up, is not among the steps of the mean.
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)
    assert ms(stretch.cost_ns) == pytest.approx(cost_ms * 50 / 20, rel=0.1)


def test_a_fault_that_moves_is_followed() -> None:
    findings, cost_ms = judged(
        ("slow-rank=0:1.5@0:40", "slow-rank=2:1.5@40:80", "slow-rank=1:1.5@80:120"), dp=4, steps=120, jitter=0.05
    )

    found = {
        (verdict.rank, *((stretch.first, stretch.last) for stretch in verdict.stretches)) for verdict in findings.slow
    }
    assert found == {(0, (1, 39)), (2, (40, 79)), (1, (80, 119))}
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.1)


def test_a_fault_that_comes_and_goes_is_one_verdict_with_its_stretches() -> None:
    findings, cost_ms = judged(("slow-rank=2:1.3@10:30", "slow-rank=2:1.3@50:70"), dp=4, steps=80)

    (verdict,) = findings.slow
    assert [(stretch.first, stretch.last) for stretch in verdict.stretches] == [(10, 29), (50, 69)]
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_an_excess_that_grows_has_a_stretch_for_each_size() -> None:
    findings, cost_ms = judged(("slow-rank=4:1.1@0:40", "slow-rank=4:2.0@40:60"), steps=60)

    (verdict,) = findings.slow
    assert (verdict.rank, [(stretch.first, stretch.last) for stretch in verdict.stretches]) == (4, [(1, 39), (40, 59)])
    assert ms(verdict.stretches[1].cost_ns) > 8 * ms(verdict.stretches[0].cost_ns)
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_input_that_becomes_slow_late_or_moves_is_reported_with_its_steps() -> None:
    (late,) = judged(("data=2:40@60:100",), steps=100)[0].slow
    moved = judged(("data=2:40@0:30", "data=6:40@30:60"), steps=60)[0].slow

    assert (late.rank, late.cause, [(stretch.first, stretch.last) for stretch in late.stretches]) == (
        2,
        "data",
        [(60, 99)],
    )
    assert {(one.rank, one.cause, *((stretch.first, stretch.last) for stretch in one.stretches)) for one in moved} == {
        (2, "data", (1, 29)),
        (6, "data", (30, 59)),
    }


def test_ranks_whose_faults_overlap_for_a_while_are_verdicts_of_their_own() -> None:
    faults = ("slow-rank=4:1.3@0:40", "slow-rank=2:1.5@30:80", "slow-rank=5:1.3@80:120")
    findings = found(faults, steps=120)

    named = {
        verdict.ranks: [(stretch.first, stretch.last) for stretch in verdict.stretches] for verdict in findings.slow
    }
    assert named == {(2,): [(30, 79)], (4,): [(1, 39)], (5,): [(80, 119)]}


@pytest.mark.parametrize("slow", [(1, 3), (0, 1, 2), (0, 1, 2, 4, 5)])
def test_the_past_tells_whom_to_name_of_many(slow: tuple[int, ...]) -> None:
    ranks = 4 if len(slow) < 4 else 8
    findings, cost_ms = judged([f"slow-rank={rank}:1.3@20:40" for rank in slow], dp=ranks, steps=40)

    (verdict,) = findings.slow
    assert set(verdict.ranks) == set(slow)
    assert "as fast as before" in verdict.evidence
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_a_fault_in_the_middle_of_a_noisy_run() -> None:
    findings, cost_ms = judged(("slow-rank=4:1.3@9:21",), steps=30, jitter=0.1, seed=15)

    (verdict,) = findings.slow
    assert [(stretch.first, stretch.last) for stretch in verdict.stretches] == [(9, 20)]
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


def test_jitter_is_no_change() -> None:
    findings = found((), dp=8, steps=100, jitter=0.1)

    assert findings.slow == ()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 4}])
def test_healthy_ranks_whose_speed_drifts_are_no_change(sizes: dict[str, int]) -> None:
    for seed in range(3):
        findings = found((), **sizes, microbatches=4, steps=100, wander=0.05, seed=seed)

        assert findings.slow == ()


def test_a_rank_that_becomes_slow_is_named_although_all_drift() -> None:
    findings, cost_ms = judged(("slow-rank=3:1.4@40:80",), steps=80, wander=0.02)

    (verdict,) = findings.slow
    assert verdict.ranks == (3,)
    (stretch,) = verdict.stretches
    assert (abs(stretch.first - 40) <= 1, stretch.last) == (True, 79)
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


@pytest.mark.parametrize("sizes", [{"dp": 8}, {"dp": 2, "pp": 2}])
def test_drift_does_not_hide_a_rank_that_is_far_slower_than_devices_drift(sizes: dict[str, int]) -> None:
    noise = {"jitter": 0.02, "wander": 0.04}
    for seed in range(2):
        findings = found(("slow-rank=1:1.3",), **sizes, **noise, microbatches=4, steps=60, seed=seed)

        assert [verdict.ranks for verdict in findings.slow] == [(1,)]


def test_a_slow_rank_is_named_although_its_only_replica_is_starved_for_a_third_of_the_run() -> None:
    starved = [f"slow-rank=0:{1.2 + 0.25 * (step % 4)}@{step}:{step + 1}" for step in range(9, 22)]
    findings = found(("slow-rank=1:1.75", *starved), dp=2, microbatches=4, steps=40, jitter=0.03)

    slow, starved_one = findings.slow
    assert (slow.ranks, slow.cause, slow.occurrence) == ((1,), "compute", None)
    assert starved_one.ranks == (0,)
    assert starved_one.occurrence is not None
    struck = [step for one in starved_one.stretches for step in range(one.first, one.last + 1)]
    assert struck == list(starved_one.occurrence.steps)
    assert all(9 <= step <= 21 for step in struck)
    assert f"in {len(struck)} of 39 steps" in starved_one.evidence


def test_a_few_slow_steps_of_two_ranks_are_reported_without_a_rank() -> None:
    findings = found(("slow-rank=1:2@5:60:20",), dp=2, steps=60)

    assert findings.slow == ()
    assert "rank 1 on node0" in findings.waited_for
    assert "in 3 of 59 steps: 198.7 against 99.3 ms, medians over these steps" in findings.waited_for
    assert "over all steps the medians are 99.0 and 99.0 ms" in findings.waited_for


def test_evidence_of_some_steps_of_a_stretch_says_which() -> None:
    """Another rank's input cuts the run in two, and the evidence is that of one part."""
    findings = found(("gc=3:60", "data=5:40@10:24"), steps=24)

    (collecting,) = (verdict for verdict in findings.slow if verdict.cause == "gc")
    assert [(stretch.first, stretch.last) for stretch in collecting.stretches] == [(1, 23)]
    assert collecting.evidence.endswith(("in all 9 steps from 1 to 9.", "in all 14 steps from 10 to 23."))


def test_a_slow_rank_is_named_although_all_ranks_work_longer_from_the_middle_on() -> None:
    findings = found(("slow-rank=0,1,2,3,4,5,6,7:1.25@20:40", "slow-rank=3:1.1"), microbatches=2, steps=40)

    assert [verdict.ranks for verdict in findings.slow] == [(3,)]
