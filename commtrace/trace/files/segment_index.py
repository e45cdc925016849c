"""Read a segment message by message, all of it or only its end; damaged parts are reported, the rest is read.

A complete segment has a table of its messages (messages.py). A growing one is walked up to its last whole message.
"""

from __future__ import annotations

import errno
import os
import socket
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commtrace.errors import RunNotFoundError
from commtrace.trace.files.decoding import DecodedBlock, RankMarks, RankTable, decode, known_columns
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.messages import (
    DICTIONARY,
    RECORD_BATCH,
    SCHEMA,
    ArrowMessage,
    is_end,
    message_at,
    read_checksums,
    unpacked_bytes,
)
from commtrace.trace.inputs import open_file
from commtrace.trace.spans import Int64, Spans

_MOST_UNPACKED_PER_BYTE: Final = 50
"""Limit of a message when unpacked; recorded columns grow 5 to 15 times. What is above it takes from the room."""

ROOM_OF_RUN: Final = 32 << 20
"""Bytes beyond that limit that all files of a run may take: short recordings in which all rows are alike."""

ROOM_OF_TAIL: Final = 1 << 20


_BYTES_AT_ONCE: Final = 50_000
"""Compressed: about 8,000 rows, as of a batch that compaction made, or some smaller batches."""


class SegmentReplacedError(OSError):
    """Compaction has replaced the segment since the last look."""


class SegmentIndex:
    """The messages of a segment that may still grow. Not thread-safe."""

    def __init__(self, path: Path, room: int = ROOM_OF_RUN) -> None:
        self.path = path
        self._room = room
        self._taken: set[int] = set()  # offsets of messages that have taken from the room
        self.batches: list[ArrowMessage] = []
        self.num_bytes = 0
        self.modified_ns = 0
        self.ends_whole = True
        self.problems: list[str] = []
        self._schema: ArrowMessage | None = None
        self._dictionaries: list[ArrowMessage] = []
        self._unverified: list[ArrowMessage] = []
        self._since_batch: list[ArrowMessage] = []
        self._checksums: dict[int, int] = {}
        self._has_table = False
        self._damaged: set[int] = set()
        self._end = 0
        self._file_number = 0

    def extend(self) -> None:
        """Find messages written since the last call; read a replaced file from its beginning; raise OSError."""
        with open_file(self.path) as opened:
            self._extend(opened.fileno())

    def _extend(self, file: int) -> None:
        status = os.fstat(file)
        self.num_bytes, self.modified_ns = status.st_size, status.st_mtime_ns
        if status.st_ino != self._file_number:
            self._file_number, self._end = status.st_ino, 0
            self._schema, self._dictionaries, self.batches = None, [], []
            self._unverified, self._since_batch = [], []
            self._checksums, self._has_table, self._damaged = {}, False, set()
            self._taken = set()
        if not self._has_table:
            self._find(file, self.num_bytes)

    def _find(self, file: int, size: int) -> None:
        checked = read_checksums(file, size)
        if checked is not None:
            self._checksums = {message.offset: crc for message, crc in checked}
            self.ends_whole = self._has_table = True
            for message, _ in checked:
                if message.offset >= self._end:
                    self._add(message)
            return
        read = partial(_pread, file)
        while (whole := message_at(read, self._end)) is not None and whole.offset + whole.size <= size:
            self._add(whole)
        # Behind the end of a stream there is its table, or nothing in files of older versions.
        self.ends_whole = self._end == size or (is_end(read, self._end) and self._end + 8 == size)

    def _add(self, message: ArrowMessage) -> None:
        if not self._has_table:
            self._take_checksums(message)
        if message.kind == SCHEMA and self._schema is None:
            self._schema = message
        elif message.kind == DICTIONARY:
            self._dictionaries.append(message)
        elif message.kind == RECORD_BATCH:
            self.batches.append(message)
        self._end = message.offset + message.size

    def _take_checksums(self, message: ArrowMessage) -> None:
        """Take from a batch the checksums of the messages since the previous batch, except its own dictionaries."""
        if message.kind == RECORD_BATCH and len(message.crcs) == len(self._unverified):
            self._checksums.update(
                zip([unverified.offset for unverified in self._unverified], message.crcs, strict=True)
            )
        self._since_batch.append(message)
        if message.kind == RECORD_BATCH:
            self._unverified, self._since_batch = self._since_batch, []

    def schema(self) -> pa.Schema:
        """Return the header; raise OSError if the file cannot be read, pa.ArrowException if the header cannot."""
        with self._opened() as file:
            return self._read_schema(file)

    def read_header(self) -> pa.Schema:
        """Find all messages and return the header, of a file that is opened once. Raise as :meth:`schema`."""
        with open_file(self.path) as opened:
            self._extend(opened.fileno())
            return self._read_schema(opened.fileno())

    def read_all(self) -> pa.Table | None:
        """Find and read all batches without damaged ones, of a file that is opened once; None if there is none.

        Raises:
            OSError, pa.ArrowException: the file or its header cannot be read.
        """
        with open_file(self.path) as opened:
            self._extend(opened.fileno())
            return self._read(opened.fileno(), self.batches, None)

    def _read_schema(self, file: int) -> pa.Schema:
        if self._schema is None:
            raise pa.ArrowInvalid("it holds no Arrow stream, or not yet")
        (content,) = self._contents(file, [self._schema])
        if content is None:
            raise pa.ArrowInvalid("its checksum differs: some of its bytes have changed")
        return pa.ipc.open_stream(pa.py_buffer(content)).schema

    def read(self, first: int, end: int, columns: list[int] | None = None) -> pa.Table | None:
        """Read record batches ``first`` to ``end`` (exclusive) without damaged ones; ``columns`` are positions.

        Raises:
            SegmentReplacedError: it is another file than at the last look.
            OSError, pa.ArrowException: the file or its header cannot be read.
        """
        wanted = self.batches[first:end]
        if self._schema is None or not wanted:
            return None
        with self._opened() as file:
            return self._read(file, wanted, columns)

    def _read(self, file: int, wanted: Sequence[ArrowMessage], columns: list[int] | None) -> pa.Table | None:
        if self._schema is None or not wanted:
            return None
        # Dictionaries replace each other; those before the last wanted batch are all that it can refer to.
        words = [dictionary for dictionary in self._dictionaries if dictionary.offset < wanted[-1].offset]
        messages = [self._schema, *sorted([*words, *wanted])]
        contents = self._contents(file, messages)
        if contents[0] is None:
            raise pa.ArrowInvalid("its header is damaged")
        kept = self._readable(messages, contents)
        batches = self._decode(kept, columns)
        if not batches:
            return None
        return pa.Table.from_batches(batches).replace_schema_metadata()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file again, which must be the one of the last look."""
        with open_file(self.path) as opened:
            if os.fstat(opened.fileno()).st_ino != self._file_number:
                raise SegmentReplacedError(errno.ESTALE, "replaced while the run was read", str(self.path))
            yield opened.fileno()

    def _contents(self, file: int, messages: Sequence[ArrowMessage]) -> list[bytes | None]:
        """Return the bytes of messages; None where their checksum differs."""
        contents: list[bytes | None] = []
        for message in messages:
            content = os.pread(file, message.size, message.offset)
            crc = self._checksums.get(message.offset)
            is_whole = len(content) == message.size and (crc is None or zlib.crc32(content) == crc)
            contents.append(content if is_whole else None)
        return contents

    def _readable(
        self, messages: Sequence[ArrowMessage], contents: Sequence[bytes | None]
    ) -> list[tuple[ArrowMessage, bytes]]:
        """Return messages that are whole, of a possible size, and have whole dictionaries."""
        kept: list[tuple[ArrowMessage, bytes]] = []
        missing: set[int] = set()
        for message, content in zip(messages, contents, strict=True):
            if content is not None and message.kind != SCHEMA:
                try:
                    unpacked = unpacked_bytes(content)
                except ValueError as error:
                    self._leave_out(message, str(error))
                    content = None
                else:
                    if not self._has_room(message, unpacked):
                        self._leave_out(message, f"it would take {unpacked:,} bytes of memory")
                        content = None
            elif content is None:
                self._leave_out(message, "its checksum differs: some of its bytes have changed")
            if message.kind == DICTIONARY:
                (missing.add if content is None else missing.discard)(message.dictionary)
            if content is None:
                continue
            if message.kind == RECORD_BATCH and missing:
                self._leave_out(message, "the words that its rows refer to are damaged")
                continue
            kept.append((message, content))
        return kept

    def _has_room(self, message: ArrowMessage, num_bytes: int) -> bool:
        more = num_bytes - _MOST_UNPACKED_PER_BYTE * message.size
        if more <= 0 or message.offset in self._taken:
            return True
        if more > self._room:
            return False
        self._room -= more
        self._taken.add(message.offset)
        return True

    def _decode(self, kept: Sequence[tuple[ArrowMessage, bytes]], columns: list[int] | None) -> list[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=columns)
        stream = pa.ipc.open_stream(pa.py_buffer(b"".join(content for _, content in kept)), options=options)
        batches = []
        for message in (message for message, _ in kept if message.kind == RECORD_BATCH):
            try:
                batch = stream.read_next_batch()
                batch.validate(full=True)  # pyarrow would read beyond the end of a damaged column
                _check_words(batch)
            except (pa.ArrowException, OSError, StopIteration) as error:
                # What follows may refer to what was damaged here: without checksums that is not known.
                self._give_up_at(message, first_line(error))
                break
            batches.append(batch)
        return batches

    def _leave_out(self, message: ArrowMessage, why: str) -> None:
        if message.kind == DICTIONARY or message.offset in self._damaged:
            return  # the batches that refer to a dictionary are reported
        self._damaged.add(message.offset)
        number = self.batches.index(message) + 1
        self.problems.append(
            f"{self.path}: batch {number} of {len(self.batches)} is damaged and was left out ({why}). "
            "Copy the file again if the original is still there."
        )

    def _give_up_at(self, message: ArrowMessage, why: str) -> None:
        if message.offset not in self._damaged:
            self._damaged.add(message.offset)
            whole = self.batches.index(message)
            self.problems.append(f"{self.path}: torn after {whole} batches, read up to there ({why}).")

    def report_torn_end(self) -> None:
        """Report a torn end of a file that is no longer written to."""
        if not self.ends_whole:
            why = "what follows is no whole message, or not the checksums of those before it"
            self.problems.append(f"{self.path}: torn after {len(self.batches)} batches, read up to there ({why}).")


def _check_words(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid for a null among the words that rows refer to: a recorder writes it into the rows."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
            raise pa.ArrowInvalid(f"a null is among the words of its column {name}")


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _pread(file: int, size: int, offset: int) -> bytes:
    return os.pread(file, size, offset)


class Extent(NamedTuple):
    """Consecutive record batches of one segment. Ends of steps and times are inclusive; (0, −1) means none."""

    segment: int  # position among the segments of the rank
    first_batch: int
    end_batch: int  # exclusive
    end_byte: int  # end of the last batch in the file; differs if the file was replaced
    num_rows: int
    first_step: int
    last_step: int
    first_ns: int  # start of the first row without a step, on the rank's clock
    last_ns: int

    @classmethod
    def of(cls, segment: int, index: SegmentIndex, batches: tuple[int, int], spans: Spans) -> Extent:
        steps = spans.step[spans.step >= 0]
        begins = spans.start[spans.step < 0]
        return cls(segment, *batches, _end_byte(index, batches[1]), len(spans), *_range(steps), *_range(begins))


class _Ranges(NamedTuple):
    """Ranges that mostly ascend; ends are inclusive, of an empty one the last is below the first."""

    first: Int64
    last: Int64
    first_from_here: Int64  # the lowest first of this and all later ones
    last_so_far: Int64  # the highest last of this and all earlier ones

    @classmethod
    def of(cls, first: Int64, last: Int64) -> _Ranges:
        is_empty, limits = last < first, np.iinfo(np.int64)
        lowest = np.where(is_empty, limits.max, first)[::-1]
        highest = np.where(is_empty, limits.min, last)
        return cls(first, last, np.minimum.accumulate(lowest)[::-1], np.maximum.accumulate(highest))

    def overlapping(self, first: int, last: int) -> Int64:
        """Return the places of the ranges that overlap another one."""
        begin = int(np.searchsorted(self.last_so_far, first))
        end = int(np.searchsorted(self.first_from_here, last, side="right"))
        near = slice(begin, max(begin, end))
        low, high = np.maximum(self.first[near], first), np.minimum(self.last[near], last)
        return begin + np.flatnonzero(low <= high)


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of a rank, in the order of its files."""

    rows: Int64  # one per extent, its fields
    steps: _Ranges
    times: _Ranges

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Extents:
        rows = np.array(extents, np.int64).reshape(-1, len(Extent._fields))
        *_, first_step, last_step, first_ns, last_ns = rows.T
        return cls(rows, _Ranges.of(first_step, last_step), _Ranges.of(first_ns, last_ns))

    def __len__(self) -> int:
        return len(self.rows)

    def holding(self, first_step: int, last_step: int, begin_ns: int, end_ns: int) -> Int64:
        """Return the places of those with rows of these steps, or of no step that begin in this time; all inclusive."""
        return np.union1d(self.steps.overlapping(first_step, last_step), self.times.overlapping(begin_ns, end_ns))

    def take(self, places: Int64) -> tuple[Extent, ...]:
        return tuple(Extent(*row) for row in self.rows[places].tolist())


def read_forward(
    segments: Sequence[Segment], marks: RankMarks, problems: list[str]
) -> Iterator[tuple[Extent, DecodedBlock]]:
    """Read all batches of a rank as written, a few at a time; add to ``marks`` and ``problems``.

    Raises:
        RunNotFoundError: this machine does not see the files.
    """
    _must_see(segments)
    for number, segment in enumerate(segments):
        index = SegmentIndex(segment.path, segment.room)
        if not _extend(index, problems):
            continue
        for first, end in _groups(index):
            table = _read(index, first, end, problems)
            if table is None:
                continue
            decoded = decode([RankTable(segments[0].metadata, known_columns(table))], None, [marks])
            yield Extent.of(number, index, (first, end), decoded.block.spans), decoded
        index.report_torn_end()
        problems += index.problems


def read_extents(
    segments: Sequence[Segment], extents: Iterable[Extent], marks: RankMarks, problems: list[str]
) -> Iterator[DecodedBlock]:
    """Read only these batches of a rank again, ascending; of a segment that was compacted meanwhile, all.

    Raises:
        RunNotFoundError: this machine does not see the files.
    """
    _must_see(segments)
    for number, extents_of_segment in groupby(extents, key=lambda extent: extent.segment):
        index = SegmentIndex(segments[number].path, segments[number].room)
        if not _extend(index, problems):
            continue
        wanted = [*extents_of_segment]
        same = all(_end_byte(index, extent.end_batch) == extent.end_byte for extent in wanted)
        for first, end in _runs(wanted) if same else _groups(index):
            table = _read(index, first, end, problems)
            if table is not None:
                yield decode([RankTable(segments[0].metadata, known_columns(table))], None, [marks])
        problems += index.problems


def _must_see(segments: Sequence[Segment]) -> None:
    # Single segments are deleted to keep to a budget; the folder of a rank is there as long as the run is.
    folder = segments[0].path.parent
    if not folder.is_dir():
        raise RunNotFoundError(
            f"{folder}: not there on {socket.gethostname()}, which was to read it. Workers must see the run under the "
            "same path."
        )


def _end_byte(index: SegmentIndex, end_batch: int) -> int:
    if not 0 < end_batch <= len(index.batches):
        return -1
    last = index.batches[end_batch - 1]
    return last.offset + last.size


def _range(values: npt.NDArray[np.integer]) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (0, -1)


def _groups(index: SegmentIndex) -> Iterator[tuple[int, int]]:
    """Yield ranges of batches that are read together; ends are exclusive."""
    first, size = 0, 0
    for number, message in enumerate(index.batches):
        size += message.size
        if size >= _BYTES_AT_ONCE:
            yield first, number + 1
            first, size = number + 1, 0
    if first < len(index.batches):
        yield first, len(index.batches)


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Yield the batches of consecutive extents; ends are exclusive."""
    first, end = extents[0].first_batch, extents[0].end_batch
    for extent in extents[1:]:
        if extent.first_batch != end:
            yield first, end
            first = extent.first_batch
        end = extent.end_batch
    yield first, end


def _extend(index: SegmentIndex, problems: list[str]) -> bool:
    try:
        index.extend()
    except FileNotFoundError:
        problems.append(f"{index.path}: was deleted while the run was read, to keep to its budget.")
        return False
    except OSError as error:
        problems.append(f"{index.path}: not readable ({first_line(error)}).")
        return False
    return True


def _read(index: SegmentIndex, first: int, end: int, problems: list[str]) -> pa.Table | None:
    try:
        return index.read(first, end)
    except FileNotFoundError:
        problems.append(f"{index.path}: was deleted while the run was read, to keep to its budget.")
    except SegmentReplacedError:
        problems.append(f"{index.path}: was written anew while the run was read; read the run again.")
    except (pa.ArrowException, OSError) as error:
        problems.append(f"{index.path}: not readable ({first_line(error)}).")
    return None
