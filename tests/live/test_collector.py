"""Steps that are summed up together are told as if each had been alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from commtrace.live.collector import PendingRows, StepCollector
from commtrace.live.gil import GilYield
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.spans import RowBatch
from tests.factory import group
from tests.live.test_summarise import Listener, group_mark
from tests.trace.rows import metadata, row

GROUPS = (group("dp", 0, 1, 2, 3), group("pp", 0, 1, ordinal=1), group("dp", 0, 5, ordinal=2))
OPERATIONS = ("all_reduce", "all_gather", "barrier", "all_to_all", "send", "recv")
STEP_NS = 1_000


def steps_of(seed: int) -> list[list[Row]]:
    """Rows of some steps. Work reaches into the next one; communication does not, as its stalls there come later."""
    random, number, steps = Random(seed), 0, []
    for step in range(random.randint(2, 9)):
        begin, rows = step * STEP_NS, []
        for _ in range(random.randint(0, 20)):
            number += 1
            start = begin + random.randrange(STEP_NS)
            end = start + random.randint(0, 300)
            if random.random() < 0.5:
                rows += work(random, step, start, end)
            else:
                rows += communication(random, step, number, start, min(end, begin + STEP_NS))
        step_row = row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + STEP_NS)
        steps.append([*rows, step_row])
    return steps


def work(random: Random, step: int, start: int, end: int) -> list[Row]:
    kind = random.choice((schema.FORWARD, schema.BACKWARD, schema.DATA, schema.CHECKPOINT, schema.GC, schema.MODULE))
    return [row(kind=kind, name="work", step=step, start=start, end=end)]


def communication(random: Random, step: int, number: int, start: int, end: int) -> list[Row]:
    name, where = random.choice(OPERATIONS), random.choice(GROUPS)
    columns: dict[str, Any] = {"name": name, "step": step, "group": where.id, "seq": number}
    peer = random.choice((1, 7)) if name in ("send", "recv") else -1
    bracket = random.choice((1, 1, 3)) if peer < 0 else 1
    detail = random.choice((None, None, '{"unfinished": true}'))
    calls = [
        row(kind=schema.COLLECTIVE if peer < 0 else schema.P2P, lane=schema.COMMUNICATION, start=start, end=end,
            op_in_seq=at, bytes=random.choice((-1, 0, 4_000)), id=10 * number + at, peer=peer, detail=detail,
            self_bytes=random.choice((-1, 40)) if name == "all_to_all" else -1, **columns)
        for at in range(bracket)
    ]  # fmt: skip
    stall = row(kind=schema.STALL, start=start, end=end, op_in_seq=0, stalled_on=10 * number, peer=peer, **columns)
    return [*calls, *random.choices(([], [stall]), k=1)[0]]


def summaries(passes: list[list[Row]]) -> list[StepSummary]:
    listener = Listener()
    collector = StepCollector(LiveRank(metadata(), Path("run")), [listener], thread_ns=lambda: 0)
    collector.write([group_mark(one) for one in GROUPS])
    for rows in passes:
        collector.write(rows)
    collector.close()
    return [replace(one, collectives=tuple(sorted(one.collectives, key=repr))) for one in listener.summaries]


@pytest.mark.parametrize("seed", range(25))
def test_together_and_one_by_one(seed: int) -> None:
    steps = steps_of(seed)
    one_by_one = summaries([rows for step in steps for rows in (step, [])])

    assert summaries([[one for step in steps for one in step]]) == one_by_one
    assert [one.step for one in one_by_one] == list(range(len(steps)))
    for summary in one_by_one:
        parts = (summary.bubble_ns, summary.data_ns, summary.checkpoint_ns, summary.gc_ns, summary.other_ns)
        assert sum(summary.compute_ns.values()) + sum(summary.exposed_ns.values()) + sum(parts) == STEP_NS


def test_steps_of_the_same_times_are_told_each_with_its_own_row() -> None:
    step = row(kind=schema.STEP, name="step", step=4, start=0, end=10)
    listener = Listener()
    collector = StepCollector(LiveRank(metadata(), Path("run")), [listener])
    collector.write([step, step])
    collector.close()

    assert [(one.step, one.duration_ns, one.spans) for one in listener.summaries] == [(4, 10, 1)] * 2
    assert [list(rows) for rows in listener.rows] == [[step], [step]]


def test_names_that_no_row_bears_any_more_are_forgotten() -> None:
    pending = PendingRows(GilYield())
    for number in range(30):
        pending.add(RowBatch(row(name=f"{number}.{at}", step=number) for at in range(100)))
        pending.drop_oldest(len(pending) - 10)

    assert len(pending.names) < 1_200
    assert [pending.names[code] for code in pending.columns.name] == [one[1] for one in pending.made]
    assert [one[1] for one in pending.made] == [f"29.{at}" for at in range(90, 100)]
