"""Reading the end of a run: the same rows as reading all of it, and only a part of its batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files import segment_index
from commtrace.trace.files.rank_files import rank_directory, segment_paths
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.tail import RunTail
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.schema import Row
from tests.trace.rows import mark, metadata, row

GROUP = {"id": 7, "ranks": [0, 1], "ordinal": 0, "role": "dp", "name": "", "description": "", "backend": "gloo"}


def step_rows(step: int, *, group: int = -1) -> list[Row]:
    begin = 100 * step
    return [
        row(name="inside", step=step, start=begin + 10, end=begin + 50, group=group),
        row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + 100),
    ]


def write(directory: Path, rank: int, steps: range, *, per_segment: int = 100, **changes: Any) -> SegmentWriter:
    """A batch for every step, as of a job that runs: the writer is not closed."""
    writer = SegmentWriter(directory, metadata(rank, world_size=2, **changes), steps_per_segment=per_segment)
    writer.write([mark("process_group", GROUP), mark("topology", {"coordinates": {"dp": rank}})])
    for step in steps:
        writer.write(step_rows(step))
    return writer


def test_the_newest_steps_are_those_that_every_rank_has_ended(tmp_path: Path) -> None:
    writers = [write(tmp_path, 0, range(50)), write(tmp_path, 1, range(47))]
    newest = RunTail(tmp_path).read(steps=5)

    assert (newest.first, newest.end) == (42, 47)
    assert newest.last_steps == {0: 49, 1: 46}
    assert len(writers) == 2


def test_a_rank_that_is_ahead_keeps_its_newest_steps(tmp_path: Path) -> None:
    writers = [write(tmp_path, 0, range(60)), write(tmp_path, 1, range(47))]
    newest = RunTail(tmp_path).read(steps=5)

    ends = {
        rank: int(trace.spans.step[trace.spans.kind == schema.STEP].max()) for rank, trace in newest.run.ranks.items()
    }
    assert (newest.first, newest.end, ends) == (42, 47, {0: 59, 1: 46})
    assert len(writers) == 2


@pytest.mark.parametrize("per_segment", [3, 10, 100])
def test_the_rows_are_those_of_the_whole_run(tmp_path: Path, per_segment: int) -> None:
    kept = [write(tmp_path, rank, range(64 + rank), per_segment=per_segment) for rank in (0, 1)]
    newest = RunTail(tmp_path).read(steps=4)
    whole = load_run(tmp_path, f"{newest.first - 1}:{newest.end + 1}")

    assert (newest.first, newest.end, len(kept)) == (60, 64, 2)
    for rank, trace in newest.run.ranks.items():
        other = whole.ranks[rank]
        assert np.array_equal(trace.spans.start, other.spans.start)
        assert np.array_equal(trace.spans.step, other.spans.step)
        assert trace.groups == other.groups
        assert trace.coordinates == other.coordinates == {"dp": rank}
        assert trace.last_written_ns == other.last_written_ns


def test_most_of_a_long_segment_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = write(tmp_path, 0, range(90))
    read: list[tuple[int, int]] = []
    original = segment_index.SegmentIndex.read

    def counted(self: segment_index.SegmentIndex, first: int, end: int, columns: list[int] | None = None) -> Any:
        read.append((first, end))
        return original(self, first, end, columns)

    monkeypatch.setattr(segment_index.SegmentIndex, "read", counted)
    RunTail(tmp_path).read(steps=5)

    assert kept is not None
    assert sum(end - first for first, end in read) < 20


def test_rows_written_between_two_looks_are_in_the_second(tmp_path: Path) -> None:
    writer = write(tmp_path, 0, range(10))
    tail = RunTail(tmp_path)
    assert tail.read(steps=3).end == 10
    for step in range(10, 14):
        writer.write(step_rows(step))
    newest = tail.read(steps=3)
    assert (newest.first, newest.end) == (11, 14)


def test_after_a_rollback_the_newest_step_is_the_one_that_ended_last(tmp_path: Path) -> None:
    writer = write(tmp_path, 0, range(10))
    for step in (7, 8):
        writer.write([row(kind=schema.STEP, name="step", step=step, start=1_000 + step, end=1_001 + step)])

    assert RunTail(tmp_path).read(steps=3).end == 9


def test_a_group_that_was_made_in_the_middle_is_known(tmp_path: Path) -> None:
    writer = write(tmp_path, 0, range(30))
    writer.write([mark("process_group", {**GROUP, "id": 9})])
    for step in range(30, 60):
        writer.write(step_rows(step, group=9))
    assert set(RunTail(tmp_path).read(steps=3).run.ranks[0].groups) == {7, 9}


def test_the_first_step_of_all_is_left_out_as_the_warm_up(tmp_path: Path) -> None:
    writer = write(tmp_path, 0, range(2))
    tail = RunTail(tmp_path)
    assert (tail.read(steps=20).first, tail.read(steps=20).end) == (0, 2)
    writer.write(step_rows(2))
    assert (tail.read(steps=20).first, tail.read(steps=20).end) == (1, 3)


def test_a_rank_whose_files_have_stopped_does_not_hold_the_others_back(tmp_path: Path) -> None:
    kept = [write(tmp_path, 0, range(90)), write(tmp_path, 1, range(20))]
    (newest,) = segment_paths(kept[1].directory)
    assert RunTail(tmp_path).read(steps=5).end == 20
    old = newest.stat().st_mtime - 60
    os.utime(newest, (old, old))
    found = RunTail(tmp_path).read(steps=5)
    assert (found.first, found.end) == (85, 90)
    assert found.last_steps[1] == 19


def test_a_torn_tail_costs_only_itself(tmp_path: Path) -> None:
    writer = write(tmp_path, 0, range(20))
    (path,) = segment_paths(writer.directory)
    os.truncate(path, path.stat().st_size - 11)
    assert RunTail(tmp_path).read(steps=3).end == 19


def test_segments_that_are_deleted_meanwhile_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = write(tmp_path, 0, range(40), per_segment=10)
    original = segment_index.SegmentIndex.extend

    def extended(self: segment_index.SegmentIndex) -> None:
        original(self)
        if self.path != segment_paths(kept.directory)[-1]:
            self.path.unlink()

    monkeypatch.setattr(segment_index.SegmentIndex, "extend", extended)
    newest = RunTail(tmp_path).read(steps=20)
    assert newest.end == 40
    assert newest.run.ranks[0].spans.step.min() == 30


def test_a_run_without_steps_gives_what_it_has(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    for number in range(100):
        writer.write([row(name="inside", start=number, end=number + 1)])
    newest = RunTail(tmp_path).read(steps=5)
    assert (newest.first, newest.end) == (0, 0)
    assert newest.last_steps == {0: -1}
    assert 60 <= len(newest.run.ranks[0].spans) <= 100


def test_nothing_written_yet_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no such directory"):
        RunTail(tmp_path / "not-there").read(steps=5)
    (tmp_path / "run" / "rank-00000").mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match="nothing has been written"):
        RunTail(tmp_path / "run").read(steps=5)
    (tmp_path / "run" / "rank-00000" / "spans-0000.arrows").write_bytes(b"torn")
    with pytest.raises(RunNotFoundError, match=r"no readable spans\. .*spans-0000\.arrows: skipped, its header is not"):
        RunTail(tmp_path / "run").read(steps=5)


def test_files_that_are_torn_in_their_first_batch_are_not_called_empty(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    writer.write([row(name="inside", start=number, end=number + 1) for number in range(1_000)])
    writer.close()
    (path,) = tmp_path.glob("rank-00000/spans-*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    with pytest.raises(RunNotFoundError, match="hold no whole batch of spans yet; if the job has ended, they are torn"):
        RunTail(tmp_path).read(steps=5)


def test_durations_are_sampled_from_all_over_the_run(tmp_path: Path) -> None:
    kept = write(tmp_path, 0, range(400), per_segment=10)
    sample = RunTail(tmp_path).sample_durations(0)
    assert kept is not None
    assert sample == [100] * len(sample)
    assert 30 <= len(sample) < 400


@pytest.mark.parametrize("before", [0, 17])
def test_durations_are_found_where_few_batches_hold_steps(tmp_path: Path, before: int) -> None:
    writer = write(tmp_path, 0, range(0))
    for _ in range(before):  # a long start
        writer.write([mark("process_group", GROUP)])
    for step in range(2):
        writer.write(step_rows(step))
    for _ in range(90):  # then a hang, in which only marks are written
        writer.write([mark("process_group", GROUP)])

    assert RunTail(tmp_path).sample_durations(0) == [100, 100]


def test_durations_are_not_sampled_from_a_segment_of_another_program(tmp_path: Path) -> None:
    write(tmp_path, 0, range(20), per_segment=10)
    first = segment_paths(rank_directory(tmp_path, 0))[0]
    with pa.ipc.open_stream(first) as stream:
        table = stream.read_all()
    kinds = pa.array(np.zeros(len(table)))
    damaged = table.set_column(table.schema.get_field_index("kind"), "kind", kinds)
    with pa.ipc.new_stream(first, damaged.schema) as stream:
        stream.write_table(damaged)

    sample = RunTail(tmp_path).sample_durations(0)

    assert 0 < len(sample) <= 10
