"""Steps that are not in detail keep their duration and exact sums, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from commtrace.trace import schema
from commtrace.trace.aggregates import Aggregate, AggregatingSink, read_aggregates
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import Row
from commtrace.trace.selection import DetailPlan, StepRange
from commtrace.trace.spans import RowBatch, Spans
from tests.trace.rows import mark, metadata, row, steps


class Disk:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.full = False

    def write(self, rows: Sequence[Row]) -> None:
        if self.full:
            raise OSError("No space left on device")
        self.rows += rows

    def close(self) -> None:
        self.rows.append(mark("closed", {}))

    def written(self) -> list[tuple[str, int]]:
        return [(row.name, row.step) for row in self.rows]

    def sums(self, step: int) -> list[Aggregate]:
        return read_aggregates(
            [row.detail for row in self.rows if row.name == "aggregate" and row.step == step and row.detail]
        )


def all_reduce(step: int, start: int, end: int, num_bytes: int = 64, group: int = 7) -> Row:
    return row(
        kind=schema.COLLECTIVE,
        name="all_reduce",
        step=step,
        start=start,
        end=end,
        bytes=num_bytes,
        group=group,
        peer=-1,
    )


def recv(step: int, peer: int, nanoseconds: int) -> Row:
    return row(kind=schema.STALL, name="recv", step=step, start=0, end=nanoseconds, group=7, peer=peer)


def test_the_rule_is_on_the_number_alone() -> None:
    plan = DetailPlan(every=4)
    plan.add(StepRange.parse("5:7"))

    assert [step for step in range(10) if plan.details(step)] == [0, 4, 5, 6, 8]
    assert [step for step in range(10) if DetailPlan(0).details(step)] == []


def test_a_step_in_detail_keeps_its_rows_and_the_others_their_duration_and_sums() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(2).details)
    sink.write([all_reduce(0, 0, 5), *steps(0, 1), all_reduce(1, 10, 13), all_reduce(1, 20, 27), recv(1, 3, 4)])
    sink.write([recv(1, 2, 1), all_reduce(1, 0, 2, group=9), *steps(1, 2), all_reduce(2, 0, 5)])

    assert disk.written() == [("all_reduce", 0), ("step", 0), ("step", 1), ("all_reduce", 2), ("aggregate", 1)]
    assert disk.sums(1) == [
        Aggregate("collective", "all_reduce", 7, -1, 2, 10, 128, 7),
        Aggregate("stall", "recv", 7, 3, 1, 4, 0, 4),
        Aggregate("stall", "recv", 7, 2, 1, 1, 0, 1),
        Aggregate("collective", "all_reduce", 9, -1, 1, 2, 64, 2),
    ]


@dataclass
class RowByRow:
    """The rule, in a loop over rows."""

    in_detail: Callable[[int], bool]
    sums: dict[int, dict[tuple[int, str, int, int], list[int]]] = field(default_factory=dict)
    kept: list[Row] = field(default_factory=list)
    first_end: float = float("inf")

    def write(self, rows: Sequence[Row]) -> None:
        self.first_end = min([self.first_end, *(span.end for span in rows if span.kind == schema.STEP)])
        for span in rows:
            is_in_detail = span.step >= 0 and self.in_detail(span.step)
            is_early = span.step < 0 and span.start < self.first_end
            if is_in_detail or is_early or span.kind in (schema.STEP, schema.MARK):
                self.kept.append(span)
            else:
                self.add(span)

    def add(self, span: Row) -> None:
        key = (span.kind, span.name, span.group, span.peer if span.name in ("send", "recv") else -1)
        sums = self.sums.setdefault(span.step, {}).setdefault(key, [0, 0, 0, 0])
        duration = span.end - span.start
        sums[:] = sums[0] + 1, sums[1] + duration, sums[2] + max(0, span.bytes), max(sums[3], duration)

    def aggregates(self) -> dict[int, list[Aggregate]]:
        return {
            step: [Aggregate(schema.KINDS[key[0]], *key[1:], *sums) for key, sums in own.items()]
            for step, own in self.sums.items()
        }


def some_rows(random: Random, count: int) -> list[Row]:
    words = ("all_reduce", "send", "recv", "barrier", "layers.0")
    kinds = (schema.COLLECTIVE, schema.P2P, schema.STALL, schema.MODULE, schema.STEP)
    rows = []
    for _ in range(count):
        start, kind = random.randrange(1_000), random.choices(kinds, (5, 5, 5, 5, 1))[0]
        rows.append(
            row(kind=kind, name=random.choice(words), start=start, end=start + random.randrange(100),
                step=random.randrange(0 if kind == schema.STEP else -1, 5), group=random.choice((-1, 7, 1 << 40)),
                bytes=random.choice((-1, 0, 4096)), peer=random.choice((-1, 2, 3)))
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("come_as", ["rows", "columns", "both"])
@pytest.mark.parametrize("seed", range(10))
def test_the_sums_are_those_of_a_loop_over_rows(come_as: str, seed: int) -> None:
    random, disk, rule = Random(seed), Disk(), RowByRow(DetailPlan(3).details)
    sink, names = AggregatingSink(disk, DetailPlan(3).details), list[str]()
    for _ in range(4):
        rows = some_rows(random, random.randrange(60))
        count = {"rows": len(rows), "columns": 0, "both": len(rows) // 2}[come_as]
        sink.write(RowBatch(rows[:count], Spans.from_tuples(rows[count:], names), names))
        rule.write(rows)
    sink.close()

    assert [span for span in disk.rows if span.kind != schema.MARK] == rule.kept
    assert {step: disk.sums(step) for step in range(-1, 5) if disk.sums(step)} == rule.aggregates()


def test_rows_from_before_the_first_steps_end_are_kept_wherever_and_whenever_they_come() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    sink.write([*steps(0, 1), all_reduce(-1, -50, -40), all_reduce(-1, 2_000, 2_001)])
    sink.write([all_reduce(-1, -30, 3_000), all_reduce(-1, 4_000, 4_001)])

    kept = [(span.start, span.end) for span in disk.rows if span.name == "all_reduce"]
    assert kept == [(-50, -40), (-30, 3_000)]
    sink.close()
    (rest,) = disk.sums(-1)
    assert (rest.num_spans, rest.total_ns) == (2, 2)


def test_late_rows_are_added() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    sink.write([all_reduce(0, 0, 5), *steps(0, 1)])
    sink.write([all_reduce(0, 0, 9), all_reduce(1, 0, 1)])

    assert disk.written() == [("step", 0), ("aggregate", 0), ("aggregate", 0)]
    assert disk.sums(0) == [Aggregate("collective", "all_reduce", 7, -1, 2, 14, 128, 9)]


def test_marks_and_what_comes_before_the_first_step_are_kept() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    sink.write([mark("topology", {}), all_reduce(-1, 0, 5), *steps(0, 1), all_reduce(-1, 200, 203)])

    assert disk.written() == [("topology", -1), ("all_reduce", -1), ("step", 0), ("aggregate", 0), ("aggregate", -1)]


def test_a_step_without_spans_is_shown_to_be_not_in_detail() -> None:
    disk = Disk()
    AggregatingSink(disk, DetailPlan(0).details).write(steps(0, 1))

    assert disk.written() == [("step", 0), ("aggregate", 0)]
    assert disk.sums(0) == []


@pytest.mark.parametrize("together", [True, False])
def test_a_step_of_which_nothing_was_recorded_has_no_sums(together: bool) -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    begin, end = (mark("quiet", {"step": step, "is_quiet": step == 1}) for step in (1, 2))
    passes: list[list[Row]] = [[*steps(0, 1), begin], [*steps(1, 2), end], [all_reduce(2, 200, 205), *steps(2, 3)]]
    for rows in [[*chain.from_iterable(passes)]] if together else passes:
        sink.write(rows)

    assert [step for name, step in disk.written() if name == "aggregate"] == [0, 2]


def test_the_end_tells_what_is_left() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    sink.write([all_reduce(0, 0, 5)])
    sink.close()

    assert disk.written() == [("aggregate", 0), ("closed", -1)]


def test_a_full_disk_costs_the_rows_of_that_write_and_no_others() -> None:
    disk = Disk()
    sink = AggregatingSink(disk, DetailPlan(0).details)
    sink.write([all_reduce(0, 0, 5)])
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        sink.write([all_reduce(0, 0, 100), *steps(0, 1)])
    disk.full = False
    sink.write([all_reduce(0, 0, 1), *steps(0, 1)])

    assert disk.sums(0) == [Aggregate("collective", "all_reduce", 7, -1, 2, 6, 128, 5)]


def test_the_reader_hands_sums_out_by_step(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata(), steps_per_segment=2)
    sink = AggregatingSink(writer, DetailPlan(3).details)
    sink.write([one for step in range(6) for one in (all_reduce(step, step, step + 4), *steps(step, step + 1))])
    sink.close()

    trace = load_run(tmp_path).ranks[0]
    assert sorted(trace.aggregates) == [1, 2, 4, 5]
    assert trace.spans.step[trace.spans.kind == schema.STEP].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(trace.spans.step[trace.spans.kind == schema.COLLECTIVE].tolist()) == [0, 3]
    some = load_run(tmp_path, "2:5").ranks[0]
    assert {step: read_aggregates(texts) for step, texts in some.aggregates.items()} == {
        step: [Aggregate("collective", "all_reduce", 7, -1, 1, 4, 64, 4)] for step in (2, 4)
    }
