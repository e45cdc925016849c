"""Pipelines as graphs: worked out by hand, and to the nanosecond what the simulator makes of the same schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.pipeline_graph import PipelineGraph, pipeline_graph
from commtrace.analysis.prediction.predict import predict
from commtrace.errors import ConfigurationError
from commtrace.synth import Fault, Job, Network, synthesize
from commtrace.trace import schema
from commtrace.trace.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, WRITTEN, Action, orders
from commtrace.trace.spans import Int64

F, B = 10, 20


def phase_ns(schedule: str, stages: int, microbatches: int, chunks: int = 1, **times: object) -> int:
    graph = pipeline_graph(orders(schedule, stages, microbatches, chunks))
    busy = [F if action.letter == FORWARD else B for action in graph.actions]
    return graph.phase_ns(graph.weights([0] * len(busy), busy, **times))  # type: ignore[arg-type]


def test_the_bubble_of_equal_stages_is_that_of_the_formula() -> None:
    assert phase_ns("1f1b", 4, 8) == phase_ns("gpipe", 4, 8) == (8 + 3) * (F + B)
    assert phase_ns("interleaved_1f1b", 4, 8, 2) == (2 * 8 + 3) * (F + B)
    assert phase_ns("1f1b", 1, 3) == 3 * (F + B)


def test_messages_begin_when_they_were_sent_and_the_receiver_asks() -> None:
    # F0 of stage 1 and B0 of stage 0 begin a transfer and a delay later
    assert phase_ns("1f1b", 2, 1, transfer_ns=3) == 2 * (F + B) + 2 * 3
    assert phase_ns("1f1b", 2, 1, transfer_ns=3, send_delay_ns=2) == 2 * (F + B) + 2 * (3 + 2)
    # F1 has arrived before stage 1 asks, which then waits for a transfer all the same, unless it receives early
    late, early = (phase_ns("1f1b", 2, 2, transfer_ns=3, receives_early=is_early) for is_early in (False, True))
    assert (late, early) == (3 * (F + B) + 3 * 3, 3 * (F + B) + 2 * 3)


def test_an_input_that_no_stage_makes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="microbatch 1 was not recorded on all stages"):
        pipeline_graph([[Action("F", 0)], [Action("F", 1)]])


JOBS = st.builds(
    lambda schedule, chunks, groups, **sizes: Job(
        schedule=schedule,
        chunks=chunks if schedule not in ("gpipe", "1f1b", "zb1p") else 1,
        microbatches=groups * sizes["pp"],
        layers=24,
        jitter=0.0,
        end_scatter_ns=0,
        steps=1,
        **sizes,
    ),
    schedule=st.sampled_from(WRITTEN),
    chunks=st.integers(2, 3),
    groups=st.integers(1, 4),
    pp=st.integers(2, 5),
    forward_ns=st.integers(1, 5_000_000),
    backward_ns=st.integers(2, 9_000_000),
    data_ns=st.integers(0, 300_000),
    gpus_per_host=st.integers(1, 4),
    network=st.builds(
        Network,
        latency_ns=st.integers(0, 100_000),
        host_gbps=st.floats(1, 1000),
        network_gbps=st.floats(1, 1000),
    ),
    faults=st.sampled_from([(), (Fault.parse("uneven-stage=1:1.37"),)]),
)


@settings(max_examples=200, deadline=None)
@given(job=JOBS)
def test_a_schedule_takes_to_the_nanosecond_what_the_simulator_takes(job: Job) -> None:
    graph = pipeline_graph(orders(job.order, job.pp, job.microbatches, job.chunks))

    assert graph.phase_ns(_weights(graph, job)) == _simulated_phase_ns(job)


def _weights(graph: PipelineGraph, job: Job) -> Int64:
    usual = {
        FORWARD: job.forward_ns,
        BACKWARD: job.backward_ns,
        INPUT: job.backward_ns - job.weight_ns,
        WEIGHTS: job.weight_ns,
    }
    factor = np.where(graph.stage == 1, job.faults[0].amount if job.faults else 1.0, 1.0)
    busy = np.rint(np.array([usual[action.letter] for action in graph.actions]) * factor).astype(np.int64)
    gaps = np.zeros(len(busy), np.int64)
    gaps[graph.first_action[:-1]] = job.data_ns
    num_bytes = 2 * job.sequence * job.hidden
    transfers = [
        job.network.transfer_ns("recv", num_bytes, 2, same_host=first // job.gpus_per_host == last // job.gpus_per_host)
        for first, last in zip(graph.stage[graph.sender].tolist(), graph.stage[graph.receiver].tolist(), strict=True)
    ]
    return graph.weights(gaps, busy, transfer_ns=transfers)


def _simulated_phase_ns(job: Job) -> int:
    traces = synthesize(job).run.ranks.values()
    actions = (schema.FORWARD, schema.BACKWARD)
    ends = [trace.spans.end[np.isin(trace.spans.kind, actions)].max() for trace in traces]
    starts = [trace.spans.start[trace.spans.kind == schema.STEP].min() for trace in traces]
    return int(max(ends) - min(starts))


ONE_CHUNK = st.sampled_from(["gpipe", "1f1b", "zb1p"])


@settings(max_examples=25, deadline=None)
@given(
    job=JOBS, recorded=ONE_CHUNK, other=ONE_CHUNK, microbatches=st.integers(1, 12), half_ns=st.integers(1, 4_000_000)
)
def test_a_recorded_job_tells_to_the_nanosecond_what_another_schedule_takes(
    job: Job, recorded: str, other: str, microbatches: int, half_ns: int
) -> None:
    # Halves of backwards are whole ns, and all messages take the same time: whatif knows one time for each rank.
    job = replace(job, schedule=recorded, chunks=1, backward_ns=2 * half_ns, gpus_per_host=8, faults=())
    truth = synthesize(replace(job, schedule=other, microbatches=microbatches)).truth
    answer = predict(analyse(synthesize(job).run), Changes(schedule=other, microbatches=microbatches)).prediction

    assert (answer.predicted_ns, answer.fidelity.error) == (truth["mean_step_ns"], 0)


def test_a_backward_whose_weights_were_recorded_apart_is_counted_once() -> None:
    job = Job(pp=4, microbatches=8, schedule="zb1p", layers=8, jitter=0.0, end_scatter_ns=0, steps=2)
    answer = predict(analyse(synthesize(job).run), Changes(microbatches=8)).prediction

    assert answer.predicted_ns == answer.fidelity.measured_ns
