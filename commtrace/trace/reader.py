"""Reads a run directory back: the only code besides the writer that knows the file layout.

>>> from commtrace.trace.reader import load_run
>>> run = load_run("commtrace-runs/my-run", steps="10:20")      # doctest: +SKIP
>>> run.ranks[0].spans.start                                    # doctest: +SKIP

A torn file (a killed rank, a full disk, a run that is still going on) is read up to its last whole batch; what could
not be read is said in ``Run.problems``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from commtrace.errors import RunNotFoundError, TraceFormatError
from commtrace.trace import schema
from commtrace.trace.aggregates import AGGREGATE
from commtrace.trace.locate import find_run_directory, rank_directories
from commtrace.trace.marks import Marks
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.order import stable_order
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, Spans
from commtrace.trace.step_range import StepRange
from commtrace.trace.writer import segment_paths, segment_step_ranges

_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
"""Files are read side by side: threads inside of each would only wait for one another."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a rank, and what its header says."""

    path: Path
    metadata: RankMetadata
    first_step: int


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
    return _loaded(directory, _newest_session(_scan(directory, problems), problems), wanted, problems)


def load_newest(path: str | Path) -> Run:
    """Load only what the ranks of a run wrote last, for whoever asks where it is now. Raises as :func:`load_run`."""
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    segments = _newest_session(_scan(directory, problems, NEWEST_SEGMENTS), problems)
    return _loaded(directory, segments, None, problems)


def newest_segments(directory: Path, problems: list[str], newest: int) -> dict[int, list[Segment]]:
    """By rank, so many newest segments of the newest attempt, oldest first; of the others nothing is read."""
    return _newest_session(_scan(directory, problems, newest), problems)


def _loaded(directory: Path, segments: dict[int, list[Segment]], wanted: StepRange | None, problems: list[str]) -> Run:
    names: list[str] = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        tables = pool.map(lambda rank: _read_rank(segments[rank], wanted), sorted(segments))
        ranks = {}
        for rank, (table, notes) in zip(sorted(segments), tables, strict=True):
            problems += notes
            if table is not None:
                ranks[rank] = rank_trace(segments[rank][0].metadata, table, wanted, names, problems)
    if not ranks:
        raise RunNotFoundError(f"{directory}: no readable spans. " + " ".join(problems))
    problems += missing_ranks(ranks)
    return Run(path=directory, ranks=ranks, names=names, problems=tuple(problems))


def _scan(directory: Path, problems: list[str], newest: int = 0) -> list[Segment]:
    """The segments of all ranks, or only so many newest of each, with the metadata in their headers."""
    found = []
    for rank_directory in rank_directories(directory):
        for path in segment_paths(rank_directory)[-newest:]:
            try:
                found.append(_read_header(path))
            except FileNotFoundError:
                continue  # a running job has just deleted it to keep to its budget; its `discarded` mark says so
            except (pa.ArrowException, OSError) as error:
                problems.append(f"{path}: skipped, its header is not readable ({_first_line(error)}).")
    return found


def _read_header(path: Path) -> Segment:
    with pa.OSFile(str(path), "rb") as file:
        metadata = pa.ipc.open_stream(file).schema.metadata or {}
    if schema.METADATA_KEY not in metadata:
        raise TraceFormatError(f"{path} is an Arrow stream but not a commtrace segment.")
    version = int(metadata[b"commtrace.format"])
    if version > schema.FORMAT_VERSION:
        raise TraceFormatError(
            f"{path} has format {version}; this commtrace reads up to {schema.FORMAT_VERSION}. "
            "Update it: pip install --upgrade commtrace"
        )
    rank_metadata = RankMetadata.from_json(metadata[schema.METADATA_KEY])
    return Segment(path, rank_metadata, int(metadata[b"commtrace.first_step"]))


def _newest_session(segments: list[Segment], problems: list[str]) -> dict[int, list[Segment]]:
    """Of what may be several runs in one directory, the segments of the newest run and attempt, by rank."""
    if not segments:
        return {}
    newest = max(segments, key=lambda segment: segment.metadata.session).metadata
    chosen: dict[int, list[Segment]] = {}
    for segment in segments:
        metadata = segment.metadata
        if _launch(metadata) == _launch(newest):
            chosen.setdefault(metadata.rank, []).append(segment)
    for rank, own in chosen.items():
        session = max(segment.metadata.session for segment in own)
        chosen[rank] = [segment for segment in own if segment.metadata.session == session]
    others = len(segments) - sum(map(len, chosen.values()))
    if others:
        problems.append(
            f"{others} segments of earlier runs or attempts in the same directory were left out; "
            f"shown is run {newest.run_id}, attempt {newest.attempt}."
        )
    return chosen


def _launch(metadata: RankMetadata) -> tuple[str, int, int]:
    """What the ranks of one launch have in common, also when a run is repeated under its old name with fewer ranks."""
    return metadata.run_id, metadata.attempt, metadata.world_size


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
                batches.append(batch)  # noqa: PERF402 -- one at a time, so that a torn tail costs only itself
        except (pa.ArrowException, OSError) as error:
            return batches, f"{path}: torn after {len(batches)} batches, read up to there ({_first_line(error)})."
    return batches, None


def rank_trace(
    metadata: RankMetadata, table: pa.Table, steps: StepRange | None, names: list[str], problems: list[str]
) -> RankTrace:
    """What a rank recorded, from the rows of its files.

    Args:
        metadata: of the rank.
        table: its rows in the order in which they were written.
        steps: only these; None for all.
        names: of the run; words that are new are added.
        problems: of the run; what the rank told is added.
    """
    table = table.unify_dictionaries().combine_chunks()
    columns = {name: _column(table, name, names) for name in DTYPE_OF_COLUMN}
    spans = Spans(**columns)
    marks = spans.kind == schema.MARK
    told = Marks()
    aggregates: dict[int, list[str]] = {}
    mark_rows = np.flatnonzero(marks)
    for row, detail in zip(mark_rows, _texts(table, mark_rows), strict=True):
        if names[spans.name[row]] == AGGREGATE:
            aggregates.setdefault(int(spans.step[row]), []).append(detail)
        else:
            told.read(names[spans.name[row]], json.loads(detail) if detail else {}, int(spans.start[row]))
    problems += dict.fromkeys(f"rank {metadata.rank}: {message}" for message in told.problems)
    selected = ~marks if steps is None else ~marks & steps.mask(spans.step)
    cut = int(told.discarded.get("last_step", schema.NOT_APPLICABLE))
    if cut >= 0:  # a part of this step may have been deleted with the segment that held it
        selected &= (spans.step < 0) | (spans.step > cut)
    kept = spans.take(_in_order(spans, np.flatnonzero(selected)))
    return RankTrace(
        metadata=told.completed(metadata),
        spans=kept,
        groups=told.groups,
        coordinates=told.coordinates,
        parallel=told.parallel,
        topology={key: value for key, value in told.topology.items() if key not in ("coordinates", "parallel")},
        dropped=told.dropped,
        anchors=(metadata.anchor, *told.anchors),
        in_flight=told.in_flight,
        activity=told.activity,
        activity_ns=told.activity_ns,
        drops=tuple(told.drops),
        last_written_ns=int(spans.end.max()) if len(spans) else None,
        closed=told.closed,
        aggregates={
            step: tuple(texts)
            for step, texts in aggregates.items()
            if (steps is None or step in steps) and not 0 <= step <= cut
        },
        discarded=told.discarded,
        progress=tuple(told.progress),
        triggers=tuple(told.triggers.values()),
        details=_details(table, spans, selected),
    )


def _in_order(spans: Spans, rows: Int64) -> Int64:
    """These rows by start, at equal starts the longer one first."""
    rows = rows[stable_order(-spans.end[rows])]
    return np.asarray(rows[stable_order(spans.start[rows])])


def _column(table: pa.Table, name: str, names: list[str]) -> Any:
    dtype = DTYPE_OF_COLUMN[name]
    if name not in table.column_names:
        raise TraceFormatError(f"the trace has no column {name!r}; it was written by an incompatible commtrace")
    column = table[name]
    array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if not pa.types.is_dictionary(array.type):
        return array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    code_of_word = np.array(_codes(name, array.dictionary.to_pylist(), names) or [schema.NOT_APPLICABLE], dtype)
    indices = array.indices
    if not indices.null_count:
        return code_of_word[indices.to_numpy(zero_copy_only=False)]
    present = _present(indices)
    coded = np.full(len(array), schema.NOT_APPLICABLE, dtype)
    # With nothing in some rows, numpy gets the indices as floating-point numbers, which hold them exactly.
    coded[present] = code_of_word[indices.to_numpy(zero_copy_only=False)[present].astype(np.int64)]
    return coded


def _codes(column: str, words: Sequence[str], names: list[str]) -> list[int]:
    vocabulary = {"kind": schema.KINDS, "lane": schema.LANES, "timing": schema.TIMINGS}.get(column)
    if vocabulary is not None:
        return [vocabulary.index(word) for word in words]
    position = {name: code for code, name in enumerate(names)}
    for word in words:
        if word not in position:
            position[word] = len(names)
            names.append(word)
    return [position[word] for word in words]


def _details(table: pa.Table, spans: Spans, selected: Any) -> dict[int, str]:
    detail = table["detail"]
    if detail.null_count == len(detail):
        return {}
    rows = np.flatnonzero(selected & np.concatenate([_present(chunk) for chunk in detail.chunks]))
    texts = _texts(table, rows)
    return {int(spans.id[row]): text for row, text in zip(rows, texts, strict=True)}


def _texts(table: pa.Table, rows: Any) -> list[Any]:
    """Details of these rows. They are few, and ``take`` would import all of pyarrow.compute."""
    detail = table["detail"]
    return [detail[int(row)].as_py() for row in rows]


def _present(array: pa.Array) -> Any:
    """Which entries hold something: the array's own bits, as its ``is_valid`` would import all of pyarrow.compute."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), np.bool_)
    every = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return every[array.offset : array.offset + len(array)].astype(np.bool_)


def missing_ranks(ranks: dict[int, RankTrace]) -> list[str]:
    """A sentence about the ranks of which nothing was found, if there are any."""
    world_size = max(trace.metadata.world_size for trace in ranks.values())
    missing = sorted(set(range(world_size)) - set(ranks))
    if not missing:
        return []
    return [
        f"{len(missing)} of {world_size} ranks have no readable files: {_abbreviated(missing)}. "
        "Copy their rank-NNNNN folders from their nodes into the run directory, or use a shared file system."
    ]


def _abbreviated(ranks: Iterable[int], most: int = 16) -> str:
    listed = list(ranks)
    return ", ".join(map(str, listed[:most])) + (" …" if len(listed) > most else "")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
