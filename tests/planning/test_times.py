"""Times at bandwidths, and the bandwidth that compute would hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.windows.run import OpenedRun
from commtrace.errors import ConfigurationError
from commtrace.planning.communication import Traffic
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan, make_plan
from commtrace.planning.times import (
    IterationTime,
    MeasuredJob,
    RoleTime,
    compute_seconds,
    iteration_time,
    measure_communication,
    measured_rates,
    parse_bandwidths,
    pipelined_time,
    role_times,
)
from commtrace.synth import Job, synthesize
from commtrace.trace import schema
from tests.factory import collective, group, make_run, span, stall

MODEL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)
GBYTES = 10**9


def plan_that_sends(num_bytes: int, role: str = "dp") -> Plan:
    plan = make_plan(MODEL, Layout(dp=8))
    sent = Traffic(role, "send", "gradients", "step", 1, num_bytes, 8)
    return replace(plan, stages=(replace(plan.stages[0], traffic=(sent,)),))


@pytest.mark.parametrize(
    ("bandwidth", "seconds", "is_hidden"),
    [("300GB/s", 0.053, True), ("200Gbit/s", 0.64, False), ("400Gbit/s", 0.32, True)],
)
def test_two_billion_parameters_on_eight_gpus(bandwidth: str, seconds: float, is_hidden: bool) -> None:
    """2·10⁹ parameters send 16 GB in a step, of 65.536 TFLOP for each GPU, at 156 TFLOP/s."""
    compute = 65.536 / 156
    (time,) = role_times(plan_that_sends(16 * GBYTES), parse_bandwidths([f"dp={bandwidth}"]), compute)

    assert compute == pytest.approx(0.42, abs=0.001)
    assert time.seconds == pytest.approx(seconds, abs=0.0005)
    assert time.is_hidden is is_hidden
    assert time.hiding_bytes_per_second == pytest.approx(38.09e9, rel=1e-3)


def test_compute_is_that_of_the_model_on_all_gpus() -> None:
    model = Model(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=50_304)
    layout = Layout(tp=2, dp=4, microbatch=2, microbatches=3)
    h, s, layers, vocabulary = 4096, 2048, 32, 50_304
    flops = 72 * 24 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))

    assert compute_seconds(make_plan(model, layout), 100) == pytest.approx(flops / 8 / 100e12)
    again = compute_seconds(make_plan(model, replace(layout, recompute="full")), 100)
    assert again == pytest.approx(4 / 3 * flops / 8 / 100e12)


def test_every_role_has_its_time() -> None:
    plan = make_plan(MODEL, Layout(tp=2, pp=2, dp=2, microbatches=4))
    times = {(one.stage, one.role): one for one in role_times(plan, {"tp": 2e6, "all": 1e6})}
    sent = {row.role: 0 for row in plan.stages[1].traffic}
    for row in plan.stages[1].traffic:
        sent[row.role] += row.wire_bytes

    assert {role for stage, role in times if stage == 1} == set(sent)
    for role, num_bytes in sent.items():
        assert times[1, role].seconds == num_bytes / (2e6 if role == "tp" else 1e6)
        assert times[1, role].hiding_bytes_per_second is None
        assert times[1, role].is_hidden is None
    assert role_times(plan, {})[0].seconds is None


def test_a_role_that_does_not_communicate_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--bandwidth names ep, but the plan communicates over dp"):
        role_times(plan_that_sends(1), {"ep": 1.0})


@pytest.mark.parametrize("text", ["tp", "tp=300", "=300GB/s", "tp=0GB/s", "tp=fastGB/s", "tp=1GB/h"])
def test_a_rate_needs_its_unit(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write a role and a rate, as tp=300GB/s"):
        parse_bandwidths([text])


def test_units() -> None:
    assert parse_bandwidths(["tp=1.5TB/s", "all=80Mbit/s", "dp-cp=200Gbit/s"]) == {
        "tp": 1.5e12, "all": 1e7, "dp-cp": 25e9,
    }  # fmt: skip


def test_bandwidth_and_compute_of_a_recorded_run() -> None:
    """Each of two ranks reduces 1200 bytes (factor 1) in 200 ns, 6 bytes per ns, and computes for 600 ns."""
    pair = group("dp", 0, 1)
    rows = {}
    for rank in (0, 1):
        reduce = collective("all_reduce", pair, 0, 600, 800, id=1, bytes=1200, step=0)
        rows[rank] = [
            span("step", 0, 1000, step=0), span("forward", 0, 600, step=0), reduce, stall(reduce, 600, 800, step=0),
        ]  # fmt: skip
    measured = OpenedRun.of(analyse(make_run(rows, [pair]))).measure(measure_communication)

    rates = measured_rates(measured, plan_that_sends(1, "dp-cp"))
    assert rates.bandwidths == pytest.approx({"dp-cp": 6e9})
    assert rates == MeasuredJob(rates.bandwidths, 600e-9)
    assert measured_rates(measured, plan_that_sends(1, "tp")).bandwidths == {}
    for rank in (0, 1):
        rows[rank][2]["end_exact"] = False
    bounds = OpenedRun.of(analyse(make_run(rows, [pair]))).measure(measure_communication)
    assert measured_rates(bounds, plan_that_sends(1, "dp-cp")).at_least == ("dp-cp",)


def test_an_iteration_takes_between_its_longest_part_and_the_sum() -> None:
    def role(stage: int, name: str, seconds: float | None) -> RoleTime:
        return RoleTime(stage, name, 1, None, seconds, None)

    roles = [role(0, "tp", 3.0), role(1, "tp", 2.0), role(1, "pp", 2.0), role(1, "mp", None)]

    assert iteration_time(roles, 1.0) == IterationTime(1, 3.0, 5.0)
    assert iteration_time(roles, 9.0) == IterationTime(1, 9.0, 13.0)
    assert iteration_time(roles, None) is None
    assert iteration_time([role(0, "tp", None)], 1.0) is None


@pytest.mark.parametrize(
    "job", [Job(pp=4, layers=32), Job(pp=2, dp=2, chunks=2, layers=32), Job(pp=8, microbatches=16, layers=32)]
)
def test_an_iteration_with_its_bubble_takes_to_the_nanosecond_what_the_simulator_takes(job: Job) -> None:
    job = replace(job, jitter=0.0, end_scatter_ns=0, data_ns=0, steps=1, gpus_per_host=64)
    model = Model(layers=32, hidden=job.hidden, heads=16, sequence=job.sequence, vocabulary=32_000)
    plan = make_plan(model, Layout(pp=job.pp, dp=job.dp, chunks=job.chunks, microbatches=job.microbatches))
    compute = job.microbatches * job.chunks * (job.forward_ns + job.backward_ns) / 1e9
    message_ns = job.network.transfer_ns("recv", 2 * job.sequence * job.hidden, 2, same_host=True)
    messages = [sum(row.count for row in stage.traffic if row.role == "pp") for stage in plan.stages]
    sent = [RoleTime(stage, "pp", 1, None, count * message_ns / 1e9, None) for stage, count in enumerate(messages)]

    time = pipelined_time(plan, sent, compute)

    assert time is not None
    simulated = synthesize(job)
    assert round(time.all_hidden_seconds * 1e9) == simulated.truth["ideal"]["pipeline_ns"]
    spans = [trace.spans for trace in simulated.run.ranks.values()]
    last_backward = max(int(rows.end[rows.kind == schema.BACKWARD].max()) for rows in spans)
    begin = min(int(rows.start[rows.kind == schema.STEP].min()) for rows in spans)
    assert round(time.none_hidden_seconds * 1e9) == last_backward - begin


def test_without_a_pipeline_no_bubble_comes_on_top() -> None:
    assert pipelined_time(plan_that_sends(1), [RoleTime(0, "dp", 1, None, 1.0, None)], 1.0) is None
