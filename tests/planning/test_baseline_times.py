"""Times of a plan's calls by a baseline: at their sizes, in their groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.planning.baseline_times import baseline_times
from commtrace.planning.communication import Traffic
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan, make_plan
from commtrace.planning.times import role_times

MODEL = Model(layers=4, hidden=64, heads=4, sequence=32, vocabulary=128)
KIB, MIB = 1 << 10, 1 << 20
NODES = ("a", "b")


def measured(ranks: tuple[int, ...], num_bytes: int, time_ns: float, operation: str = "all_reduce") -> Measurement:
    nodes = tuple(dict.fromkeys(NODES[rank // 4] for rank in ranks))
    return Measurement(operation, ranks, nodes, num_bytes, "float32", 20, MeasuredSpread(time_ns, time_ns, time_ns))


def plan_of(*traffic: Traffic, **layout: Any) -> Plan:
    plan = make_plan(MODEL, Layout(**layout))
    return replace(plan, stages=tuple(replace(stage, traffic=traffic) for stage in plan.stages))


def sent(role: str, operation: str, count: int, num_bytes: int, group_size: int) -> Traffic:
    return Traffic(role, operation, "gradients", "step", count, num_bytes, group_size)


def test_each_call_takes_as_long_as_at_its_size() -> None:
    ranks = (0, 1, 2, 3)
    baseline = NetworkBaseline({}, (measured(ranks, MIB, 1_000), measured(ranks, 4 * MIB, 16_000)))
    plan = plan_of(sent("tp", "all_reduce", 3, 2 * MIB, 4), sent("tp", "all_reduce", 1, 4, 4), tp=4)

    found = baseline_times(plan, baseline)

    # 2 MiB lies between both in logarithms; 4 bytes take as long as the smallest that was measured.
    assert found.seconds == {(0, "tp"): pytest.approx((3 * 4_000 + 1_000) / 1e9)}
    assert found.not_measured == ()
    (time,) = role_times(plan, {"all": 1e9}, None, found.seconds)
    wire_bytes = round(3 * 2 * MIB * 1.5) + round(4 * 1.5)
    assert time.wire_bytes == wire_bytes
    assert time.seconds == pytest.approx(13e-6)
    assert time.bytes_per_second == pytest.approx(wire_bytes / 13e-6)


def test_groups_on_several_nodes_are_compared_with_such() -> None:
    within, between = (0, 1, 2, 3), (0, 1, 4, 5)
    baseline = NetworkBaseline({}, (measured(within, MIB, 1_000), measured(between, MIB, 9_000)))
    plan = plan_of(sent("tp", "all_reduce", 1, MIB, 4), sent("dp-cp", "all_reduce", 1, MIB, 4), tp=4, dp=4)

    assert baseline_times(plan, baseline).seconds == pytest.approx({(0, "tp"): 1e-6, (0, "dp-cp"): 9e-6})


def test_activations_go_on_gradients_go_back_and_a_receive_takes_no_time_of_its_own() -> None:
    pairs = (measured((0, 3), MIB, 2_000, "send"), measured((0, 4), MIB, 7_000, "send"))
    baseline = NetworkBaseline({}, (*pairs, measured((0, 1, 2, 3), MIB, 1_000)))
    # Stages of two ranks: 0 and 1, 2 and 3, 4 and 5, 6 and 7. The second and the third are on two nodes.
    plan = make_plan(MODEL, Layout(pp=4, dp=2, microbatches=4))
    one_size = tuple(
        replace(stage, traffic=tuple(replace(row, bytes_per_call=MIB) for row in stage.traffic if row.role == "pp"))
        for stage in plan.stages
    )

    seconds = baseline_times(replace(plan, stages=one_size), baseline).seconds

    within, between = 4 * 2_000 / 1e9, 4 * 7_000 / 1e9
    assert seconds == pytest.approx(
        {(0, "pp"): within, (1, "pp"): within + between, (2, "pp"): within + between, (3, "pp"): within}
    )


def test_chunks_send_around_the_end_of_the_pipeline() -> None:
    baseline = NetworkBaseline({}, (measured((0, 3), MIB, 2_000, "send"), measured((0, 4), MIB, 7_000, "send")))
    plan = make_plan(MODEL, Layout(pp=2, dp=4, chunks=2, microbatches=2))
    own = tuple(replace(row, bytes_per_call=MIB) for row in plan.stages[1].traffic if row.role == "pp")
    plan = replace(plan, stages=(replace(plan.stages[1], traffic=own),))

    # Of 2 microbatches in 2 chunks the last stage sends 2 activations on, to the first stage, and 4 gradients back.
    assert baseline_times(plan, baseline).seconds == pytest.approx({(1, "pp"): 6 * 7_000 / 1e9})


def test_a_role_of_which_something_is_not_measured_has_no_time() -> None:
    baseline = NetworkBaseline({}, (measured((0, 1, 2, 3), MIB, 1_000),))
    plan = plan_of(
        sent("tp", "all_reduce", 1, MIB, 4),
        sent("tp", "all_gather", 1, KIB, 4),
        sent("tp", "all_reduce", 1, 9 * MIB, 4),
        tp=4,
    )

    found = baseline_times(plan, baseline)

    assert found.seconds == {}
    assert found.not_measured == (
        "all_gather of 1,024 bytes by 4 ranks within a node",
        "all_reduce of 9,437,184 bytes by 4 ranks within a node",
    )
    assert role_times(plan, {}, None, found.seconds)[0].seconds is None
