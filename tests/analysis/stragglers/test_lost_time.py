"""What the steps took beyond the ideal: jobs whose schedule says the answer, and that it always adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from commtrace.analysis.stragglers.lost_time import LostTime, lost_time
from commtrace.synth import FREE, Fault, Job
from tests.analysis.stragglers.analysed_jobs import analysed

MS = 1_000_000
STEPS = 10
EXACT = Job(dp=4, steps=STEPS, microbatches=4, jitter=0.0, end_scatter_ns=0, network=FREE)
WORK = 4 * (EXACT.forward_ns + EXACT.backward_ns) + EXACT.optimizer_ns


def lost_by(job: Job) -> LostTime:
    made = analysed(job)
    lost = made.lost(made.slow)
    assert sum(lost.costs_ns().values()) == lost.steps_ns - lost.ideal_ns
    return lost


def test_a_job_that_only_works_loses_nothing_but_its_input() -> None:
    lost = lost_by(EXACT)

    assert {name: ns for name, ns in lost.costs_ns().items() if ns} == {"input_ns": STEPS * EXACT.data_ns}
    assert lost.ideal_ns == STEPS * WORK
    assert lost.num_steps == STEPS


def test_a_pipeline_of_equal_stages_loses_its_bubble() -> None:
    """1F1B: (p − 1)(F + B)."""
    lost = lost_by(replace(EXACT, dp=2, pp=4, microbatches=8))

    assert lost.bubble_ns == STEPS * 3 * (EXACT.forward_ns + EXACT.backward_ns)
    assert lost.imbalance_ns == lost.stragglers_ns == 0


def test_a_slow_rank_costs_what_its_verdict_says_and_no_imbalance_is_left() -> None:
    lost = lost_by(replace(EXACT, faults=(Fault("slow-rank", (2,), 1.5),)))

    assert lost.stragglers_ns == pytest.approx(STEPS * WORK / 2, rel=1e-6)
    assert lost.imbalance_ns == pytest.approx(0, abs=STEPS * 1_000)
    assert lost.ideal_ns == STEPS * WORK


@pytest.mark.parametrize("fault", ["data", "gc"])
def test_the_cost_of_a_verdict_is_reported_once(fault: str) -> None:
    lost = lost_by(replace(EXACT, faults=(Fault(fault, (1,), 30.0),)))

    assert lost.stragglers_ns == pytest.approx(STEPS * 30 * MS, rel=1e-6)
    assert lost.input_ns == pytest.approx(STEPS * EXACT.data_ns, abs=STEPS * 1_000)
    assert lost.rest_ns == pytest.approx(0, abs=STEPS * 1_000)


def test_garbage_collection_that_nobody_is_named_for_is_in_the_rest() -> None:
    job = analysed(replace(EXACT, faults=(Fault("gc", (1,), 30.0),)))

    assert job.lost(()).rest_ns == STEPS * 30 * MS


def test_an_uneven_stage_is_imbalance() -> None:
    """Stages of 1 and 2 are compared with two stages of 1.5, in which the mean rank works as long."""
    even = replace(EXACT, dp=2, pp=2, microbatches=8, optimizer_ns=0)
    job = analysed(replace(even, faults=(Fault("uneven-stage", (1,), 2.0),)))
    lost = job.lost(())
    microbatch = 3 * (EXACT.forward_ns + EXACT.backward_ns) // 2

    assert lost.ideal_ns == STEPS * 8 * microbatch
    assert lost.bubble_ns == STEPS * microbatch
    # Eight microbatches of the slow stage, and the first and last one of the other, instead of nine of 1.5.
    assert lost.imbalance_ns == STEPS * ((16 + 1) * (EXACT.forward_ns + EXACT.backward_ns) - 9 * microbatch)


def test_transfers_are_exposed_communication() -> None:
    job = replace(EXACT, network=Job().network)
    free, dear = lost_by(EXACT), lost_by(job)

    assert dear.exposed_communication_ns == dear.steps_ns - free.steps_ns > 0
    assert replace(dear, steps_ns=free.steps_ns, exposed_communication_ns=0) == free


def test_a_verdict_takes_no_more_than_there_is() -> None:
    job = analysed(replace(EXACT, faults=(Fault("slow-rank", (2,), 1.5),)))
    lost = job.lost([structs.replace(job.slow[0], cost_ns=1e12)] * 2)

    assert lost.imbalance_ns == 0
    assert sum(lost.costs_ns().values()) == lost.steps_ns - lost.ideal_ns


def test_verdicts_that_cost_more_than_there_is_share_it_in_proportion() -> None:
    """Whichever comes first in the list, and whether the cost stays in the imbalance or not."""
    job = analysed(replace(EXACT, faults=(Fault("slow-rank", (2,), 1.5),)))
    (slow,) = job.slow
    lost_ns = job.lost(()).imbalance_ns
    three = [
        structs.replace(slow, cost_ns=1e12),
        structs.replace(slow, cost_ns=3e12),
        structs.replace(slow, cost_ns=3e12, cause="stage_imbalance"),
    ]
    lost, backwards = job.lost(three), job.lost(three[::-1])

    assert sum(lost.of_findings) == sum(backwards.of_findings) == lost_ns
    assert lost.of_findings == pytest.approx([lost_ns / 7, 3 * lost_ns / 7, 3 * lost_ns / 7], abs=1)
    assert backwards.of_findings[::-1] == pytest.approx(lost.of_findings, abs=1)
    assert (lost.stragglers_ns, lost.imbalance_ns) == (sum(lost.of_findings[:2]), lost.of_findings[2])
    assert sum(lost.costs_ns().values()) == lost.steps_ns - lost.ideal_ns


def test_verdicts_take_nothing_of_a_line_below_zero() -> None:
    job = analysed(replace(EXACT, faults=(Fault("gc", (1,), 30.0),)))
    sums = job.replayed.sums
    shorter = replace(job.replayed, sums=sums._replace(measured_ns=sums.measured_ns - STEPS * 31 * MS))
    lost = lost_time(job.statistics, shorter, job.slow)

    assert lost.rest_ns < 0
    assert (lost.stragglers_ns, lost.of_findings) == (0, (0,))


@pytest.mark.parametrize(
    "job",
    [
        Job(dp=3, steps=9, microbatches=2, jitter=0.2, seed=1, overlap_grad_reduce=True),
        Job(tp=2, pp=2, dp=2, steps=8, jitter=0.3, seed=3, microbatches=4, layers=4, missing=0.02),
        Job(pp=2, chunks=2, microbatches=4, steps=8, jitter=0.05, seed=4, faults=(Fault("sequence-imbalance"),)),
    ],
)
def test_it_always_adds_up(job: Job) -> None:
    lost_by(job)
