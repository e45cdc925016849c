"""Stages with more to do than the others, in synthetic jobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.analysis.stragglers.test_slow_sets import judged

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

    (verdict,) = findings.verdicts
    assert (verdict.who, verdict.cause) == (stages, "stage_imbalance")
    assert verdict.cost_ms_per_step == pytest.approx(cost_ms, rel=0.2, abs=1)
    assert ("the output layer and the loss are part of that" in verdict.evidence) == ("stage 3" in stages)


def test_a_slow_rank_and_an_uneven_stage_are_both_named() -> None:
    findings, cost_ms = judged(("uneven-stage=2:1.3", "slow-rank=1:1.4"), **PIPELINE)

    assert {(verdict.who, verdict.cause) for verdict in findings.verdicts} == {
        ("rank 1 on node0", "compute"),
        ("stage 2 (ranks 4–5)", "stage_imbalance"),
    }
    assert findings.together_ms_per_step == pytest.approx(cost_ms, rel=0.2)


def test_even_stages_are_not_named() -> None:
    findings, _ = judged((), **PIPELINE)

    assert findings.verdicts == ()


def test_a_stage_that_is_a_host_of_its_own_may_be_a_slow_host() -> None:
    findings, _ = judged(("slow-host=1:1.4",), pp=4, dp=4, gpus_per_host=4, steps=12)

    (verdict,) = findings.verdicts
    assert (verdict.who, verdict.cause) == ("stage 1 (ranks 4–7)", "stage_imbalance")
    assert verdict.evidence.endswith(
        "Its ranks are all that run on node1: the host may be slow instead, which a run on other hosts tells."
    )
