"""A complete segment says of each of its messages what it must be: a flipped byte is reported, and all else is read."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from commtrace.errors import RunNotFoundError
from commtrace.trace.files import compaction
from commtrace.trace.files.messages import DICTIONARY, RECORD_BATCH, SCHEMA, Checked, read_checksums
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.segment_index import SegmentIndex
from commtrace.trace.files.writer import SegmentWriter
from tests.trace.rows import metadata, row, steps


def checksums(path: Path) -> list[Checked] | None:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_checksums(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def said(directory: Path) -> str:
    """What is wrong with a run, however that is said."""
    try:
        return " ".join(load_run(directory).problems)
    except RunNotFoundError as error:
        return str(error)


@pytest.fixture
def segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 steps in batches of ten, all written with the same words, and a complete table behind them."""
    monkeypatch.setattr(compaction, "ROWS_PER_BATCH", 10)
    writer = SegmentWriter(tmp_path, metadata())
    for step in range(40):
        writer.write(steps(step, step + 1))
    writer.close()
    return writer.directory / "spans-0000.arrows"


def test_the_table_lists_every_message_and_what_it_is(segment: Path) -> None:
    table = checksums(segment)
    assert table is not None
    kinds = [message.kind for message, _ in table]
    assert kinds == [SCHEMA, *[DICTIONARY] * 5, *[RECORD_BATCH] * 4]
    assert table[-1].message.offset + table[-1].message.size < segment.stat().st_size


def test_whoever_reads_arrow_reads_the_segment_as_before(segment: Path) -> None:
    with pa.OSFile(str(segment)) as file:
        assert pa.ipc.open_stream(file).read_all()["step"].to_pylist() == list(range(40))
    assert pa.ipc.open_stream(segment.read_bytes()).read_all().num_rows == 40


def test_a_flipped_byte_costs_its_batch_and_is_reported(segment: Path) -> None:
    table = checksums(segment)
    assert table is not None
    second = [message for message, _ in table if message.kind == RECORD_BATCH][1]
    flip(segment, second.offset + second.size - 3)

    run = load_run(segment.parents[1])

    assert run.ranks[0].spans.step.tolist() == [*range(10), *range(20, 40)]
    (problem,) = run.problems
    assert "batch 2 of 4 is damaged and was left out (its checksum differs" in problem


@pytest.mark.parametrize("place", ["its length", "its words"])
def test_the_length_of_a_message_may_be_flipped_as_well(segment: Path, place: str) -> None:
    table = checksums(segment)
    assert table is not None
    batch = [message for message, _ in table if message.kind == RECORD_BATCH][2]
    flip(segment, batch.offset + (4 if place == "its length" else 40))
    run = load_run(segment.parents[1])
    assert run.ranks[0].spans.step.tolist() == [*range(20), *range(30, 40)]
    assert len(run.problems) == 1


def test_a_flip_in_a_dictionary_costs_the_batches_that_refer_to_it(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata())
    for number, word in enumerate(("first", "first", "second", "second")):
        writer.write([row(name=word, start=number, end=number + 1)])
    writer._end_segment()  # complete, and not compacted
    segment = writer.directory / "spans-0000.arrows"
    table = checksums(segment)
    assert table is not None
    names = [message for message, _ in table if message.kind == DICTIONARY and message.dictionary == 1]
    flip(segment, names[0].offset + names[0].size - 9)

    run = load_run(tmp_path)

    # The third batch repeats the words, as one was new.
    assert [run.names[code] for code in run.ranks[0].spans.name] == ["second", "second"]
    assert len(run.problems) == 2
    assert "the words that its rows refer to are damaged" in run.problems[0]


def test_a_flipped_header_costs_its_segment_and_is_reported(segment: Path) -> None:
    content = segment.read_bytes()
    flip(segment, content.index(b'"host":"alpha"') + 10)
    with pytest.raises(ValueError, match="its checksum differs"):
        load_run(segment.parents[1])


def test_a_flip_in_the_table_costs_nothing_and_is_reported(segment: Path) -> None:
    flip(segment, segment.stat().st_size - 60)
    run = load_run(segment.parents[1])
    assert len(run.ranks[0].spans) == 40
    assert "not the checksums" in run.problems[0]


def test_every_flip_is_reported(segment: Path) -> None:
    """Nothing of a segment can change without a word: 1 byte in 41 is tried."""
    content = segment.read_bytes()
    table = checksums(segment)
    assert table is not None
    end = table[-1].message.offset + table[-1].message.size
    for offset in range(0, len(content), 41):
        if end <= offset < end + 8:
            continue  # what ends the stream says nothing that the table does not say
        segment.write_bytes(content)
        flip(segment, offset)
        assert "spans-0000.arrows" in said(segment.parents[1]), offset


def test_a_segment_without_a_table_is_read_as_one_of_an_older_version(segment: Path) -> None:
    table = checksums(segment)
    assert table is not None
    end = table[-1].message.offset + table[-1].message.size + 8
    os.truncate(segment, end)
    assert checksums(segment) is None
    run = load_run(segment.parents[1])
    assert (len(run.ranks[0].spans), run.problems) == (40, ())


def test_columns_that_claim_to_be_huge_are_not_unpacked(segment: Path) -> None:
    """A column of a few bytes that says it becomes 2 GB: without a table, as its writer would have made it right."""
    table = checksums(segment)
    assert table is not None
    batch = [message for message, _ in table if message.kind == RECORD_BATCH][3]
    content = bytearray(segment.read_bytes()[: table[-1].message.offset + table[-1].message.size])
    begin = content.index((80).to_bytes(8, "little"), batch.offset)  # ten int64
    content[begin : begin + 8] = (2 << 30).to_bytes(8, "little")
    segment.write_bytes(content)
    index = SegmentIndex(segment)
    index.extend()
    read = index.read(0, 4)
    assert read is not None
    assert len(read) == 30
    assert "would take 2,147," in index.problems[0]


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    """A segment of 6 batches of a process that was killed."""
    writer = SegmentWriter(tmp_path, metadata())
    for step in range(6):
        writer.write(steps(step, step + 1))
    return writer.directory / "spans-0000.arrows"


def test_a_batch_of_a_segment_that_still_grows_tells_of_those_before_it(growing: Path) -> None:
    assert checksums(growing) is None
    index = SegmentIndex(growing)
    index.extend()
    flip(growing, index.batches[2].offset + index.batches[2].size - 20)

    run = load_run(growing.parents[1])

    assert run.ranks[0].spans.step.tolist() == [0, 1, 3, 4, 5]
    assert "batch 3 of 6 is damaged and was left out (its checksum differs" in run.problems[0]


def test_only_the_last_batch_of_a_segment_that_still_grows_can_change_unnoticed(growing: Path) -> None:
    content = growing.read_bytes()
    index = SegmentIndex(growing)
    index.extend()
    for offset in range(0, index.batches[5].offset, 53):
        growing.write_bytes(content)
        flip(growing, offset)
        assert "spans-0000.arrows" in said(growing.parents[1]), offset
