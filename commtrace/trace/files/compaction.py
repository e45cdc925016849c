"""Rewrite complete segments in few large zstd batches, at about a quarter of the bytes; rows, order and header stay.

Small batches limit the loss of a crash, but compress badly: twenty-three column headers for a hundred rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from commtrace.trace.files.messages import SegmentFile, is_as_written
from commtrace.trace.files.rank_files import COMPACTING, remove_quietly

ROWS_PER_BATCH: Final = 8_192
"""Readers decode whole batches: with 65,536 rows, files shrink by 4 % but readers decode eight times as many rows."""

MOST_ROWS: Final = 500_000
"""Larger segments stay as they are: rewriting one would delay the harvester for too long."""

_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)
_WRITE_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 6), use_threads=False)


def is_worthwhile(num_batches: int, num_rows: int) -> bool:
    return num_batches > 1 and num_rows <= MOST_ROWS


def compact(segment: Path, num_rows: int, sync: bool) -> bool:
    """Replace a segment of ``num_rows`` rows by one with few batches; return False, and keep the old one, on any error.

    A process that is killed at any instant leaves one of the two, whole; with ``sync``, so does a crash of the host.
    Waiting for the disk can take seconds.
    """
    temporary = segment.with_name(segment.name + COMPACTING)
    try:
        if not is_as_written(segment):  # a new checksum would hide the damage
            return False
        if _rewrite(segment, temporary, sync) != num_rows or temporary.stat().st_size >= segment.stat().st_size:
            temporary.unlink()
            return False
        os.replace(temporary, segment)
    except (OSError, pa.ArrowException):
        # A full disk, a deleted file: the segment is whole and stays. Not worth a warning.
        remove_quietly(temporary)
        return False
    return True


def _rewrite(segment: Path, target: Path, sync: bool) -> int:
    num_rows = 0
    with segment.open("rb") as source, contextlib.closing(SegmentFile(target)) as file:
        stream = pa.ipc.open_stream(source, options=_READ_OPTIONS)
        with pa.ipc.new_stream(file.sink, stream.schema, options=_WRITE_OPTIONS) as compacted:
            for table in _merged(stream):
                compacted.write_table(table)
                file.flush()
                num_rows += len(table)
        file.finish()
        if sync:
            file.sync()
    return num_rows


def _merged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= ROWS_PER_BATCH:
            yield _one_batch(held)
            held = []
    if held:
        yield _one_batch(held)


def _one_batch(batches: list[pa.RecordBatch]) -> pa.Table:
    # The dictionaries of a segment grow from batch to batch, maybe within these.
    return pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
