"""What recording costs a running rank, and the quiet steps that listeners never hear of."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from commtrace.live.collector import StepCollector
from commtrace.live.own_cost import OwnCostMeter
from commtrace.live.rank import LiveRank
from commtrace.trace import schema
from commtrace.trace.quiet import QuietChange
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.selection import QuietPlan
from tests.live.listeners import Listener
from tests.trace.rows import metadata, row

PLAN = QuietPlan(3)
QUIET_NS, COST_NS = 1_000_000, 20_000


def rows_of_job(steps: int) -> list[list[Row]]:
    """The rows of each step of a job whose steps take longer while they are recorded, and counts of the script."""
    now, rows = 0, []
    for step in range(steps):
        is_quiet = PLAN.is_quiet(step)
        length = QUIET_NS + (0 if is_quiet else COST_NS)
        own = [mark_row("count", {"tokens": 10}, step, now + 1)]
        if is_quiet or PLAN.is_quiet(step - 1):
            own.append(mark_row("quiet", structs.asdict(QuietChange(step, is_quiet)), step, now))
        if not is_quiet:
            own.append(row(kind=schema.FORWARD, name="forward", step=step, start=now, end=now + 500_000))
        own.append(row(kind=schema.STEP, name="step", step=step, start=now, end=now + length))
        rows.append(own)
        now += length
    return rows


@pytest.mark.parametrize("steps_at_once", [1, 7, 1_000])
def test_listeners_get_recorded_steps_alone_and_the_rank_knows_the_cost(steps_at_once: int) -> None:
    listener = Listener()
    rank = LiveRank(metadata(), Path("run"))
    collector = StepCollector(rank, [listener], thread_ns=lambda: 0)
    job = rows_of_job(800)
    for begin in range(0, len(job), steps_at_once):
        collector.write([each for rows in job[begin : begin + steps_at_once] for each in rows])
    collector.close()

    quiet = [step for step in range(800) if PLAN.is_quiet(step)]
    assert [summary.step for summary in listener.summaries] == [step for step in range(800) if step not in quiet]
    assert {summary.counts["tokens"] for summary in listener.summaries} == {10}
    assert {summary.compute_ns["forward"] for summary in listener.summaries} == {500_000}
    assert rank.own_cost.counts == {"tokens": 10 * len(quiet)}
    assert rank.own_cost.cost is not None
    assert structs.astuple(rank.own_cost.cost) == (7, QUIET_NS, COST_NS, 0)
    assert rank.marks.quiet == []


def test_what_was_dropped_before_a_quiet_step_is_told_with_the_next_recorded_one() -> None:
    listener = Listener()
    dropped = {"module": 0}
    collector = StepCollector(
        LiveRank(metadata(), Path("run")), [listener], thread_ns=lambda: 0, dropped=lambda: dict(dropped)
    )
    first = next(step for step in range(800) if PLAN.is_quiet(step))
    for step, rows in enumerate(rows_of_job(first + 10)):
        if step == first:
            dropped["module"] = 5
        collector.write(rows)
    collector.close()

    told = {summary.step: summary.dropped for summary in listener.summaries if summary.dropped}
    assert [*told.values()] == [{"module": 5}]
    assert not PLAN.is_quiet(next(iter(told)))


def test_steps_that_never_come_fill_no_memory() -> None:
    meter = OwnCostMeter()
    for step in range(100_000):
        meter.learn(QuietChange(step, True))
    assert len(meter._quiet) <= 4_000
