"""Steps that are summed up together are told as if each had been alone."""

from __future__ import annotations

from collections.abc import Sequence
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
from commtrace.trace import spans as trace_spans
from commtrace.trace.schema import Row
from commtrace.trace.spans import RowBatch, Spans
from tests.factory import group
from tests.live.listeners import Listener, group_mark
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
    return in_one_order(listener.summaries)


def in_one_order(summaries: list[StepSummary]) -> list[StepSummary]:
    return [replace(summary, collectives=tuple(sorted(summary.collectives, key=repr))) for summary in summaries]


@pytest.mark.parametrize("seed", range(25))
def test_together_and_one_by_one(seed: int) -> None:
    steps = steps_of(seed)
    one_by_one = summaries([rows for step in steps for rows in (step, [])])

    assert summaries([[one for step in steps for one in step]]) == one_by_one
    assert [one.step for one in one_by_one] == list(range(len(steps)))
    for summary in one_by_one:
        parts = (summary.bubble_ns, summary.data_ns, summary.checkpoint_ns, summary.gc_ns, summary.other_ns)
        assert sum(summary.compute_ns.values()) + sum(summary.exposed_ns.values()) + sum(parts) == STEP_NS


@pytest.mark.parametrize("seed", range(10))
def test_columns_are_told_like_rows(seed: int) -> None:
    names: list[str] = []

    def in_columns(rows: list[Row]) -> RowBatch:
        num_detailed = sum(row.detail is not None for row in rows)
        return RowBatch(rows[:num_detailed], Spans.from_tuples(rows[num_detailed:], names), names)

    def told(passes: Sequence[Sequence[Row]]) -> tuple[list[StepSummary], list[list[str]]]:
        listener = Listener()
        collector = StepCollector(LiveRank(metadata(), Path("run")), [listener], thread_ns=lambda: 0)
        collector.write([group_mark(group) for group in GROUPS])
        for rows in passes:
            collector.write(rows)
        collector.close()
        return in_one_order(listener.summaries), [sorted(map(repr, rows)) for rows in listener.rows]

    steps = steps_of(seed)
    passes = [sorted(rows, key=lambda row: row.detail is None) for rows in ([*steps[0], *count_of(0)], *steps[1:], [])]

    assert told([in_columns(rows) for rows in passes]) == told(passes)


def count_of(step: int) -> list[Row]:
    return [row(kind=schema.MARK, name="count", step=step, start=1, end=1, detail='{"tokens": 3}')]


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
    codes = pending.columns.name

    assert len(pending.names) < 1_200
    assert [pending.names[code] for code in codes] == [one[1] for one in pending.made]
    assert [one[1] for one in pending.made] == [f"29.{at}" for at in range(90, 100)]


def test_no_row_is_made_of_columns_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Listener):
        def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
            num_rows.append(len(rows))

    def makes(spans: Spans, names: Sequence[str]) -> list[Row]:
        raise AssertionError(f"{len(spans)} rows were made")

    monkeypatch.setattr(trace_spans, "rows_of", makes)
    num_rows: list[int] = []
    names: list[str] = []
    collector = StepCollector(LiveRank(metadata(), Path("run")), [Counts()], thread_ns=lambda: 0)
    for step in steps_of(3):
        rows = [replaced._replace(detail=None) for replaced in step]
        collector.write(RowBatch([], Spans.from_tuples(rows, names), names))
    collector.close()

    assert sum(num_rows) == sum(map(len, steps_of(3)))
