"""Stages with more to do than the others, in synthetic jobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.analysis.stragglers.judged_jobs import found, judged
from tests.findings.reading import ms, why_not

PIPELINE = {"pp": 4, "dp": 2, "steps": 20}


@pytest.mark.parametrize(
    ("faults", "stages"),
    [
        (("uneven-stage=1:1.45",), "stage 1 (ranks 2–3)"),
        (("uneven-stage=2:1.1",), "stage 2 (ranks 4–5)"),
        (("uneven-stage=3:1.2",), "stage 3 (ranks 6–7)"),
        (("uneven-stage=1:1.2", "uneven-stage=2:1.3"), "stages 1–2 (ranks 2–5)"),
    ],
)
def test_uneven_stages_are_named_at_any_size_that_costs_enough(faults: Sequence[str], stages: str) -> None:
    findings, cost_ms = judged(faults, **PIPELINE)

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == (stages, "stage_imbalance")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2, abs=1)
    assert verdict.advice.startswith("Move layers from this stage to others")
    assert ("the output layer and the loss are part of that" in verdict.evidence) == ("stage 3" in stages)


def test_a_slow_rank_and_an_uneven_stage_are_both_named() -> None:
    findings, cost_ms = judged(("uneven-stage=2:1.3", "slow-rank=1:1.4"), **PIPELINE)

    assert {(verdict.who, verdict.cause) for verdict in findings.slow} == {
        ("rank 1 on node0", "compute"),
        ("stage 2 (ranks 4–5)", "stage_imbalance"),
    }
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2)


def test_even_stages_are_not_named() -> None:
    findings = found((), **PIPELINE)

    assert findings.slow == ()


def test_a_stage_that_is_a_host_of_its_own_may_be_a_slow_host() -> None:
    findings = found(("slow-host=1:1.4",), pp=4, dp=4, gpus_per_host=4, steps=12)

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == ("stage 1 (ranks 4–7)", "stage_imbalance")
    assert verdict.evidence.endswith(
        "Its ranks are all that run on node1, which may be slow instead: run them on other hosts to check."
    )


@pytest.mark.parametrize(("first", "last"), [(0, 20), (20, 40), (30, 40), (15, 30)])
def test_a_stage_that_is_uneven_in_a_part_of_the_run_is_named_with_these_steps(first: int, last: int) -> None:
    findings, cost_ms = judged((f"uneven-stage=1:1.3@{first}:{last}",), **{**PIPELINE, "steps": 40})

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == ("stage 1 (ranks 2–3)", "stage_imbalance")
    (stretch,) = verdict.stretches
    assert (stretch.first, stretch.last) == (max(first, 1), last - 1)  # the first step warms up
    assert verdict.advice.startswith("Its layers are the same as before")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1, abs=1)
    assert ms(stretch.cost_ns) == pytest.approx(cost_ms * 40 / (last - first), rel=0.1, abs=1)


def test_stages_that_are_uneven_in_different_steps_are_verdicts_of_their_own() -> None:
    findings = found(("uneven-stage=1:1.3", "uneven-stage=2:1.4@20:40"), **{**PIPELINE, "steps": 40})

    named = {verdict.who: [(stretch.first, stretch.last) for stretch in verdict.stretches] for verdict in findings.slow}
    assert named["stage 2 (ranks 4–5)"] == [(20, 39)]
    assert named.keys() == {"stage 1 (ranks 2–3)", "stage 2 (ranks 4–5)"}


def test_most_stages_that_become_slow_are_recognised_by_their_past() -> None:
    findings, cost_ms = judged(("uneven-stage=0,1,3:1.25@20:40",), **{**PIPELINE, "steps": 40})

    (verdict,) = findings.slow
    assert verdict.who == "stages 0–1, 3 (ranks 0–3, 6–7)"
    assert "25% more than before, compared with the other stages" in verdict.evidence
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_stages_that_differ_by_design_are_compared_with_their_own_past() -> None:
    design = ("uneven-stage=1:1.1", "uneven-stage=2:1.2", "uneven-stage=3:1.3")
    findings = found((*design, "uneven-stage=2:1.5@20:40"), **{**PIPELINE, "steps": 40})

    (verdict,) = findings.slow
    assert (verdict.who, [(stretch.first, stretch.last) for stretch in verdict.stretches]) == (
        "stage 2 (ranks 4–5)",
        [(20, 39)],
    )
    assert "50% more than before" in verdict.evidence


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (
            ("uneven-stage=0,1,3:1.25",),
            "Stage 2 works 96.0 ms per step, and most stages 119.8 ms: either these are slow",
        ),
        (
            ("uneven-stage=1:1.1", "uneven-stage=2:1.2", "uneven-stage=3:1.4"),
            "Which of the stages are slow is unknown: stage 0 works 96.2 ms per step, stage 1 works 105.4 ms",
        ),
    ],
)
def test_stages_that_may_all_be_uneven_are_reported_as_undecided(faults: Sequence[str], said: str) -> None:
    findings = found(faults, **PIPELINE)

    assert findings.slow == ()
    (sentence,) = why_not(findings.findings)
    assert sentence.startswith(said)
    assert "(--baseline RUN)" in sentence
