"""Reads a run directory back: the only code besides the writer that knows the file layout.

>>> from commtrace.trace.reader import load_run
>>> run = load_run("commtrace-runs/my-run", steps="10:20")      # doctest: +SKIP
>>> run.ranks[0].spans.start                                    # doctest: +SKIP

A torn file (a killed rank, a full disk, a run that is still going on) is read up to its last whole batch; what could
not be read is said in ``Run.problems``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa

from commtrace.errors import RunNotFoundError, TraceFormatError
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.decoding import DecodedBlock, RankTable, decode
from commtrace.trace.locate import find_run_directory, rank_directories
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.sessions import Segment, missing_ranks, newest_session, two_at_once
from commtrace.trace.step_range import StepRange
from commtrace.trace.writer import segment_paths, segment_step_ranges

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
"""Files are read side by side: threads inside of each would only wait for one another."""


_BYTES_OF_BLOCK: Final = 1_000_000
"""Compressed, of ranks that are read together: a row takes 7 to 20 of them."""

NEWEST_SEGMENTS: Final = 2
"""How many segments of each rank :func:`load_newest` reads."""


def load_run(path: str | Path, steps: str | StepRange | None = None) -> Run:
    """Load the newest attempt recorded in ``path``.

    Args:
        path: a run directory, a directory that holds exactly one, or ``DIRECTORY/latest``.
        steps: only the spans of these steps: ``"A:B"``, ``"A:B:k"`` or ``"A"`` (B is exclusive).

    Raises:
        RunNotFoundError: nothing was recorded there.
        TraceFormatError: the files were written by a newer, incompatible commtrace.
        ConfigurationError: ``steps`` cannot be parsed.
    """
    wanted = StepRange.parse(steps) if isinstance(steps, str) else steps
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    found = _scan(directory, problems)
    chosen = newest_session(found, problems)
    problems += two_at_once(found, chosen, _recorded_until)
    return _loaded(directory, chosen, wanted, problems)


def load_newest(path: str | Path) -> Run:
    """Load only what the ranks of a run wrote last, for whoever asks where it is now. Raises as :func:`load_run`."""
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    segments = newest_session(_scan(directory, problems, NEWEST_SEGMENTS), problems)
    return _loaded(directory, segments, None, problems)


def newest_segments(directory: Path, problems: list[str], newest: int) -> dict[int, list[Segment]]:
    """By rank, so many newest segments of the newest attempt, oldest first; of the others nothing is read."""
    return newest_session(_scan(directory, problems, newest), problems)


def _loaded(directory: Path, segments: dict[int, list[Segment]], wanted: StepRange | None, problems: list[str]) -> Run:
    names: list[str] = []
    blocks: list[Block] = []
    ranks: dict[int, RankTrace] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for read in pool.map(lambda own: _read_block(own, wanted), _of_block_size(segments)):
            read.rename(names)
            problems += read.problems
            blocks.append(read.block)
            ranks.update(read.ranks)
    if not ranks:
        raise RunNotFoundError(f"{directory}: no readable spans. " + " ".join(problems))
    problems += missing_ranks(ranks)
    run = Run(path=directory, ranks=ranks, names=names, problems=tuple(problems))
    return run.with_blocks(blocks)


def _of_block_size(segments: Mapping[int, list[Segment]]) -> Iterator[dict[int, list[Segment]]]:
    """The segments of so many ranks at a time as make up a block."""
    held: dict[int, list[Segment]] = {}
    size = 0
    for rank in sorted(segments):
        held[rank] = segments[rank]
        size += sum(segment.size for segment in segments[rank])
        if size >= _BYTES_OF_BLOCK:
            yield held
            held, size = {}, 0
    if held:
        yield held


def _read_block(segments: Mapping[int, list[Segment]], steps: StepRange | None) -> DecodedBlock:
    tables, problems = [], []
    for own in segments.values():
        table, notes = _read_rank(own, steps)
        problems += notes
        if table is not None:
            tables.append(RankTable(own[0].metadata, table))
    decoded = decode(tables, steps)
    return decoded._replace(problems=[*problems, *decoded.problems])


def _scan(directory: Path, problems: list[str], newest: int = 0) -> list[Segment]:
    """The segments of all ranks, or only so many newest of each, with the metadata in their headers."""
    found = []
    for folder in rank_directories(directory):
        for path in segment_paths(folder)[-newest:]:
            try:
                found.append(_read_header(path))
            except FileNotFoundError:
                continue  # a running job has just deleted it to keep to its budget; its `discarded` mark says so
            except (pa.ArrowException, OSError) as error:
                problems.append(f"{path}: skipped, its header is not readable ({_first_line(error)}).")
            except TraceFormatError:
                raise
            except (KeyError, TypeError, ValueError) as error:  # what comes of bytes that were changed
                why = f"its header is damaged or of another program ({_first_line(error)})"
                problems.append(f"{path}: skipped, {why}. Copy it again.")
    return found


def _read_header(path: Path) -> Segment:
    with pa.OSFile(str(path), "rb") as file:
        columns, size = pa.ipc.open_stream(file).schema, file.size()
    metadata = columns.metadata or {}
    if schema.METADATA_KEY not in metadata:
        raise TypeError("an Arrow stream, but no segment of commtrace")
    version = int(metadata[b"commtrace.format"])
    if version > schema.FORMAT_VERSION:
        raise TraceFormatError(
            f"{path} has format {version}; this commtrace reads up to {schema.FORMAT_VERSION}. "
            "Update it: pip install --upgrade commtrace"
        )
    for column in columns:
        if column.name in schema.SCHEMA.names and not column.equals(schema.SCHEMA.field(column.name)):
            raise TypeError(f"column {column.name} holds {column.type}")
    rank_metadata = RankMetadata.from_json(metadata[schema.METADATA_KEY])
    return Segment(path, rank_metadata, int(metadata[b"commtrace.first_step"]), size)


def _recorded_until(path: Path) -> int:
    """The latest instant in a segment, on its host's monotonic clock."""
    batches, _ = _read_batches(path)
    return max((int(batch.column("end").to_numpy().max()) for batch in batches if batch.num_rows), default=0)


def _read_rank(segments: list[Segment], steps: StepRange | None) -> tuple[pa.Table | None, list[str]]:
    tables, notes = [], []
    ranges = segment_step_ranges([segment.first_step for segment in segments])
    for position, (segment, (first, last)) in enumerate(zip(segments, ranges, strict=True)):
        newest = position == len(segments) - 1
        # The first segment holds the marks that describe the rank, the newest the latest ones: read both in any case.
        if steps is not None and position > 0 and not newest and not steps.overlaps(first, last):
            continue
        batches, note = _read_batches(segment.path)
        tables += [pa.Table.from_batches(batches)] if batches else []
        notes += [note] if note else []
    if not tables:
        return None, notes
    return pa.concat_tables([table.replace_schema_metadata() for table in tables]), notes


def _read_batches(path: Path) -> tuple[list[pa.RecordBatch], str | None]:
    batches = []
    try:
        source = pa.OSFile(str(path), "rb")
    except FileNotFoundError:
        return [], f"{path}: was deleted while the run was read, to keep to its budget."
    with source as file:
        stream = pa.ipc.open_stream(file, options=_READ_OPTIONS)
        try:
            for batch in stream:
                batch.validate(full=True)  # pyarrow would read beyond the end of a damaged column
                batches.append(batch)  # one at a time, so that a torn tail costs only itself
        except (pa.ArrowException, OSError) as error:
            return batches, f"{path}: torn after {len(batches)} batches, read up to there ({_first_line(error)})."
    return batches, None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
