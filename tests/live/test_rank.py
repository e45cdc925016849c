from __future__ import annotations

from pathlib import Path

from commtrace.analysis.breakdown.run_budget import run_budget
from commtrace.live.rank import KNOWN_PARTS, LiveBudget, LiveRank
from commtrace.trace import schema
from commtrace.trace.metadata import DeviceState
from commtrace.trace.schema import Row
from commtrace.trace.topology import Topology
from tests.factory import make_run, span
from tests.trace.rows import mark, metadata


def test_identity_holds_the_place_in_every_dimension_under_names_that_can_be_labels() -> None:
    live = LiveRank(metadata(rank=5, node="n2"), Path("run"))
    live.learn(mark("topology", {"coordinates": {"pp": 1, "dp-shard": 2, "2d": 0, "rank": 9}}))

    assert live.identity() == {
        "run_id": "r1", "rank": "5", "node": "n2", "local_rank": "5", "pp": "1", "dp_shard": "2", "dim_2d": "0",
    }  # fmt: skip


def test_instants_are_put_on_the_wall_clock_by_the_newest_comparison() -> None:
    live = LiveRank(metadata(), Path("run"))
    assert live.epoch_ns(1_005) == 1_700_000_000_000_001_000
    assert live.clock() == (0, 20)

    live.learn(
        mark("clock_anchor", {"monotonic_ns": 2_005, "realtime_ns": 1_700_000_000_000_002_500, "bracket_ns": 60})
    )
    assert live.epoch_ns(2_005) == 1_700_000_000_000_002_500
    assert live.clock() == (500, 30)


def test_readings_of_the_device_are_reported_once() -> None:
    live = LiveRank(metadata(), Path("run"))
    live.learn(mark("device_state", {"at_ns": 5, "clock_mhz": 1095, "slowdowns": ["power brake"]}))

    assert live.take_device_states() == (DeviceState(5, clock_mhz=1095, slowdowns=("power brake",)),)
    assert live.take_device_states() == ()


TOLD: Topology = {"process_start_ns": 0}


def row(kind: int, start: int, end: int) -> Row:
    return Row(kind, "", schema.COMPUTE, start, end)


PASSES = [
    [row(schema.CHECKPOINT, 10, 20)],
    [row(schema.STEP, 30, 40), row(schema.FORWARD, 30, 35), row(schema.STEP, 40, 50)],
    [row(schema.EVALUATION, 50, 70), row(schema.DATA, 72, 75)],
    [row(schema.EVALUATION, 78, 79), row(schema.STEP, 75, 85)],
]


def test_the_parts_add_up_to_the_time_until_the_last_step() -> None:
    budget = LiveBudget()
    for rows in PASSES:
        budget.add(rows, TOLD)

    seconds = {part: round(time * 1e9) for part, time in budget.seconds().items()}
    assert seconds == {"training": 29, "evaluation": 21, "checkpoint": 10, "loading": 3, "start": 20, "unknown": 2}
    assert sum(seconds.values()) == 85


def test_it_agrees_with_what_is_read_afterwards() -> None:
    budget = LiveBudget()
    for rows in PASSES:
        budget.add(rows, TOLD)
    spans = [span(schema.KINDS[one.kind], one.start, one.end, step=-1) for rows in PASSES for one in rows]
    run = make_run({0: spans}, topology=TOLD)
    job = run_budget(run).job

    assert {part: round(time * 1e9) for part, time in budget.seconds().items()} == {
        part: getattr(job, f"{part}_ns") for part in KNOWN_PARTS
    }


def test_goodput_falls_while_nothing_ends() -> None:
    budget = LiveBudget()
    assert budget.goodput(100) is None
    budget.add([row(schema.STEP, 50, 100)], TOLD)

    assert budget.goodput(100) == 0.5
    assert budget.goodput(1_000) == 0.05


def test_without_the_steps_before_the_window_nobody_knows_what_was_there() -> None:
    budget = LiveBudget()
    budget.add([row(schema.STEP, 50, 100)], {**TOLD, "recording": {"steps": "10:20"}})

    assert budget.seconds()["unknown"] == 50e-9
    assert budget.seconds()["start"] == 0.0


def test_time_between_two_steps_is_no_training() -> None:
    budget = LiveBudget()
    first = [row(schema.STEP, 0, 100), row(schema.BETWEEN, 100, 140), row(schema.STEP, 100, 200)]
    budget.add([*first, row(schema.BETWEEN, 200, 230)], {})
    budget.add([row(schema.STEP, 200, 300)], {})

    seconds = {part: round(time * 1e9) for part, time in budget.seconds().items()}
    assert (seconds["training"], seconds["unknown"]) == (100 + 60 + 70, 40 + 30)
