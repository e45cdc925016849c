"""Read a run directory; torn files up to their last whole batch, with the rest reported in ``Run.problems``.

>>> from commtrace.trace.files.reader import load_run
>>> run = load_run("commtrace-runs/my-run", steps="10:20")      # doctest: +SKIP
>>> run.ranks[0].spans.start                                    # doctest: +SKIP
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from commtrace.errors import RunNotFoundError, TraceFormatError
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.files import locate
from commtrace.trace.files.arrays import numbers
from commtrace.trace.files.decoding import DecodedBlock, RankTable, decode, known_columns, missing_columns
from commtrace.trace.files.locate import (
    RecordedLaunch,
    Segment,
    find_run_directory,
    missing_ranks,
    missing_segments,
    newest_session,
    rank_directories,
    two_at_once,
)
from commtrace.trace.files.rank_files import segment_paths
from commtrace.trace.files.segment_index import ROOM_OF_RUN, ROOM_OF_TAIL, SegmentIndex, first_line
from commtrace.trace.files.side_files import with_side_files
from commtrace.trace.files.writer import segment_step_ranges
from commtrace.trace.inputs import printable
from commtrace.trace.metadata import RankMetadata, measures_durations
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection import StepRange

_NUMBER: Final = re.compile("[0-9]{1,9}")

_BYTES_OF_BLOCK: Final = 1_000_000
"""Compressed, of ranks that are read together: a row takes 7 to 20 of them."""

NEWEST_SEGMENTS: Final = 2
"""Segments of each rank that :func:`load_newest` reads."""


def load_run(path: str | Path, steps: str | StepRange | None = None) -> Run:
    """Load the newest attempt recorded in ``path``.

    Args:
        path: a run directory, a directory that holds exactly one, or ``DIRECTORY/latest``.
        steps: load only the spans of these: ``"A:B"``, ``"A:B:k"`` or ``"A"`` (B is exclusive).

    Raises:
        RunNotFoundError: nothing was recorded there.
        TraceFormatError: the files were written by a newer, incompatible commtrace.
        ConfigurationError: ``steps`` cannot be parsed.
    """
    wanted = StepRange.parse(steps) if isinstance(steps, str) else steps
    return load_files(find_files(path), wanted)


class RunFiles(NamedTuple):
    """The segments of the newest attempt in a run directory, by rank, oldest first; ``problems`` are sentences."""

    directory: Path
    segments: Mapping[int, list[Segment]]
    problems: tuple[str, ...]


def find_files(path: str | Path) -> RunFiles:
    """Read the headers of all segments; arguments and errors are those of :func:`load_run`."""
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    segments = _scan(directory, problems)
    chosen = newest_session(segments, problems, _described)
    problems += two_at_once(segments, chosen, _recorded_until)
    return RunFiles(directory, chosen, tuple(problems))


def load_files(files: RunFiles, steps: StepRange | None = None) -> Run:
    """Load all spans of these segments, or those of some steps. Raises as :func:`load_run`."""
    return _loaded(files.directory, files.segments, steps, [*files.problems], are_all=True)


def load_earlier_attempts(run: Run, *, only_ends: bool = False) -> Iterator[Run]:
    """Yield the attempts of the same job before this one, oldest first, if their files lie beside it.

    With ``only_ends``, only the last segment of each rank is read.
    """
    newest = run.any_metadata
    if not newest.attempt or not run.path.is_dir():
        return
    of_run = [segment for segment in _scan(run.path, []) if segment.metadata.run_id == newest.run_id]
    for attempt in sorted(
        {segment.metadata.attempt for segment in of_run if segment.metadata.attempt < newest.attempt}
    ):
        segments = newest_session(
            [segment for segment in of_run if segment.metadata.attempt == attempt], [], _described
        )
        if only_ends:
            segments = {rank: segments_of_rank[-1:] for rank, segments_of_rank in segments.items()}
        yield _loaded(run.path, segments, None, [])


def load_newest(path: str | Path) -> Run:
    """Load only the newest segments of each rank. Raises as :func:`load_run`."""
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    segments = newest_session(_scan(directory, problems, NEWEST_SEGMENTS), problems, _described)
    return _loaded(directory, segments, None, problems)


def newest_recording(rank_directory: Path) -> RankTrace | None:
    """Return what the last file of a rank says of it and of its end, without its rows; None if that is not readable."""
    try:
        segment = _read_header(segment_paths(rank_directory)[-1])
        return _described([segment])
    except (IndexError, OSError, ValueError, pa.ArrowException, TraceFormatError):
        return None


def read_files(path: str | Path) -> Iterator[pa.Table]:
    """Yield the rows of the newest attempt as they are in its files, marks included, file by file; strings for codes.

    Columns are ``rank`` and those of the schema; −1 is not applicable, and null what older versions did not write.
    Raises as :func:`load_run`.
    """
    columns = pa.schema([("rank", pa.int32()), *((field.name, _plain(field.type)) for field in schema.SCHEMA)])
    yield columns.empty_table()
    chosen = newest_session(_scan(find_run_directory(Path(path)), []), [], _described)
    for segment in (segment for rank in sorted(chosen) for segment in chosen[rank]):
        table, _ = _read_segment(segment.path, segment.room)
        if table is not None:
            rank, table = pa.repeat(pa.scalar(segment.metadata.rank, pa.int32()), len(table)), known_columns(table)
            rows = [rank, *(table.column(name) for name in schema.SCHEMA.names)]
            yield pa.table(rows, names=columns.names).cast(columns)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def newest_segments(directory: Path, problems: list[str], newest: int) -> dict[int, list[Segment]]:
    """Return the ``newest`` last segments of each rank of the newest attempt, oldest first."""
    return newest_session(_scan(directory, problems, newest), problems, _described)


def segments_in(directory: Path) -> list[Segment]:
    """Return all segments of a run directory with a readable header."""
    return _scan(directory, [])


def newest_launch_in(directory: Path) -> RecordedLaunch | None:
    """Return the newest launch in a run directory, from headers alone; None if there is none."""
    return locate.newest_launch(_scan(directory, []))


def why_not_one_job(first: RecordedLaunch, second: RecordedLaunch) -> str:
    """Return why two launches are not one job, read from their files; empty if they are."""
    return locate.why_not_one_job(first, second, _described)


def _loaded(
    directory: Path,
    segments: Mapping[int, list[Segment]],
    wanted: StepRange | None,
    problems: list[str],
    *,
    are_all: bool = False,
) -> Run:
    names: list[str] = []
    blocks: list[Block] = []
    ranks: dict[int, RankTrace] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for read in pool.map(lambda part: _read_block(part, wanted), _of_block_size(segments)):
            read.rename(names)
            problems += read.problems
            blocks.append(read.block)
            for rank, trace in read.ranks.items():
                folder = segments[rank][0].path.parent
                ranks[rank] = with_side_files(trace, folder)
    if not ranks:
        raise RunNotFoundError(f"{directory}: no readable spans. " + " ".join(problems))
    problems += missing_ranks(ranks, directory)
    if are_all:
        problems += [problem for rank, trace in ranks.items() for problem in missing_segments(segments[rank], trace)]
    run = Run(path=directory, ranks=ranks, names=names, problems=tuple(map(printable, problems)))
    return run.with_blocks(blocks)


def _of_block_size(segments: Mapping[int, list[Segment]]) -> Iterator[dict[int, list[Segment]]]:
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
    for segments_of_rank in segments.values():
        table, notes = _read_rank(segments_of_rank, steps)
        problems += notes
        if table is not None:
            tables.append(RankTable(segments_of_rank[0].metadata, table))
    decoded = decode(tables, steps)
    return decoded._replace(problems=[*problems, *decoded.problems])


def _scan(directory: Path, problems: list[str], newest: int = 0) -> list[Segment]:
    """Read the headers of all segments, or of the ``newest`` last ones of each rank."""
    segments: list[Segment] = []
    for folder in rank_directories(directory):
        try:
            paths = segment_paths(folder)[-newest:]
        except OSError as error:
            problems.append(f"{folder}: skipped, it cannot be read ({error.strerror}).")
            continue
        for path in paths:
            try:
                segment = _read_header(path)
            except FileNotFoundError:
                continue  # a running job has just deleted it, and reports that in a `discarded` mark
            except (pa.ArrowException, OSError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
                problems.append(f"{path}: skipped, its header is not readable ({why}).")
            except TraceFormatError:
                raise
            except ValueError as error:
                why = f"its header is damaged or of another program ({first_line(error)})"
                problems.append(f"{path}: skipped, {why}. Copy it again.")
            else:
                # A long run has thousands of segments, and kilobytes of metadata in each.
                is_same = bool(segments) and segments[-1].metadata == segment.metadata
                segments.append(replace(segment, metadata=segments[-1].metadata) if is_same else segment)
    share = ROOM_OF_RUN // max(len(segments), 1)
    return [replace(segment, room=share) for segment in segments]


def _read_header(path: Path) -> Segment:
    index = SegmentIndex(path)
    columns = index.read_header()
    metadata = columns.metadata or {}
    if schema.METADATA_KEY not in metadata:
        raise ValueError("an Arrow stream, but no segment of commtrace")
    version, first_step = (_number(metadata, name) for name in (b"commtrace.format", b"commtrace.first_step"))
    if version > schema.FORMAT_VERSION:
        raise TraceFormatError(
            f"{path} has format {version}; this commtrace reads up to {schema.FORMAT_VERSION}. "
            "Update it: pip install --upgrade commtrace"
        )
    names = columns.names
    missing = missing_columns(names)
    if missing:
        raise TraceFormatError(f"{path} has no column {missing[0]!r}; it was written by an incompatible commtrace")
    for column in () if columns.equals(schema.SCHEMA) else columns:
        if column.name in schema.SCHEMA.names and not column.equals(schema.SCHEMA.field(column.name)):
            raise ValueError(f"column {column.name} holds {column.type}")
        if names.count(column.name) > 1:
            raise ValueError(f"there are several columns {column.name}")
    rank_metadata = RankMetadata.from_json(metadata[schema.METADATA_KEY])
    number, first_number = (
        _number(metadata, name) if name in metadata else None  # files of older versions do not say it
        for name in (b"commtrace.segment", b"commtrace.first_segment")
    )
    return Segment(path, rank_metadata, first_step, index.num_bytes, number, first_number)


def _number(metadata: Mapping[bytes, bytes], name: bytes) -> int:
    text = metadata.get(name, b"").decode("ascii", "replace")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{name.decode()} is no number")
    return int(text)


def _described(segments: list[Segment]) -> RankTrace | None:
    return _read_block({0: segments}, None).ranks.get(segments[0].metadata.rank)


def _recorded_until(path: Path) -> int:
    """Return the latest end in a segment, ns of its host's monotonic clock; 0 if unknown."""
    table, _ = _read_segment(path, ROOM_OF_TAIL)
    if table is None or not len(table) or table["end"].null_count:
        return 0
    return max(int(numbers(chunk).max()) for chunk in table["end"].chunks if len(chunk))


def _read_rank(segments: list[Segment], steps: StepRange | None) -> tuple[pa.Table | None, list[str]]:
    tables, notes = [], []
    ranges = segment_step_ranges([segment.first_step for segment in segments])
    for position, (segment, (first, last)) in enumerate(zip(segments, ranges, strict=True)):
        newest = position == len(segments) - 1
        if measures_durations(segment.metadata.environment):
            first = 0  # rows of any earlier step may have come late
        # The first segment holds the marks that describe the rank, the newest the latest ones: read both in any case.
        if steps is not None and position > 0 and not newest and not steps.overlaps(first, last):
            continue
        table, problems = _read_segment(segment.path, segment.room)
        tables += [known_columns(table)] if table is not None else []
        notes += problems
    if not tables:
        return None, notes
    return pa.concat_tables(tables), notes


def _read_segment(path: Path, room: int) -> tuple[pa.Table | None, list[str]]:
    index = SegmentIndex(path, room)
    try:
        table = index.read_all()
    except FileNotFoundError:
        return None, [f"{path}: was deleted while the run was read, to keep to its budget."]
    except (pa.ArrowException, OSError) as error:
        return None, [f"{path}: not readable ({first_line(error)})."]
    index.report_torn_end()
    return table, index.problems
