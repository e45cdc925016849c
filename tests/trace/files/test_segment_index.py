"""Stepping over the messages of a segment: what a batch holds is not read, and a torn end is none."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from commtrace.trace import schema
from commtrace.trace.files.segment_index import SegmentIndex, SegmentReplacedError
from commtrace.trace.files.writer import SegmentWriter, segment_paths
from tests.trace.rows import metadata, row


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
def test_what_is_no_message_ends_the_index(segment: Path, rest: bytes) -> None:
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
