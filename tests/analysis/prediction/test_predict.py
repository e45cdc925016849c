"""Predictions for simulated jobs, equal to the step times of the changed jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.changes import BandwidthChange, Changes, LatencyChange, OverlapChange
from commtrace.analysis.prediction.predict import Prediction, predict, steps_drawn
from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.analysis.simulated_schedules import Action, simulate
from tests.pipeline_factory import PipelineJob, one_forward_one_backward

JOB = PipelineJob(
    stages=4, microbatches=8, data_parallel=2, transfer_ns=1_000, all_reduce_ns=50_000, optimizer_ns=300_000, steps=4
)


def predicted(run: Run, **changes: Any) -> Prediction:
    return predict(analyse(run), Changes(**changes)).prediction


def step_ns(run: Run) -> float:
    return predicted(run).fidelity.measured_ns


@pytest.mark.parametrize(
    ("changes", "job"),
    [
        ({}, {}),
        ({"microbatches": 12}, {"microbatches": 12}),
        ({"microbatches": 2}, {"microbatches": 2}),
        ({"recompute": True}, {"backward_ns": 3_000_000}),
        ({"bandwidth": (BandwidthChange("pp", 2.0),)}, {"transfer_ns": 500}),
        ({"bandwidth": (BandwidthChange("dp", 0.5),)}, {"all_reduce_ns": 100_000}),
        ({"latency": (LatencyChange("pp", ns=7_000, is_added=True),)}, {"transfer_ns": 8_000}),
        ({"overlap": (OverlapChange("dp", is_perfect=True),)}, {"all_reduce_ns": 0}),
        (
            {"microbatches": 16, "latency": (LatencyChange("pp", ns=7_000, is_added=True),)},
            {"microbatches": 16, "transfer_ns": 8_000},
        ),
    ],
)
def test_the_answer_is_the_step_time_of_the_changed_job(changes: dict[str, Any], job: dict[str, Any]) -> None:
    answer = predicted(JOB.run(), **changes)

    assert answer.fidelity.error == 0
    assert answer.predicted_ns == step_ns(replace(JOB, **job).run())
    assert answer.uncertainty_ns == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_rank_works_as_its_peers_or_else_as_the_other_stages(replicas: int) -> None:
    healthy = PipelineJob(stages=4, microbatches=8, data_parallel=replicas, steps=4)
    slow = replace(healthy, extra_forward_ns={3: 500_000})

    answer = predicted(slow.run(), without_slow_ranks=(3,))

    assert answer.fidelity.error == 0
    assert answer.fidelity.measured_ns > healthy.step_ns
    assert answer.predicted_ns == healthy.step_ns
    assert len(answer.assumptions) == (1 if replicas == 1 else 0)


@pytest.mark.parametrize("fault", ["gc=0:60", "gc=0:200@4:20:4", "data=1:50"])
def test_pauses_of_a_slow_rank_are_no_part_of_its_other_microbatches(fault: str) -> None:
    made = synthesize(Job(pp=4, dp=2, microbatches=8, layers=8, steps=20, faults=(Fault.parse(fault),)))

    answer = predicted(made.run, without_slow_ranks=(int(fault[fault.index("=") + 1]),))

    assert answer.fidelity.measured_ns > 1.2 * made.step_without_faults_ns
    assert answer.predicted_ns == pytest.approx(made.step_without_faults_ns, rel=0.005)


def test_both_the_slow_rank_and_the_microbatches_can_change() -> None:
    slow = PipelineJob(stages=4, microbatches=8, data_parallel=2, steps=4, extra_forward_ns={3: 500_000})

    answer = predicted(slow.run(), without_slow_ranks=(3,), microbatches=16)

    assert answer.predicted_ns == replace(slow, microbatches=16, extra_forward_ns={}).step_ns
    assert (answer.microbatches, answer.recorded_microbatches) == (16, 8)
    assert answer.throughput_ratio == pytest.approx(2 * answer.fidelity.measured_ns / answer.predicted_ns)


def test_layers_that_move_take_their_time_along() -> None:
    """A layer takes 125 and 250 µs, the head on the last stage 500 µs and 1 ms more."""
    before = uneven_job(layers=(8, 8, 8, 8))

    answer = predicted(before, layers=(8, 9, 8, 7), layers_before=(8, 8, 8, 8))

    assert answer.fidelity.error == 0
    assert answer.predicted_ns == step_ns(uneven_job(layers=(8, 9, 8, 7))) < answer.fidelity.measured_ns
    assert answer.assumptions[0] == "In the run, the stages have 8, 8, 8, 8 layers."
    moved_nothing = predicted(before, layers=(8, 9, 8, 7), layers_before=(8, 9, 8, 7))
    assert moved_nothing.predicted_ns == moved_nothing.fidelity.measured_ns


def uneven_job(layers: Sequence[int]) -> Run:
    orders = [
        [Action(kind, microbatch) for kind, microbatch in one_forward_one_backward(stage, 4, 8)] for stage in range(4)
    ]

    def duration_ns(stage: int, action: Action) -> int:
        return (layers[stage] * 125_000 + (stage == 3) * 500_000) * (1 if action.kind == "forward" else 2)

    return simulate(orders, duration_ns, steps=3)


def simulated(**options: Any) -> Run:
    return synthesize(Job(jitter=0.0, end_scatter_ns=0, gpus_per_host=64, steps=4, layers=16, **options)).run


@pytest.mark.parametrize(
    ("changes", "job"),
    [
        ({"microbatches": 16}, {"microbatches": 16}),
        ({"schedule": "gpipe"}, {"schedule": "gpipe"}),
        ({"schedule": "zero-bubble"}, {"schedule": "zero-bubble"}),
    ],
)
def test_another_schedule_takes_what_the_same_job_takes_with_it(changes: dict[str, Any], job: dict[str, Any]) -> None:
    options = {"pp": 4, "dp": 2, "microbatches": 8}

    answer = predicted(simulated(**options), **changes)

    assert answer.fidelity.error == pytest.approx(0, abs=1e-6)
    assert answer.predicted_ns == pytest.approx(step_ns(simulated(**{**options, **job})), abs=100)


def test_an_interleaved_schedule_halves_the_chunks() -> None:
    options = {"pp": 4, "microbatches": 8}
    whole = simulated(**options, forward_ns=8_000_000, backward_ns=16_000_000)

    answer = predicted(whole, schedule="interleaved", chunks=2)

    assert answer.predicted_ns == pytest.approx(step_ns(simulated(**options, chunks=2)), abs=100)


def test_a_step_without_overlap_is_at_most_as_long_as_predicted() -> None:
    options = {"pp": 2, "dp": 2, "microbatches": 4}
    overlapped = simulated(**options, overlap_grad_reduce=True)

    answer = predicted(overlapped, overlap=(OverlapChange("dp", is_perfect=False),))

    assert answer.fidelity.measured_ns < step_ns(simulated(**options)) < answer.predicted_ns
    assert "queued behind one another" in answer.assumptions[0]


def test_steps_are_drawn_evenly_and_fewer_of_many_ranks() -> None:
    assert steps_drawn(range(5), 8) == (0, 1, 2, 3, 4)
    assert len(steps_drawn(range(1000), 8)) == 40
    assert steps_drawn(range(1000), 16_384) == (0, 333, 666, 999)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"without_slow_ranks": (99,)}, "the run has ranks 0–7"),
        ({"without_slow_ranks": tuple(range(8))}, "no other rank is left"),
        ({"bandwidth": (BandwidthChange("tp", 2.0),)}, "no communication of role tp; they have dp, mp, pp"),
        ({"recompute": False}, "recomputes nothing"),
        ({"layers": (8, 8)}, "names 2 stages, but the pipeline of this run has 4"),
        ({"layers": (8, 9, 8, 7)}, "did not record how many layers its stages have"),
        ({"layers": (8, 8, 8, 9), "layers_before": (8, 8, 8, 8)}, "moving keeps their sum"),
        ({"chunks": 2, "microbatches": 9}, "no multiple"),
    ],
)
def test_what_a_run_cannot_answer_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        predicted(JOB.run(), **changes)


def test_a_run_without_forwards_can_be_replayed_but_not_rescheduled() -> None:
    run = JOB.run()
    bare = replace(
        run,
        ranks={
            rank: replace(trace, spans=trace.spans.take(trace.spans.kind != schema.FORWARD))
            for rank, trace in run.ranks.items()
        },
    )

    assert predicted(bare, bandwidth=(BandwidthChange("pp", 2.0),)).fidelity.error == 0
    with pytest.raises(ConfigurationError, match="recorded no forwards and backwards"):
        predicted(bare, microbatches=16)


def test_a_run_that_lacks_ranks_is_refused() -> None:
    run = JOB.run()
    ranks = {
        rank: replace(trace, metadata=replace(trace.metadata, world_size=8))
        for rank, trace in run.ranks.items()
        if rank < 6
    }

    with pytest.raises(CommtraceError, match="Only 6 of 8 ranks"):
        predicted(replace(run, ranks=ranks))


def test_savings_from_bounds_are_marked_as_bounds() -> None:
    run = JOB.run()
    hidden = {
        rank: replace(trace, spans=trace.spans.replace(end_exact=trace.spans.name != run.name_code("all_reduce")))
        for rank, trace in run.ranks.items()
    }
    changes: dict[str, Any] = {"bandwidth": (BandwidthChange("dp", 2.0),)}
    exact, bound = predicted(run, **changes), predicted(replace(run, ranks=hidden), **changes)

    assert (
        exact.predicted_ns <= bound.predicted_ns == bound.fidelity.measured_ns
    )  # they are no longer than their stalls
    (said,) = set(bound.assumptions) - set(exact.assumptions)
    assert said.startswith("Some transfers of dp all_reduce are upper bounds")
    assert (
        predicted(replace(run, ranks=hidden), bandwidth=(BandwidthChange("pp", 2.0),)).assumptions
        == predicted(run, bandwidth=(BandwidthChange("pp", 2.0),)).assumptions
    )
