"""Decode the Arrow tables of ranks into columns and marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import structs

from commtrace.errors import TraceFormatError
from commtrace.trace import schema
from commtrace.trace.aggregates import AGGREGATE
from commtrace.trace.blocks import Block, bounds_of, end_to_end, rows_in_steps
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.files.arrays import is_there, numbers, texts_of_rows
from commtrace.trace.files.exactness import exact_ends, exact_starts
from commtrace.trace.graphs import with_contents
from commtrace.trace.hang_report import Activity
from commtrace.trace.inputs import MOST_RANKS, printable
from commtrace.trace.marks import Marks, check_aggregates, read_mark
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.run import RankTrace
from commtrace.trace.selection import StepRange
from commtrace.trace.spans import DTYPE_OF_COLUMN, Bool, Int16, Int32, Int64, Spans
from commtrace.trace.topology import without_place

_LATEST_NS: Final = 2**61
"""The year 2043 of an imported trace; differences of such times fit into 64 bits."""

LONGEST_NS: Final = 2**55
"""A year and a month."""

_MOST_BYTES: Final = 2**47
"""141 TB in one communication."""
_AT_LEAST_NONE: Final = (
    "step", "microbatch", "chunk", "stage", "group", "seq", "op_in_seq", "bytes", "self_bytes", "peer", "id",
    "stalled_on", "dtype",
)  # fmt: skip
_OF_EVERY_ROW: Final = ("kind", "name", "lane", "timing")


class RankTable(NamedTuple):
    """All rows read of a rank, as written."""

    metadata: RankMetadata
    table: pa.Table


class DecodedBlock(NamedTuple):
    """The decoded files of several ranks."""

    block: Block  # their spans, per rank by start, at equal starts the longer one first
    ranks: dict[int, RankTrace]  # everything but their spans
    names: list[str]  # strings for the codes in block
    problems: list[str]

    def rename(self, names: list[str]) -> None:
        """Make the codes positions in ``names``, adding missing strings. Changes the columns in place."""
        code = np.array([*_codes("name", self.names, names), schema.NOT_APPLICABLE], np.int32)
        if not np.array_equal(code[:-1], np.arange(len(code) - 1)):
            for column in (self.block.spans.name, self.block.spans.dtype):
                column[:] = code[column]  # −1 reads the last entry


class RankMarks(NamedTuple):
    marks: Marks
    aggregates: dict[int, list[str]]  # by step

    @classmethod
    def none(cls) -> RankMarks:
        return cls(Marks(), {})


def decode(
    tables: Sequence[RankTable], steps: StepRange | None, earlier: Sequence[RankMarks] | None = None
) -> DecodedBlock:
    """Decode the spans and marks of several ranks.

    Args:
        steps: decode only the spans of these; None for all.
        earlier: marks read before, one per rank; those in the tables are added.

    Raises:
        TraceFormatError: a column is missing, or holds an unknown value.
    """
    names: list[str] = []
    table = _together([part.table for part in tables])
    columns = {name: _column(table[name], name, names) for name in DTYPE_OF_COLUMN}
    for name in ("start_lead_us", "end_lead_us"):
        columns[name] = _lead_column(table[name], columns[name])
    spans = Spans(**columns)
    block = Block(tuple(part.metadata.rank for part in tables), bounds_of([len(part.table) for part in tables]), spans)
    _tell_exactness(block, table)
    most_ranks = [part.metadata.most_ranks for part in tables]
    possible = possible_rows(spans, block.per_row(np.array(most_ranks, np.int64)))
    possible &= ~_incomplete(table)
    marks = possible & (spans.kind == schema.MARK)
    rank_marks = [RankMarks.none() for _ in tables] if earlier is None else earlier
    _read_marks(rank_marks, block, table["detail"], np.flatnonzero(marks), names, most_ranks)
    columns["peer"] = _ranks_of_peers(block, rank_marks, [part.metadata.world for part in tables])
    selected = possible & ~marks
    if steps is not None:
        selected &= rows_in_steps(block, steps)
    selected &= _whole(block, [of_rank.marks for of_rank in rank_marks])
    rows, bounds = _sorted_rows(block, selected)
    details = _details(block, table["detail"], selected)
    ranks = {
        part.metadata.rank: _trace(part.metadata, of_rank, of_details, last, steps)
        for part, of_rank, of_details, last in zip(
            tables, rank_marks, details, _last_written(block, possible), strict=True
        )
    }
    kept = Block(block.ranks, bounds, Spans(**{name: column[rows] for name, column in columns.items()}))
    replays = np.flatnonzero(kept.spans.kind == schema.REPLAY)
    if len(replays):
        texts = _texts(table["detail"], rows[replays])
        kept = with_contents(kept, replays, texts, [of_rank.marks.graphs for of_rank in rank_marks], names)
    problems = [
        f"rank {rank}: {message}"
        for rank, of_rank in zip(block.ranks, rank_marks, strict=True)
        for message in dict.fromkeys(of_rank.marks.problems)
    ]
    problems += [message for of_rank in rank_marks for message in dict.fromkeys(of_rank.marks.limits)]
    problems += _impossible(block, possible)
    return DecodedBlock(kept, ranks, names, problems)


def known_columns(table: pa.Table) -> pa.Table:
    """Return the columns of this version's schema, in its order; raise TraceFormatError if one is missing."""
    if table.schema.equals(schema.SCHEMA):
        return table
    present = table.schema.names
    missing = missing_columns(present)
    if missing:
        raise TraceFormatError(f"the trace has no column {missing[0]!r}; it was written by an incompatible commtrace")
    for name in schema.LATER_COLUMNS.difference(present):
        table = table.append_column(name, pa.nulls(len(table), schema.SCHEMA.field(name).type))
    return table if present == schema.SCHEMA.names else table.select(schema.SCHEMA.names)


def missing_columns(present: Sequence[str]) -> list[str]:
    """Return the columns without which a recording cannot be read."""
    return [name for name in schema.SCHEMA.names if name not in present and name not in schema.LATER_COLUMNS]


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    if not tables:
        return schema.SCHEMA.empty_table()
    return pa.concat_tables(map(known_columns, tables)).unify_dictionaries().combine_chunks()


def _tell_exactness(block: Block, table: pa.Table) -> None:
    """Fill in which starts and ends are exact, where the recording does not say it. Changes the columns in place."""
    spans = block.spans
    is_end_told, is_start_told = (_is_valid(table[name]) for name in ("end_exact", "start_exact"))
    if not is_end_told.all():
        spans.end_exact[:] = np.where(is_end_told, spans.end_exact, exact_ends(spans))
    if not is_start_told.all():
        rank = block.per_row(np.arange(len(block.ranks)))
        starts = exact_starts(spans, rank, _is_unfinished(spans, table["detail"]))
        spans.start_exact[:] = np.where(is_start_told, spans.start_exact, starts)


def _lead_column(column: pa.ChunkedArray, leads: Int16) -> Int16:
    """Return the leads, unknown where the recording does not say them."""
    return np.where(_is_valid(column), leads, np.int16(schema.UNKNOWN_LEAD)) if column.null_count else leads


def _is_unfinished(spans: Spans, detail: pa.ChunkedArray) -> Bool:
    is_unfinished = np.zeros(len(spans), np.bool_)
    rows = np.flatnonzero((spans.id >= 0) & (spans.start == spans.end))
    is_unfinished[rows] = ['"unfinished"' in (text or "") for text in _texts(detail, rows)]
    return is_unfinished


def _is_valid(column: pa.ChunkedArray) -> Bool:
    return np.concatenate([np.zeros(0, np.bool_), *(is_there(_indices(chunk)) for chunk in column.chunks)])


def _texts(column: pa.ChunkedArray, rows: Int64) -> list[str | None]:
    return texts_of_rows(column.chunk(0), rows) if column.num_chunks else []


def _read_marks(
    rank_marks: Sequence[RankMarks],
    block: Block,
    column: pa.ChunkedArray,
    rows: Int64,
    names: Sequence[str],
    most_ranks: Sequence[int],
) -> None:
    spans = block.spans
    owners = np.searchsorted(block.bounds, rows, side="right") - 1
    for row, owner, text in zip(rows.tolist(), owners.tolist(), _texts(column, rows), strict=True):
        name, of_rank = names[spans.name[row]], rank_marks[owner]
        try:
            if name == AGGREGATE:
                check_aggregates(text)
                of_rank.aggregates.setdefault(int(spans.step[row]), []).append(text)
            else:
                detail = read_mark(name, text, most_ranks=most_ranks[owner])
                if detail is not None:
                    of_rank.marks.read(name, detail, int(spans.start[row]))
        except ValueError as error:
            of_rank.marks.add_problem(f"its mark {name} is damaged and was left out ({error}).")


def _ranks_of_peers(block: Block, rank_marks: Sequence[RankMarks], worlds: Sequence[str]) -> Int32:
    """Return the peers, with their ranks for members of groups over several worlds that are of the rank's own one."""
    spans = block.spans
    rows = np.flatnonzero(spans.peer >= OUTSIDE)
    if not len(rows):
        return spans.peer
    owners = np.searchsorted(block.bounds, rows, side="right") - 1
    keys = np.stack([owners, spans.group[rows], spans.peer[rows]], axis=1)
    peers, which = np.unique(keys, axis=0, return_inverse=True)
    ranks = [rank_marks[owner].marks.rank_of(group, peer, worlds[owner]) for owner, group, peer in peers.tolist()]
    resolved = spans.peer.copy()
    resolved[rows] = np.array(ranks, np.int32)[which.reshape(-1)]
    return resolved


def _whole(block: Block, marks: Sequence[Marks]) -> Bool | np.bool_:
    """Mark the rows of steps of which nothing was deleted."""
    cut = np.array([_last_discarded(of_rank) for of_rank in marks])
    if not (cut >= 0).any():
        return np.True_
    # A part of the last step that was deleted may be in the next segment.
    steps = block.spans.step
    return np.asarray((steps < 0) | (steps > block.per_row(cut)))


def _last_discarded(marks: Marks) -> int:
    return schema.NOT_APPLICABLE if marks.discarded is None else marks.discarded.last_step


def _sorted_rows(block: Block, selected: Bool) -> tuple[Int64, Int64]:
    """Return the selected rows, per rank by start, longer ones first; and the ranks' bounds."""
    rows = np.flatnonzero(selected)
    bounds = np.searchsorted(rows, block.bounds)
    start, end = block.spans.start[rows], block.spans.end[rows]
    axis = np.repeat(end_to_end(start, end, bounds), np.diff(bounds))
    return rows[np.lexsort((-end, start + axis))], bounds


def _last_written(block: Block, possible: Bool) -> list[int | None]:
    slices = [slice(begin, end) for begin, end in pairwise(block.bounds.tolist())]
    ends = [block.spans.end[rows][possible[rows]] for rows in slices]
    return [int(of_rank.max()) if len(of_rank) else None for of_rank in ends]


def _incomplete(table: pa.Table) -> Bool:
    lacks = np.zeros(len(table), np.bool_)
    for name in DTYPE_OF_COLUMN:
        column = table[name]
        if column.null_count and name != "dtype" and name not in schema.LATER_COLUMNS:
            lacks |= ~_is_valid(column)
    return lacks


def _indices(array: pa.Array) -> pa.Array:
    return array.indices if pa.types.is_dictionary(array.type) else array


def _impossible(block: Block, possible: Bool) -> list[str]:
    if possible.all():
        return []
    counts = np.add.reduceat(~possible, block.bounds[:-1]) * (np.diff(block.bounds) > 0)
    return [
        f"rank {rank}: {count} rows are impossible (an end before its start, a missing or impossible number) and "
        "were left out: its numbers are lower bounds."
        for rank, count in zip(block.ranks, counts.tolist(), strict=True)
        if count
    ]


def _trace(
    metadata: RankMetadata,
    rank_marks: RankMarks,
    details: Mapping[int, str],
    last_written_ns: int | None,
    steps: StepRange | None,
) -> RankTrace:
    marks = rank_marks.marks
    discarded = _last_discarded(marks)
    rank_of = partial(marks.rank_of, world=metadata.world)
    return RankTrace(
        metadata=marks.completed(metadata),
        spans=Spans.empty(),
        groups={number: group.of_world(metadata.world) for number, group in marks.groups.items()},
        coordinates=marks.coordinates,
        parallel=marks.parallel,
        topology=without_place(marks.topology),
        dropped=marks.dropped,
        anchors=(metadata.anchor, *marks.anchors),
        in_flight=tuple(structs.replace(call, peer=rank_of(call.group, call.peer)) for call in marks.in_flight),
        activity=marks.activity and _with_ranks(marks.activity, rank_of),
        activity_ns=marks.activity_ns,
        no_progress_ns=marks.no_progress_ns,
        again_within_ns=marks.again_within_ns,
        limits=marks.limits,
        drops=tuple(marks.drops),
        device_states=tuple(marks.device_states),
        peak_memory=marks.peak_memory,
        graphs=marks.graphs,
        last_written_ns=last_written_ns,
        closed=marks.closed,
        exception=marks.exception,
        exception_frames=marks.exception_frames,
        exit=marks.exit,
        has_left=marks.has_left,
        failures=tuple(structs.replace(call, peer=rank_of(call.group, call.peer)) for call in marks.failures),
        # Not copied for each part of a long run that is read forward.
        aggregates=rank_marks.aggregates
        if steps is None and discarded < 0
        else {
            step: texts
            for step, texts in rank_marks.aggregates.items()
            if (steps is None or step in steps) and not 0 <= step <= discarded
        },
        quiet=tuple(marks.quiet),
        discarded=marks.discarded,
        progress=tuple(marks.progress),
        triggers=tuple(marks.triggers.values()),
        details=details,
    )


def _with_ranks(activity: Activity, rank_of: Callable[[int, int], int]) -> Activity:
    messages = tuple(
        (group, is_send, rank_of(group, peer), tag, count) for group, is_send, peer, tag, count in activity.p2p
    )
    return structs.replace(activity, p2p=messages)


def _column(column: pa.ChunkedArray, name: str, names: list[str]) -> Any:
    dtype = DTYPE_OF_COLUMN[name]
    array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if not pa.types.is_dictionary(array.type):
        return numbers(array).astype(dtype, copy=False)  # rows with nulls are left out
    code_of_word = np.array(_codes(name, array.dictionary.to_pylist(), names) or [schema.NOT_APPLICABLE], dtype)
    indices = array.indices
    if not indices.null_count:
        return code_of_word.take(numbers(indices))
    present = np.flatnonzero(is_there(indices))
    coded = np.full(len(array), schema.NOT_APPLICABLE, dtype)
    coded[present] = code_of_word[numbers(indices)[present]]
    return coded


def _codes(column: str, words: Iterable[str], names: list[str]) -> list[int]:
    vocabulary = {"kind": schema.KINDS, "lane": schema.LANES, "timing": schema.TIMINGS}.get(column)
    if vocabulary is not None:
        known = list(words)
        if None in known:
            raise TraceFormatError(f"column {column} of the trace holds a null: the file is damaged.")
        unknown = [word for word in known if word not in vocabulary]
        if unknown:
            raise TraceFormatError(
                f"column {column} of the trace holds {unknown[0]!r}, which this commtrace does not know. A newer one "
                "wrote it (pip install --upgrade commtrace), or the file is damaged."
            )
        return [vocabulary.index(word) for word in known]
    position = {name: code for code, name in enumerate(names)}
    codes = []
    for word in map(_shown, words):
        if word is None:
            codes.append(schema.NOT_APPLICABLE)
            continue
        if word not in position:
            position[word] = len(names)
            names.append(word)
        codes.append(position[word])
    return codes


def _shown(word: str | None) -> str | None:
    return None if word is None else printable(word)


def _details(block: Block, detail: pa.ChunkedArray, selected: Bool) -> list[dict[int, str]]:
    details: list[dict[int, str]] = [{} for _ in block.ranks]
    if detail.null_count == len(detail):
        return details
    # That of a replay has been read into rows.
    rows = np.flatnonzero(selected & _is_valid(detail) & (block.spans.kind != schema.REPLAY))
    owners = np.searchsorted(block.bounds, rows, side="right") - 1
    for row, owner, text in zip(rows, owners, _texts(detail, rows), strict=True):
        details[owner][int(block.spans.id[row])] = text
    return details


def possible_rows(spans: Spans, most_ranks: Int64) -> Bool:
    """Mark the rows that a recorder can have written; ranks of the job are below ``most_ranks``."""
    # Not by np.abs: of the smallest int64 it is negative.
    possible = (spans.start > -_LATEST_NS) & (spans.start < _LATEST_NS)
    possible &= (spans.end > -_LATEST_NS) & (spans.end < _LATEST_NS)
    length = spans.end - spans.start  # may wrap where a time is impossible anyway
    possible &= (length >= 0) & (length < LONGEST_NS)
    for name in _OF_EVERY_ROW:
        possible &= getattr(spans, name) >= 0
    for name in _AT_LEAST_NONE:
        possible &= getattr(spans, name) >= schema.NOT_APPLICABLE
    possible &= (spans.bytes < _MOST_BYTES) & (spans.self_bytes < _MOST_BYTES)
    is_rank = spans.peer < most_ranks
    is_outside = (spans.peer >= OUTSIDE) & (spans.peer < OUTSIDE + MOST_RANKS)
    return np.asarray(possible & (is_rank | is_outside))
