"""Replicas whose microbatches are longer, and ranks that are slow, in synthetic jobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.analysis.stragglers.judged_jobs import found, judged
from tests.findings.reading import ms

PIPELINE = {"pp": 4, "dp": 2, "microbatches": 8, "steps": 20}
REPLICA = "data-parallel replica 1 (ranks 1, 3, 5, 7)"


@pytest.mark.parametrize(
    ("faults", "job", "who", "evidence"),
    [
        (("long-microbatch=3-1:2.5",), PIPELINE, REPLICA, "Microbatch 3 takes 2.5 times as long as on other ranks"),
        (
            ("long-microbatch=2-1:2",),
            {"pp": 2, "dp": 2, "tp": 2, "microbatches": 4, "steps": 20},
            "data-parallel replica 1 (ranks 2–3, 6–7)",
            "Microbatch 2 takes 2.0 times as long as on other ranks, in forward and in backward, on ranks 2–3, 6–7",
        ),
        (("long-microbatch=1-6:2",), {"microbatches": 4}, "data-parallel replica 6 (rank 6)", "on rank 6; the other"),
        (
            ("long-microbatch=3-1:3@0:20:2", "long-microbatch=5-1:3@1:20:2"),
            PIPELINE,
            REPLICA,
            "1 microbatches per step take 3.0 times as long",
        ),
        (
            tuple(f"long-microbatch={number}-1:1.3" for number in range(8)),
            PIPELINE,
            REPLICA,
            "Forward and backward take 29% longer than on the ranks that do the same work, on ranks 1, 3, 5, 7 alike, "
            "and the optimizer step takes no longer.",
        ),
    ],
)
def test_longer_input_of_a_replica_is_no_slow_device(
    faults: Sequence[str], job: dict[str, int], who: str, evidence: str
) -> None:
    findings, cost_ms = judged(faults, **job)

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == (who, "sequence_length_imbalance")
    assert evidence in verdict.evidence
    assert verdict.advice.startswith("Balance microbatches by the work of their sequences")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_longer_input_is_reported_with_its_steps() -> None:
    findings, cost_ms = judged(("long-microbatch=3-1:3@20:40",), **{**PIPELINE, "steps": 40})

    (verdict,) = findings.slow
    assert (verdict.who, [(stretch.first, stretch.last) for stretch in verdict.stretches]) == (REPLICA, [(20, 39)])
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_slow_devices_of_a_replica_are_slow_in_the_optimizer_too() -> None:
    findings = found(("slow-rank=1,3,5,7:1.3",), **PIPELINE)

    assert [(verdict.who, verdict.cause) for verdict in findings.slow] == [("ranks 1, 3, 5, 7 on node0", "compute")]


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rank_of_a_noisy_job_has_no_long_microbatches(seed: int) -> None:
    findings = found(("slow-rank=3:1.15",), microbatches=8, steps=40, jitter=0.2, seed=seed)

    assert [(verdict.ranks, verdict.cause) for verdict in findings.slow] == [((3,), "compute")]
