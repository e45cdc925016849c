"""Write one rank's spans into segments: ``RUN_DIR/rank-00003/spans-0007.arrows``.

A segment is an Arrow IPC *stream*, written batch by batch, so a killed process leaves everything up to its last batch
readable. Segments rotate by steps, so that readers can load a range of steps alone.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commtrace.trace import schema
from commtrace.trace.files import compaction
from commtrace.trace.files.arrays import index_array, number_array, text_array
from commtrace.trace.files.budget import Budget, Discards
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.files.messages import SegmentFile, custom_metadata
from commtrace.trace.files.rank_files import (
    next_segment_number,
    prepare_rank_directory,
    rank_directory,
    remove_file,
    write_losses,
)
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import RowBatch, Spans

_ANY_STEP: Final = np.iinfo(np.int32).max
"""Above the steps of all rows."""

# Threads would only add some to the training process: batches are small.
_QUICK = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""For batches that compaction will rewrite: zstd takes four to eight times as long for small ones."""
_DENSE = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
"""For batches that are as large as compaction makes them."""
_CLOSED_VOCABULARIES: Final = {
    "kind": text_array(schema.KINDS), "lane": text_array(schema.LANES), "timing": text_array(schema.TIMINGS),
}  # fmt: skip
_LASTING_MARKS: Final = frozenset({"process_group", "topology", "problem", "graph"})
"""Marks that stay true: later segments repeat them, so that they can be read without the earlier ones."""
_LATEST_MARKS: Final = frozenset({"clock_anchor", "in_flight", "peak_memory", "trigger", "left"})
"""Marks of which later segments repeat the last one, for the same reason."""


class _Complete(NamedTuple):
    path: Path
    num_batches: int
    num_rows: int


class SegmentWriter:
    """Write rows to segments of one rank, one segment per ``steps_per_segment`` steps; keep within ``budget``.

    After an :class:`OSError` (disk full, directory gone) the segment is abandoned and the next write starts another.
    Written rows stay readable. A directory that somebody deleted is not made again.

    Args:
        files: where the file system is called.
    """

    def __init__(
        self,
        run_directory: Path,
        metadata: RankMetadata,
        *,
        steps_per_segment: int = 100,
        budget: Budget = Budget(),  # noqa: B008 -- immutable
        files: FileCalls = HERE,
    ) -> None:
        self.directory = rank_directory(run_directory, metadata.rank)
        self._files = files
        earlier = files.call(prepare_rank_directory, self.directory)
        self._metadata = metadata
        self._steps_per_segment = min(steps_per_segment, budget.steps_per_segment or steps_per_segment)
        self._bytes_per_segment = budget.bytes_per_segment
        self._discards = Discards(budget, earlier, files)
        self._first_step = 0
        self._last_step = -1
        self._words: dict[str, _Vocabulary] = {"name": _Vocabulary(pa.int32()), "dtype": _Vocabulary(pa.int8())}
        self._path = self.directory
        self._num_batches = self._num_rows = 0
        self._is_dense = False
        self._complete: _Complete | None = None
        self._first_number: int | None = None
        self._lasting: dict[Row, None] = {}
        self._latest: dict[str, Row] = {}
        self._file: Any = None
        self._stream: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows as one record batch per segment."""
        batch = RowBatch.of(rows)
        while batch:
            if self._stream is None:
                # Never below what the segment before holds: readers take its last step to be this first one.
                self._open(max(self._last_step, batch.first_step(self._first_step)))
                batch = batch.behind([*self._lasting, *self._latest.values(), *self._discarded()])
            end = self._first_step + self._steps_per_segment
            if batch.last_step < end:
                current, batch = batch, RowBatch()
            else:
                current, batch = batch.of_steps(schema.NOT_APPLICABLE, end), batch.of_steps(end, _ANY_STEP)
            if current:
                self._append(current)
            if batch:
                self._end_segment()

    def write_spans(
        self, spans: Spans, names: Sequence[str], *, before: Sequence[Row] = (), after: Sequence[Row] = ()
    ) -> None:
        """Append columns, ascending by step, in large batches without details; ``names`` are the strings for codes."""
        if not len(spans):
            self.write([*before, *after])
        while len(spans):
            if self._stream is None:
                inside = spans.step[spans.step >= 0]
                self._is_dense = True
                self._open(int(inside.min()) if len(inside) else self._first_step)
                before = [*self._lasting, *before]
            of_segment = int(np.searchsorted(spans.step, self._first_step + self._steps_per_segment))
            count = min(of_segment, compaction.ROWS_PER_BATCH)
            part, spans = spans.take(slice(count)), spans.take(slice(count, None))
            behind = [] if len(spans) else after
            if count or before:
                self._write_batch(self._batch_of_spans(part, names, before, behind))
                self._remember([*before, *behind])
            before = []
            if len(spans) and count == of_segment:
                self._end_segment()

    def _append(self, batch: RowBatch) -> None:
        self._write_batch(self._batch(batch))
        self._last_step = max(self._last_step, batch.last_step)
        self._remember([row for row in batch.rows if row.kind == schema.MARK])
        # One more such pass would make the segment too long to be rewritten.
        is_long = not self._is_dense and self._num_rows + len(batch) > compaction.MOST_ROWS
        if is_long or 0 < self._bytes_per_segment < self._file.num_bytes:
            self._end_segment()

    def _write_batch(self, batch: pa.RecordBatch) -> None:
        try:
            if not self._file.has_name():
                raise FileNotFoundError(errno.ENOENT, "deleted while it was written", str(self.directory))
            self._stream.write_batch(batch, custom_metadata(self._file.take_pending()))
            self._file.flush()
        except (OSError, pa.ArrowException):
            self._abandon()
            raise
        self._num_batches += 1
        self._num_rows += batch.num_rows

    def _remember(self, marks: Sequence[Row]) -> None:
        self._lasting.update(dict.fromkeys(mark for mark in marks if mark.name in _LASTING_MARKS))
        self._latest.update({mark.name: mark for mark in marks if mark.name in _LATEST_MARKS})

    def _discarded(self) -> list[Row]:
        discarded = self._discards.to_json()
        return [] if discarded is None else [mark_row("discarded", discarded)]

    def write_losses(self, lost: Mapping[str, int]) -> None:
        self._files.call(write_losses, self.directory, self._metadata.session, dict(lost))

    def close(self) -> None:
        """Close the current segment, and compact it if the budget has room for both forms of it."""
        self._end_segment()
        if self._complete is not None and self._discards.has_room_for(self._complete.path):
            self._compact(sync=False)  # the stop of the recording waits for this

    def _end_segment(self) -> None:
        stream, file = self._stream, self._file
        self._stream = self._file = None
        if stream is not None:
            try:
                stream.close()
                file.finish()
            finally:
                file.close()
            self._discards.closed(self._path, self._first_step, self._last_step)
            if not self._is_dense:
                self._complete = _Complete(self._path, self._num_batches, self._num_rows)
            self._is_dense = False

    def _compact(self, *, sync: bool) -> None:
        segment, self._complete = self._complete, None
        if segment is None or not compaction.is_worthwhile(*segment[1:]):
            return
        if self._files.call(compaction.compact, segment.path, segment.num_rows, sync):
            self._discards.rewritten(segment.path)

    def _open(self, first_step: int) -> None:
        self._discards.make_room(first_step)
        self._compact(sync=True)  # now, as the budget has room for a segment
        number = self._files.call(next_segment_number, self.directory)
        if self._first_number is None:
            self._first_number = number
        self._path = self.directory / f"spans-{number:04d}.arrows"
        self._num_batches = self._num_rows = 0
        metadata = {schema.METADATA_KEY: self._metadata.to_json(), b"commtrace.format": str(schema.FORMAT_VERSION)}
        metadata[b"commtrace.first_step"] = str(first_step)
        metadata[b"commtrace.segment"], metadata[b"commtrace.first_segment"] = str(number), str(self._first_number)
        options = _DENSE if self._is_dense else _QUICK
        self._file = SegmentFile(self._path, self._files)
        try:
            self._stream = pa.ipc.new_stream(self._file.sink, schema.SCHEMA.with_metadata(metadata), options=options)
        except (OSError, pa.ArrowException):
            self._abandon()
            raise
        self._first_step, self._last_step = first_step, -1

    def _abandon(self) -> None:
        file, self._stream, self._file = self._file, None, None
        if file is not None:
            file.close()
        if self._num_batches:
            self._discards.closed(self._path, self._first_step, self._last_step)
        else:  # another unreadable file for every try would help no reader
            self._files.call(remove_file, self._path)

    def _batch(self, batch: RowBatch) -> pa.RecordBatch:
        if batch.has_columns:
            return self._batch_of_columns(batch)
        columns = list(zip(*batch.rows, strict=True))
        return pa.RecordBatch.from_arrays(
            [self._array(field, values) for field, values in zip(schema.SCHEMA, columns, strict=True)],
            schema=schema.SCHEMA,
        )

    def _batch_of_columns(self, batch: RowBatch) -> pa.RecordBatch:
        columns, names = batch.columns, batch.names
        details = text_array([row.detail for row in batch.rows])
        if len(batch.spans):
            details = pa.concat_arrays([details, pa.nulls(len(batch.spans), pa.string())])
        arrays = [
            details if field.name == "detail" else self._column(field, getattr(columns, field.name), names)
            for field in schema.SCHEMA
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema.SCHEMA)

    def _batch_of_spans(
        self, spans: Spans, names: Sequence[str], before: Sequence[Row], after: Sequence[Row]
    ) -> pa.RecordBatch:
        details = pa.nulls(len(spans), pa.string())
        if before or after:
            names = list(names)  # to which those of the marks are added
            marks = Spans.from_tuples([*before, *after], names)
            spans = Spans.concatenate([marks.take(slice(len(before))), spans, marks.take(slice(len(before), None))])
            mark_details = [text_array([mark.detail for mark in part]) for part in (before, after)]
            details = pa.concat_arrays([mark_details[0], details, mark_details[1]])
        arrays = [
            details if field.name == "detail" else self._column(field, getattr(spans, field.name), names)
            for field in schema.SCHEMA
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema.SCHEMA)

    def _column(self, field: pa.Field, values: npt.NDArray[np.integer], names: Sequence[str]) -> pa.Array:
        if field.name in _CLOSED_VOCABULARIES:
            return pa.DictionaryArray.from_arrays(number_array(values, pa.int8()), _CLOSED_VOCABULARIES[field.name])
        if field.name in self._words:
            return self._words[field.name].recode(values, names)
        return number_array(values, field.type)

    def _array(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        if field.name in _CLOSED_VOCABULARIES:
            return pa.DictionaryArray.from_arrays(number_array(values, pa.int8()), _CLOSED_VOCABULARIES[field.name])
        if field.name in self._words:
            return self._words[field.name].encode(values)
        return text_array(values) if field.name == "detail" else number_array(values, field.type)


class _Vocabulary:
    """Codes strings with a dictionary that only grows, so that a stream repeats it only for a new string."""

    def __init__(self, index_type: pa.DataType) -> None:
        self._index_type = index_type
        self._codes: dict[str | None, int] = {None: schema.NOT_APPLICABLE}
        self._words: pa.Array = text_array([])

    def encode(self, values: Sequence[str | None]) -> pa.Array:
        try:
            codes = [self._codes[value] for value in values]
        except KeyError:
            self._learn(values)
            codes = [self._codes[value] for value in values]
        return pa.DictionaryArray.from_arrays(index_array(codes, self._index_type), self._words)

    def recode(self, codes: npt.NDArray[np.integer], names: Sequence[str]) -> pa.Array:
        """Translate codes of ``names`` into own ones; negative codes become null."""
        used = np.unique(codes[codes >= 0]).tolist()
        if any(names[code] not in self._codes for code in used):
            self._learn([names[code] for code in used])
        code_here = np.zeros(len(names) + 1, np.int32)
        for code in used:
            code_here[code] = self._codes[names[code]]
        indices = index_array(np.where(codes < 0, schema.NOT_APPLICABLE, code_here[codes]), self._index_type)
        return pa.DictionaryArray.from_arrays(indices, self._words)

    def _learn(self, values: Sequence[str | None]) -> None:
        for value in values:
            self._codes.setdefault(value, len(self._codes) - 1)
        self._words = text_array([word for word in self._codes if word is not None])


def read_header(head: bytes) -> RankMetadata | None:
    """Return who writes a segment, from the beginning of it; None if that cannot be read, or not yet."""
    try:
        with pa.ipc.open_stream(pa.BufferReader(head)) as stream:
            return RankMetadata.from_json((stream.schema.metadata or {}).get(schema.METADATA_KEY, b""))
    except (OSError, ValueError, pa.ArrowException):
        return None


def segment_step_ranges(first_steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last step in segments that start at ``first_steps``.

    A span is written when it has ended, so a segment can also hold rows of the step before its first one.
    """
    lasts = [after for _, after in pairwise(first_steps)]
    return [(first - 1, last) for first, last in zip(first_steps, [*lasts, 2**31 - 1], strict=True)]
