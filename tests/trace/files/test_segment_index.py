"""Stepping over the messages of a segment: what a batch holds is not read, and a torn end is none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files import segment_index
from commtrace.trace.files.compaction import compact
from commtrace.trace.files.decoding import RankMarks
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.rank_files import segment_paths
from commtrace.trace.files.reader import load_run, newest_segments
from commtrace.trace.files.segment_index import (
    Extent,
    Extents,
    SegmentIndex,
    SegmentReplacedError,
    read_extents,
    read_forward,
)
from commtrace.trace.files.writer import SegmentWriter
from tests.trace.rows import mark, metadata, row, steps


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Seven batches; words that are new make the stream repeat its dictionary."""
    writer = SegmentWriter(tmp_path, metadata())
    for number in range(7):
        writer.write([row(name=f"word{number // 2}", start=number, end=number + 1), row(name="word0", start=number)])
    (written,) = segment_paths(writer.directory)
    segment = tmp_path / "segment.arrows"
    segment.write_bytes(written.read_bytes())  # as it is before the writer compacts it
    return segment


def test_it_finds_every_batch_and_reads_any_of_them(segment: Path) -> None:
    index = SegmentIndex(segment)
    index.extend()
    whole = pa.ipc.open_stream(segment.read_bytes()).read_all().replace_schema_metadata()

    assert len(index.batches) == 7
    for first, end in [(0, 7), (6, 7), (2, 5), (0, 1)]:
        part = index.read(first, end)
        assert part is not None
        assert part.to_pylist() == whole.slice(2 * first, 2 * (end - first)).to_pylist()


def test_nothing_to_read_is_nothing(segment: Path) -> None:
    index = SegmentIndex(segment)
    assert index.read(0, 1) is None
    index.extend()
    assert index.read(7, 9) is None


def test_only_the_columns_that_are_asked_for_are_read(segment: Path) -> None:
    index = SegmentIndex(segment)
    index.extend()
    part = index.read(3, 4, [schema.SCHEMA.get_field_index("start"), schema.SCHEMA.get_field_index("end")])
    assert part is not None
    assert part.to_pylist() == [{"start": 3, "end": 4}, {"start": 3, "end": 3}]


def test_a_file_may_grow_byte_by_byte(segment: Path, tmp_path: Path) -> None:
    content = segment.read_bytes()
    growing = tmp_path / "growing.arrows"
    index = SegmentIndex(growing)
    seen = []
    for size in [*range(0, len(content), 97), len(content)]:
        growing.write_bytes(content[:size])
        index.extend()
        seen.append(len(index.batches))
        if index.batches:
            newest = index.read(len(index.batches) - 1, len(index.batches))
            assert newest is not None
            assert newest["start"].to_pylist() == [len(index.batches) - 1] * 2
    assert seen[0] == 0
    assert seen[-1] == 7
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    "rest", [b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x40\x00\x00\x00" + bytes(64), b"garbage" * 99]
)
def test_bytes_that_are_no_message_end_the_index(segment: Path, rest: bytes) -> None:
    content = segment.read_bytes()
    index = SegmentIndex(segment)
    index.extend()
    begin = index.batches[4].offset
    segment.write_bytes(content[:begin] + rest)
    again = SegmentIndex(segment)
    again.extend()
    assert len(again.batches) == 4


def test_a_file_that_is_gone_is_an_error_of_the_system(segment: Path) -> None:
    segment.unlink()
    with pytest.raises(FileNotFoundError):
        SegmentIndex(segment).extend()


def test_another_file_in_its_place_is_noticed_and_read_anew(segment: Path) -> None:
    index = SegmentIndex(segment)
    index.extend()
    with pa.ipc.new_stream(str(segment.with_suffix(".new")), schema.SCHEMA) as compacted:
        compacted.write_table(pa.ipc.open_stream(segment.read_bytes()).read_all().unify_dictionaries().combine_chunks())
    segment.with_suffix(".new").replace(segment)
    with pytest.raises(SegmentReplacedError):
        index.read(0, 1)
    index.extend()
    (only,) = index.batches
    part = index.read(0, 1)
    assert part is not None
    assert (len(part), only.offset > 0) == (14, True)


def recorded(directory: Path, *, steps_per_segment: int = 4) -> list[Segment]:
    """Ten steps with a forward each, a pause between steps 5 and 6 in which input is waited for, and marks."""
    writer = SegmentWriter(directory, metadata(), steps_per_segment=steps_per_segment)
    writer.write([mark("topology", {"coordinates": {"tp": 0}, "parallel": {"tp": 1}})])
    for one in steps(0, 10):
        number = one.step
        writer.write([row(step=number, start=100 * number + 10, end=100 * number + 60), one])
        if number == 5:
            writer.write([row(kind=schema.DATA, name="data", start=600, end=600)])
    writer.write([mark("end", {})])
    writer.close()
    return newest_segments(directory, [], 0)[0]


def all_of(segments: list[Segment]) -> tuple[list[Extent], list[int]]:
    """The extents, and the starts of all rows as they come."""
    found = [*read_forward(segments, RankMarks.none(), [])]
    return [extent for extent, _ in found], [start for _, one in found for start in one.block.spans.start.tolist()]


def starts(segments: list[Segment], wanted: Iterable[Extent], problems: list[str] | None = None) -> list[int]:
    parts = read_extents(segments, wanted, RankMarks.none(), [] if problems is None else problems)
    return sorted(start for part in parts for start in part.block.spans.start.tolist())


def test_reading_forward_finds_every_row_once(tmp_path: Path) -> None:
    segments = recorded(tmp_path)
    found, rows = all_of(segments)

    assert [extent.segment for extent in found] == [0, 1, 2]
    assert [(extent.first_step, extent.last_step) for extent in found] == [(0, 3), (4, 7), (8, 9)]
    assert (found[0].first_ns, found[0].last_ns) == (0, -1)
    assert (found[1].first_ns, found[1].last_ns) == (600, 600)
    assert sorted(rows) == sorted(load_run(tmp_path).ranks[0].spans.start.tolist())


def test_marks_are_those_of_all_parts(tmp_path: Path) -> None:
    marks = RankMarks.none()
    segments = recorded(tmp_path)
    *_, (_, last) = read_forward(segments, marks, [])

    assert last.ranks[0].coordinates == {"tp": 0}
    assert last.ranks[0].closed
    assert marks.marks.closed


def test_only_the_batches_of_some_steps_are_read(tmp_path: Path) -> None:
    segments = recorded(tmp_path)
    found, _ = all_of(segments)
    extents = Extents.of(found)
    wanted = extents.take(extents.holding(4, 5, 1, 0))

    assert starts(segments, wanted) == [400, 410, 500, 510, 600, 600, 610, 700, 710]


@pytest.mark.parametrize(
    ("begin", "end", "is_held"), [(600, 600, True), (0, 599, False), (601, 900, False), (1, 0, False), (0, 900, True)]
)
def test_rows_of_no_step_are_found_by_time(begin: int, end: int, *, is_held: bool) -> None:
    extents = Extents.of([Extent(0, 0, 1, 10, 5, 0, -1, 600, 600)])

    assert len(extents.holding(3, 9, begin, end)) == is_held


def test_steps_are_found_where_they_do_not_ascend() -> None:
    ranges = [(0, 3), (2, 5), (0, -1), (0, 1), (6, 9), (4, 4)]
    extents = Extents.of([Extent(0, at, at + 1, 10, 5, *steps, 0, -1) for at, steps in enumerate(ranges)])

    for first, last in itertools.combinations_with_replacement(range(11), 2):
        held = [at for at, (low, high) in enumerate(ranges) if max(first, low) <= min(last, high)]
        assert extents.holding(first, last, 1, 0).tolist() == held


def test_parts_of_a_large_segment_are_read_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = all_of(recorded(tmp_path / "whole", steps_per_segment=100))
    monkeypatch.setattr(segment_index, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr("commtrace.trace.files.compaction.is_worthwhile", lambda *_: False)
    segments = recorded(tmp_path / "parts", steps_per_segment=100)
    parts, rows = all_of(segments)

    assert len(whole[0]) == 1
    assert len(parts) > 10  # a batch each
    assert sorted(rows) == sorted(whole[1])
    extents = Extents.of(parts)
    assert starts(segments, extents.take(extents.holding(7, 7, 1, 0))) == [700, 710]


def test_a_segment_that_was_compacted_meanwhile_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "_BYTES_AT_ONCE", 1)
    with monkeypatch.context() as patched:
        patched.setattr("commtrace.trace.files.compaction.is_worthwhile", lambda *_: False)
        segments = recorded(tmp_path, steps_per_segment=100)
    found, rows = all_of(segments)
    num_rows = sum(extent.num_rows for extent in found)
    before = segments[0].path.read_bytes()
    # Its first row is the topology, its last the end.
    assert compact(segments[0].path, num_rows + 2, sync=False)
    assert segments[0].path.read_bytes() != before

    problems: list[str] = []
    assert starts(segments, [found[3]], problems) == sorted(rows)
    assert problems == []


def test_missing_and_damaged_segments_are_reported(tmp_path: Path) -> None:
    segments = recorded(tmp_path)
    found, rows = all_of(segments)
    segments[1].path.unlink()
    content = bytearray(segments[2].path.read_bytes())
    content[found[2].end_byte - 8] ^= 0xFF
    segments[2].path.write_bytes(content)

    problems: list[str] = []
    left = [one for _, part in read_forward(segments, RankMarks.none(), problems) for one in part.block.spans.start]

    assert sorted(np.array(left).tolist()) == [start for start in sorted(rows) if start < 400]
    assert len(problems) == 2
    assert "was deleted while the run was read" in problems[0]
    assert "is damaged and was left out" in problems[1]
