"""Import the traces of the what-if study of stragglers, ByteDance-Seed/StragglerAnalysis (``commtrace import whatif``).

A Parquet file has one row per operation: ``dp_rank, stage, rank, step, optype, start_ts, duration`` (seconds, since the
start of the step), ``seq_id`` (number in its type), ``mc`` and ``gmc`` (chunk on the rank, in the model), ``mb_id``.
Steps are laid end to end. Each type of communication has its own group; ``seq`` is ``step position · stride + seq_id``.

>>> import_whatif(Path("trace-ST.parquet"), Path("imported"), meta=Path("meta-ST.yaml"))    # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from commtrace.errors import ImportFileError
from commtrace.interchange.rows import (
    Imported,
    Intervals,
    gaps,
    group_rows,
    imported_rank,
    mark_row,
    new_run,
    stalls,
    write_rank_spans,
)
from commtrace.trace import schema
from commtrace.trace.files.segment_index import first_line
from commtrace.trace.inputs import MOST_RANKS, open_file, printable, read_file
from commtrace.trace.metadata import Group, group_id
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, Spans

_COLUMNS: Final = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc",
)  # fmt: skip
_MOST_ROWS: Final = 100_000
_MOST_ROWS_PER_BYTE: Final = 10
_LARGEST_META: Final = 1 << 20
_SIZE: Final = re.compile("[0-9]{1,6}")
_LONGEST_SECONDS: Final = 10_000_000
_SIZES: Final = {"pp_size": "pp", "dp_size": "dp", "tp_size": "tp", "vpp_size": "vpp"}

_WORK: Final = {
    "forward-compute": schema.FORWARD,
    "backward-compute": schema.BACKWARD,
    "optimizer": schema.OPTIMIZER,
    "optimizer-clip-main-grad": schema.OPTIMIZER,
    "gc": schema.GC,
}
_MESSAGES: Final = {
    "forward-send": ("send", "forward", 1),
    "forward-recv": ("recv", "forward", -1),
    "backward-send": ("send", "backward", -1),
    "backward-recv": ("recv", "backward", 1),
}
"""By type: operation, name of the group, and distance of the other side's stage."""

_COLLECTIVES: Final = {
    "-reduce-scatter": "reduce_scatter",
    "-all-gather": "all_gather",
    "-all-reduce": "all_reduce",
}

_STEP_NAME: Final = "step"
_NO: Final = schema.NOT_APPLICABLE
_STEPS, _COMPUTE, _COMMUNICATIONS, _STALLS = range(4)
"""The sorts of rows of a worker, in this order within a step."""


def import_whatif(
    trace: Path, output: Path, *, meta: Path | None = None, on_file: Callable[[Path], None] = lambda path: None
) -> Imported:
    """Make a run from a Parquet file of the study.

    Args:
        meta: ``key: value`` lines with the sizes of the job; by default they are counted in the trace.
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    on_file(trace)
    job, operations = _job_and_operations(trace, _read(trace))
    sizes = {**job.grid.sizes(), **(_read_sizes(meta) if meta else {})}
    num_spans = 0
    for worker, spans in zip(job.workers, _spans_by_worker(job, operations), strict=True):
        metadata = imported_rank(
            worker.rank,
            len(job.workers),
            session=session,
            run_id=run_id,
            source="whatif",
            local_rank=worker.rank,
        )
        topology = {
            "coordinates": {"pp": worker.stage, "dp": worker.dp_rank},
            "parallel": {word: sizes[name] for name, word in _SIZES.items() if name in sizes},
            "whatif": {**sizes, "seq_stride": job.stride},
        }
        marks = [*group_rows(job.grid.groups_of(worker)), mark_row("topology", topology)]
        write_rank_spans(output, metadata, spans, job.names, marks)
        num_spans += len(spans)
    return Imported(len(job.workers), num_spans)


class _OperationType(NamedTuple):
    kind: int
    name: str
    group: str = ""  # one for both sides of a message; empty for compute
    distance: int = 0  # from the own stage to the peer's; 0 if it is no message


def _operation_type(optype: str) -> _OperationType:
    """Return the type in terms of the schema; an unknown one is a phase of the compute lane."""
    if optype in _MESSAGES:
        return _OperationType(schema.P2P, *_MESSAGES[optype])
    for ending, name in _COLLECTIVES.items():
        if optype.endswith(ending):
            return _OperationType(schema.COLLECTIVE, name, optype)
    return _OperationType(_WORK.get(optype, schema.PHASE), optype)


class _Worker(NamedTuple):
    rank: int
    stage: int
    dp_rank: int


class _StudyGrid:
    """Process groups of the job: one per type of communication, because each type is numbered separately."""

    def __init__(self, workers: Sequence[_Worker], types: Iterable[_OperationType]) -> None:
        self._names = sorted({operation_type.group for operation_type in types if operation_type.group})
        self._rank = {(worker.stage, worker.dp_rank): worker.rank for worker in workers}
        self._stages = sorted({worker.stage for worker in workers})
        self._dp_ranks = sorted({worker.dp_rank for worker in workers})
        self._groups: dict[tuple[str, int], Group] = {}

    def sizes(self) -> dict[str, int]:
        return {"pp_size": len(self._stages), "dp_size": len(self._dp_ranks)}

    def neighbour(self, worker: _Worker, distance: int) -> int:
        """Return the rank ``distance`` stages away; the last stage is followed by the first one's next chunk."""
        position = (self._stages.index(worker.stage) + distance) % len(self._stages)
        return self._rank[self._stages[position], worker.dp_rank]

    def group(self, name: str, worker: _Worker) -> Group:
        role = _role(name)
        # One for each pipeline, for each stage, or for each worker.
        key = name, {"pp": worker.dp_rank, "embedding": worker.dp_rank, "dp": worker.stage}.get(role, worker.rank)
        if key not in self._groups:
            members = self._members(role, worker)
            ordinal = self._names.index(name)
            self._groups[key] = Group(group_id(members, ordinal), members, ordinal, role, name)
        return self._groups[key]

    def groups_of(self, worker: _Worker) -> list[Group]:
        groups = [self.group(name, worker) for name in self._names]
        return [group for group in groups if worker.rank in group.ranks]

    def _members(self, role: str, worker: _Worker) -> tuple[int, ...]:
        if role == "pp":
            return self._ranks((stage, worker.dp_rank) for stage in self._stages)
        if role == "embedding":
            return self._ranks((stage, worker.dp_rank) for stage in (self._stages[0], self._stages[-1]))
        if role == "tp":
            return (worker.rank,)  # the trace holds one rank of each tensor-parallel group
        return self._ranks((worker.stage, dp_rank) for dp_rank in self._dp_ranks)

    def _ranks(self, places: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(sorted({self._rank[stage_and_dp_rank] for stage_and_dp_rank in places}))


def _role(name: str) -> str:
    if name in ("forward", "backward"):
        return "pp"
    if name.startswith("embedding"):
        return "embedding"
    return "tp" if name.startswith("layernorm") else "dp"


class _Operations(NamedTuple):
    """Columns of operations, by worker, step, start, end and seq; indices into the job's lists, and ns."""

    worker: Int64
    type: Int64
    step: Int64
    start: Int64
    end: Int64
    seq: Int64
    chunk: Int64
    microbatch: Int64

    def take(self, rows: npt.NDArray[np.generic]) -> _Operations:
        return _Operations(*(column[rows] for column in self))


class _StudySteps(NamedTuple):
    """The steps of a job, end to end; ns since the start of the run."""

    number: Int64
    begin: Int64
    end: Int64


class _StudyJob(NamedTuple):
    workers: Sequence[_Worker]
    types: Sequence[_OperationType]
    steps: _StudySteps
    grid: _StudyGrid
    stride: int  # growth of seq from one step to the next
    names: Sequence[str]  # by the codes in the spans


def _read(path: Path) -> pa.Table:
    try:
        table = _table(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last one where a column's name is damaged
        raise ImportFileError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    if not len(table):
        raise ImportFileError(f"{path} has no rows.")
    for name in _COLUMNS:
        kind = table[name].type
        if name == "optype":
            is_right = pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind)
        else:
            is_right = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not is_right or (name == "optype" and table[name].null_count):
            raise ImportFileError(f"{path}: column {name} has the type {kind}, or missing values.")
    return table


def _read_sizes(path: Path) -> dict[str, int]:
    try:
        text = read_file(path, _LARGEST_META).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImportFileError(f"{path}, given with --meta, cannot be read: {error}.") from error
    pairs = [line.partition(":") for line in text.splitlines()]
    return {printable(key.strip()): int(value) for key, _, value in pairs if _SIZE.fullmatch(value.strip())}


def _table(path: Path) -> pa.Table:
    with open_file(path) as opened, pq.ParquetFile(opened) as file:  # read_table imports much that is not needed here
        present = file.schema_arrow.names
        missing = sorted(name for name in _COLUMNS if present.count(name) != 1)
        if missing:
            raise ImportFileError(
                f"{path} has no columns {', '.join(missing)}; a trace of the what-if study has {', '.join(_COLUMNS)}."
            )
        rows = file.metadata.num_rows
        if rows > _MOST_ROWS + _MOST_ROWS_PER_BYTE * path.stat().st_size:
            raise ImportFileError(f"{path} is damaged: it claims {rows:,} rows, too many for its size.")
        table = file.read(columns=list(_COLUMNS))
        table.validate(full=True)
        return table


def _job_and_operations(path: Path, table: pa.Table) -> tuple[_StudyJob, _Operations]:
    columns = {name: table[name].to_numpy() for name in _COLUMNS if name != "optype"}
    _check_places(path, columns)
    numbers, step = np.unique(columns["step"], return_inverse=True)
    columns["start_ts"] = _since_the_step_began(columns["start_ts"], step)
    _check_times(path, columns)
    workers, worker = _workers(path, columns)
    optypes, optype = _types(table["optype"])
    types = [_operation_type(optype) for optype in optypes]
    steps, start, end = _lay_out(numbers, step, columns)
    stride = int(columns["seq_id"].max()) + 1
    names = [
        _STEP_NAME,
        *dict.fromkeys(operation_type.name for operation_type in types if operation_type.name != _STEP_NAME),
    ]
    job = _StudyJob(workers, types, steps, _StudyGrid(workers, types), stride, names)
    seq, chunk, microbatch = (_numbers(columns[name]) for name in ("seq_id", "mc", "mb_id"))
    order = np.lexsort((seq, end, start, worker * len(steps.number) + step))
    return job, _Operations(worker, optype, step, start, end, seq, chunk, microbatch).take(order)


def _numbers(column: npt.NDArray[np.generic]) -> Int64:
    if not _may_lack(column):
        return column.astype(np.int64)
    known = column.astype(np.float64)
    return np.where(np.isnan(known), schema.NOT_APPLICABLE, known).astype(np.int64)


def _may_lack(column: npt.NDArray[np.generic]) -> bool:
    return not np.issubdtype(column.dtype, np.integer)  # pyarrow gives integers with nulls as floats


def _check_places(path: Path, columns: Mapping[str, npt.NDArray[np.integer | np.floating]]) -> None:
    for name in ("rank", "stage", "dp_rank", "step", "seq_id"):
        missing = int(np.isnan(columns[name].astype(np.float64)).sum()) if _may_lack(columns[name]) else 0
        if missing:
            raise ImportFileError(f"{path}: {missing} of {len(columns[name])} rows have no {name}.")
    for name in ("rank", "stage", "dp_rank", "step", "seq_id", "mc", "mb_id"):
        numbers = columns[name].astype(np.float64)
        known = numbers[~np.isnan(numbers)]
        least = -1 if name in ("mc", "mb_id") else 0
        bad = int(((known < least) | (known >= MOST_RANKS) | (known != np.floor(known))).sum())
        if bad:
            raise ImportFileError(f"{path}: {name} is out of range in {bad} of {len(numbers)} rows.")


def _since_the_step_began(start: npt.NDArray[np.generic], step: Int64) -> npt.NDArray[np.float64]:
    """Return seconds since the first operation of the step; a trace may count them from 1970."""
    seconds = start.astype(np.float64)
    first = np.full(int(step.max()) + 1, np.inf)
    np.fmin.at(first, step, seconds)
    return np.asarray(seconds - first[step])


def _check_times(path: Path, columns: Mapping[str, npt.NDArray[np.integer | np.floating]]) -> None:
    for name in ("start_ts", "duration"):
        seconds = columns[name].astype(np.float64)
        bad = int((~(np.abs(seconds) <= _LONGEST_SECONDS)).sum())  # NaN compares as False
        if bad:
            raise ImportFileError(
                f"{path}: {name} is missing, NaN or more than {_LONGEST_SECONDS:,} s in {bad} of {len(seconds)} rows. "
                "Write seconds since the start of the step, and leave out steps with missing rows."
            )
    if not (columns["duration"] > 0).any():
        raise ImportFileError(f"{path}: no operation takes any time. Is duration in seconds?")


def _workers(path: Path, columns: Mapping[str, npt.NDArray[np.integer | np.floating]]) -> tuple[list[_Worker], Int64]:
    ranks, example, which = np.unique(columns["rank"], return_index=True, return_inverse=True)
    places = [columns[name][example] for name in ("stage", "dp_rank")]
    if any((columns[name] != values[which]).any() for name, values in zip(("stage", "dp_rank"), places, strict=True)):
        raise ImportFileError(f"{path}: a rank has more than one stage or data-parallel rank.")
    workers = [_Worker(*map(int, coordinates)) for coordinates in zip(ranks, *places, strict=True)]
    there = {(worker.stage, worker.dp_rank) for worker in workers}
    if len(there) < len(workers):
        raise ImportFileError(f"{path}: several ranks have the same stage and data-parallel rank.")
    stages, dp_ranks = (sorted(set(values)) for values in zip(*there, strict=True))
    absent = len(stages) * len(dp_ranks) - len(there)
    if absent:
        grid = ((stage, dp_rank) for stage in stages for dp_rank in dp_ranks)
        stage, dp_rank = next(coordinates for coordinates in grid if coordinates not in there)
        raise ImportFileError(
            f"{path}: stage {stage} of data-parallel rank {dp_rank} has no rows, and the study's rules "
            f"need all {len(stages)} stages of all {len(dp_ranks)} data-parallel ranks ({absent} missing)."
        )
    return workers, which.astype(np.int64)


def _types(optype: pa.ChunkedArray) -> tuple[list[str], Int64]:
    coded = optype.unify_dictionaries().combine_chunks() if pa.types.is_dictionary(optype.type) else None
    coded = optype.combine_chunks().dictionary_encode() if coded is None else coded
    used, which = np.unique(coded.indices.to_numpy(), return_inverse=True)
    words = coded.dictionary.to_pylist()
    return [printable(words[code]) for code in used.tolist()], which.astype(np.int64)


def _nanoseconds(seconds: npt.NDArray[np.integer | np.floating]) -> Int64:
    return np.asarray(np.rint(seconds.astype(np.float64) * 1e9), np.int64)


def _lay_out(
    numbers: Int64, step: Int64, columns: Mapping[str, npt.NDArray[np.integer | np.floating]]
) -> tuple[_StudySteps, Int64, Int64]:
    """Return the steps, end to end, and the start and end of each row."""
    start = _nanoseconds(columns["start_ts"])
    end = start + _nanoseconds(columns["duration"])
    longest = np.zeros(len(numbers), np.int64)
    np.maximum.at(longest, step, end)
    ends = np.cumsum(longest)
    begins = ends - longest
    return _StudySteps(numbers.astype(np.int64), begins, ends), start + begins[step], end + begins[step]


def _spans_by_worker(job: _StudyJob, operations: _Operations) -> list[Spans]:
    rows = _StudyRows.of(job, operations)
    spans = _spans(job, operations, rows)
    bounds = np.searchsorted(operations.worker[rows.operation], np.arange(len(job.workers) + 1))
    return [spans.take(slice(first, last)) for first, last in pairwise(bounds.tolist())]


class _StudyRows(NamedTuple):
    """The rows of all workers; times are ns since the start of the run."""

    part: Int64  # sort of row
    operation: Int64  # of a step its first one, of a stall the one that it waited for
    start: Int64
    end: Int64
    id: Int64  # of the communication, or of the one that a stall is on; per worker

    @classmethod
    def of(cls, job: _StudyJob, operations: _Operations) -> _StudyRows:
        cell = operations.worker * len(job.steps.number) + operations.step
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        communicates = np.array([bool(operation_type.group) for operation_type in job.types])[operations.type]
        work, communications = np.flatnonzero(~communicates), np.flatnonzero(communicates)
        bounds = Intervals(job.steps.begin[operations.step[first]], job.steps.end[operations.step[first]])
        # Workers are laid end to end, as their steps are, so that the gaps of all are found at once.
        shift = operations.worker * int(job.steps.end[-1])
        idle = gaps(
            _shifted(bounds, shift[first]),
            _shifted(Intervals(operations.start[work], operations.end[work]), shift[work]),
            np.searchsorted(first, work, "right") - 1,
        )
        in_flight = Intervals(operations.start[communications], operations.end[communications])
        stalled = stalls(idle, _shifted(in_flight, shift[communications]))
        parts = [first, work, communications, communications[stalled.on]]
        operation = np.concatenate(parts)
        part = np.repeat(np.arange(len(parts)), [len(rows_of_part) for rows_of_part in parts])
        before = -shift[parts[_STALLS]]
        order = np.argsort(cell[operation] * len(parts) + part, kind="stable")
        rank_begin = np.searchsorted(operations.worker[communications], np.arange(len(job.workers)))
        number = np.cumsum(communicates) - 1 - rank_begin[operations.worker]
        return cls(
            part[order],
            operation[order],
            np.concatenate([bounds.start, operations.start[work], in_flight.start, stalled.start + before])[order],
            np.concatenate([bounds.end, operations.end[work], in_flight.end, stalled.end + before])[order],
            number[operation][order],
        )


def _shifted(intervals: Intervals, by: Int64) -> Intervals:
    return Intervals(intervals.start + by, intervals.end + by)


def _spans(job: _StudyJob, operations: _Operations, rows: _StudyRows) -> Spans:
    of = operations.take(rows.operation)
    code = {name: position for position, name in enumerate(job.names)}
    kind, name, groups, peers = _by_type(job, code)
    type_kind = kind[of.type]
    is_step, is_work, is_stall = rows.part == _STEPS, rows.part == _COMPUTE, rows.part == _STALLS
    communicates = ~(is_step | is_work)
    is_phase = is_work & ((type_kind == schema.FORWARD) | (type_kind == schema.BACKWARD))
    lane = np.where(rows.part == _COMMUNICATIONS, schema.COMMUNICATION, schema.COMPUTE)
    columns = {
        "kind": np.where(is_step, schema.STEP, np.where(is_stall, schema.STALL, type_kind)),
        "name": np.where(is_step, code[_STEP_NAME], name[of.type]),
        "lane": np.where(is_work & (type_kind == schema.GC), schema.HOST, lane),
        "start": rows.start,
        "end": rows.end,
        "step": job.steps.number[of.step],
        "microbatch": np.where(is_phase, of.microbatch, _NO),
        "chunk": np.where(is_phase | communicates, of.chunk, _NO),
        "stage": np.where(is_step, _NO, np.array([worker.stage for worker in job.workers])[of.worker]),
        "group": np.where(communicates, groups[of.worker, of.type], _NO),
        "seq": np.where(communicates, of.step * job.stride + of.seq, _NO),
        "op_in_seq": np.zeros(len(rows.part)),
        "peer": np.where(communicates, peers[of.worker, of.type], _NO),
        "is_async": communicates,
        "id": np.where(rows.part == _COMMUNICATIONS, rows.id, _NO),
        "stalled_on": np.where(is_stall, rows.id, _NO),
        "timing": np.full(len(rows.part), schema.CUDA_EVENT_TIMING),
        "start_exact": np.ones(len(rows.part), np.bool_),
        "end_exact": np.ones(len(rows.part), np.bool_),
        "start_lead_us": np.full(len(rows.part), schema.UNKNOWN_LEAD),
        "end_lead_us": np.full(len(rows.part), schema.UNKNOWN_LEAD),
    }
    none = np.full(len(rows.part), _NO)
    return Spans(*(columns.get(name, none).astype(dtype) for name, dtype in DTYPE_OF_COLUMN.items()))


def _by_type(job: _StudyJob, code: dict[str, int]) -> tuple[Int64, Int64, Int64, Int64]:
    """Return kind and name of each type, and group and peer by worker and type."""
    kind = np.array([operation_type.kind for operation_type in job.types])
    name = np.array([code[operation_type.name] for operation_type in job.types])
    groups, peers = (np.full((len(job.workers), len(job.types)), _NO, np.int64) for _ in range(2))
    for row, worker in enumerate(job.workers):
        for column, operation_type in enumerate(job.types):
            if operation_type.group:
                groups[row, column] = job.grid.group(operation_type.group, worker).id
            if operation_type.distance:
                peers[row, column] = job.grid.neighbour(worker, operation_type.distance)
    return kind, name, groups, peers
