"""Late hosts are told from slow devices, and a job whose hosts are all late is said to be launch-bound."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.analysis.stragglers.search import Judgement
from commtrace.analysis.summary import summarise
from commtrace.synth import Fault, Job, Synthetic, synthesize
from tests.analysis.stragglers.judged_jobs import judged
from tests.findings.reading import ms


def causes(findings: Judgement) -> list[tuple[tuple[int, ...], str]]:
    return [(verdict.ranks, verdict.cause) for verdict in findings.slow]


@pytest.mark.parametrize(
    ("faults", "options", "expected"),
    [
        (["late-host=1:1.3"], {"dp": 4}, [((1,), "host")]),
        (["late-host=1:1.1"], {"dp": 8}, [((1,), "host")]),
        (["late-host=2,5:1.4"], {"dp": 8}, [((2, 5), "host")]),
        (["late-host=1:1.5"], {"dp": 4, "pp": 2}, [((1,), "host")]),
        (["late-host=3:2.5"], {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4}, [((3,), "host")]),
        (["slow-rank=3:1.3"], {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4}, [((3,), "compute")]),
        (["slow-rank=1:1.3"], {"dp": 4}, [((1,), "compute")]),
        (["slow-forward=1:1.4"], {"dp": 4}, [((1,), "forward")]),
        (["slow-backward=1:1.4"], {"dp": 4, "pp": 2}, [((1,), "backward")]),
        (["late-host=1:1.4", "slow-rank=2:1.2"], {"dp": 8}, [((1,), "host"), ((2,), "compute")]),
        (["late-launch=1:40"], {"dp": 4}, [((1,), "late_launch")]),
    ],
)
def test_a_late_host_is_the_cause_where_the_device_waits_for_it(
    faults: list[str], options: dict[str, Any], expected: list[tuple[tuple[int, ...], str]]
) -> None:
    findings, _ = judged(faults, steps=14, **options)

    assert sorted(causes(findings)) == sorted(expected)


def test_the_evidence_separates_both() -> None:
    late, _ = judged(["late-host=1:1.3"], dp=4, steps=14)
    slow, _ = judged(["slow-rank=1:1.3"], dp=4, steps=14)

    assert "Launch-bound: its device had nothing queued at both ends of 98% of its work (peers 0%)" in (
        late.slow[0].evidence
    )
    assert late.slow[0].evidence.endswith("the host launches too late.")
    assert slow.slow[0].evidence.endswith("Work was queued for its device all the time: no host is late.")


def synthetic(*faults: str, **options: Any) -> Synthetic:
    return synthesize(Job(**{"dp": 4, "steps": 14, **options, "faults": tuple(map(Fault.parse, faults))}))


def test_nobody_is_named_where_all_hosts_are_late_but_the_job_is() -> None:
    made = synthetic("late-launch=0,1,2,3:20")
    summary = summarise(made.run)

    (verdict,) = summary.slow
    assert (verdict.place, verdict.cause, verdict.ranks, verdict.who) == ("job", "host", (), "launch-bound work")
    assert ms(verdict.cost_ns) == pytest.approx(made.truth["faults"][0]["cost_ns_per_step"] / 1e6, rel=0.05)
    assert not verdict.cost_is_bound
    assert "The cost is that of gaps before phases" in verdict.evidence
    assert "Launch-bound work, late host: 20 ms per step (13.9% of it)." in summary.verdict
    assert summary.lost_time is not None
    assert summary.lost_time.stragglers_ns == 0


def test_inside_of_phases_the_cost_of_a_launch_bound_job_is_an_upper_bound() -> None:
    made = synthetic("late-host=0,1,2,3:1.3")
    summary = summarise(made.run)

    (verdict,) = summary.slow
    assert (verdict.place, verdict.cause, verdict.cost_is_bound) == ("job", "host", True)
    assert ms(verdict.cost_ns) >= made.truth["faults"][0]["cost_ns_per_step"] / 1e6
    assert "the cost is an upper bound" in verdict.evidence
    assert summary.verdict.startswith("Launch-bound work, late host: at most ")


@pytest.mark.parametrize("faults", [(), ("slow-rank=0,1,2,3:1.3",), ("data=0,1,2,3:30",), ("gc=0,1,2,3:20",)])
def test_a_job_whose_devices_are_busy_is_not_launch_bound(faults: tuple[str, ...]) -> None:
    assert [one.cause for one in summarise(synthetic(*faults).run).slow] == []


def test_a_slow_rank_of_a_launch_bound_job_is_named_beside_it() -> None:
    summary = summarise(synthetic("late-launch=0,1,2,3:20", "slow-rank=1:1.3").run)

    assert [(one.ranks, one.cause) for one in summary.slow] == [((1,), "compute"), ((), "host")]
