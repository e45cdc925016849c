"""``commtrace import whatif``: the traces that were published with the what-if study of stragglers.

Such a trace (Parquet) has one row per operation: ``dp_rank, stage, rank, step, optype, start_ts, duration`` (seconds,
since the start of the step), ``seq_id`` (ordinal among the operations of its type), ``mc`` and ``gmc`` (chunk on the
rank, in the model), ``mb_id``. Its sizes are in a file of ``key: value`` lines.
Format: ByteDance-Seed/StragglerAnalysis.

Steps are laid one behind the other. Nothing is lost: the type of a communication is the name of its group, ``seq`` is
``step position · stride + seq_id``, and the sizes are in the topology, under ``whatif``.

>>> import_whatif(Path("trace-ST.parquet"), Path("imported"), meta=Path("meta-ST.yaml"))    # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commtrace.errors import ImportFileError
from commtrace.importers.gaps import stalls
from commtrace.importers.rows import Imported, group_rows, imported_rank, mark_row, new_run, span_row, write_rank
from commtrace.trace import schema
from commtrace.trace.groups import Group, group_id
from commtrace.trace.spans import Int64
from commtrace.trace.writer import Row

_COLUMNS: Final = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc",
)  # fmt: skip
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
"""By type: operation, name of the group, and the other side's stage relative to the own one."""

_COLLECTIVES: Final = {
    "-reduce-scatter": "reduce_scatter",
    "-all-gather": "all_gather",
    "-all-reduce": "all_reduce",
}
_SIZES: Final = {"pp_size": "pp", "dp_size": "dp", "tp_size": "tp", "vpp_size": "vpp"}


class _Operation(NamedTuple):
    """A row of the trace; times are ns since the start of the run."""

    optype: str
    step: int
    start: int
    end: int
    seq: int
    chunk: int
    microbatch: int


class _Worker(NamedTuple):
    """A place in the grid of the job."""

    rank: int
    stage: int
    dp_rank: int


def import_whatif(
    trace: Path, output: Path, *, meta: Path | None = None, on_file: Callable[[Path], None] = lambda path: None
) -> Imported:
    """Make a run from a trace of the study.

    Args:
        trace: the Parquet file.
        output: directory of the new run.
        meta: the sizes of the job, ``key: value`` lines; without, what the trace itself tells.
        on_file: called with each file before it is read.

    Raises:
        ImportFileError: a file cannot be used; the message says which and why.
        ConfigurationError: ``output`` holds a run.
    """
    run_id, session = new_run(output)
    on_file(trace)
    table = _read(trace)
    columns = {name: table[name].to_numpy() for name in _COLUMNS if name != "optype"}
    workers = _workers(trace, columns)
    grid = _Grid(workers, table["optype"].unique().to_pylist())
    sizes = {**grid.sizes(), **(_read_sizes(meta) if meta else {})}
    begin, end, steps = _lay_out(columns)
    step_bounds = dict(zip(steps.tolist(), zip(begin.tolist(), end.tolist(), strict=True), strict=True))
    stride = int(columns["seq_id"].max()) + 1
    num_spans = 0
    for worker, operations in _operations_by_worker(table, columns, begin, steps, workers):
        metadata = imported_rank(
            worker.rank,
            len(workers),
            session=session,
            run_id=run_id,
            source="whatif",
            local_rank=worker.rank,
        )
        topology = {
            "coordinates": {"pp": worker.stage, "dp": worker.dp_rank},
            "parallel": {word: sizes[name] for name, word in _SIZES.items() if name in sizes},
            "whatif": {**sizes, "seq_stride": stride},
        }
        rows = _Rows(worker, grid, stride, {step: position for position, step in enumerate(steps.tolist())})
        marks = [*group_rows(grid.groups_of(worker)), mark_row("topology", topology)]
        num_spans += write_rank(output, metadata, rows.of(operations, step_bounds), marks)
    return Imported(len(workers), num_spans)


def _read(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ImportFileError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from error
    missing = sorted(set(_COLUMNS) - set(table.column_names))
    if missing:
        raise ImportFileError(
            f"{path} has no columns {', '.join(missing)}; a trace of the what-if study has {', '.join(_COLUMNS)}."
        )
    if not len(table):
        raise ImportFileError(f"{path} has no rows.")
    return table


def _read_sizes(path: Path) -> dict[str, int]:
    try:
        pairs = [line.partition(":") for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ImportFileError(f"{path}, given with --meta, cannot be read: {error}.") from error
    return {key.strip(): int(value) for key, _, value in pairs if value.strip().isdecimal()}


def _workers(path: Path, columns: Mapping[str, Any]) -> list[_Worker]:
    triples = np.unique(np.stack([columns[name].astype(np.int64) for name in ("rank", "stage", "dp_rank")]), axis=1)
    workers = [_Worker(*map(int, triple)) for triple in triples.T]
    if len({worker.rank for worker in workers}) != len(workers):
        raise ImportFileError(f"{path}: a rank is on more than one stage or data-parallel rank.")
    return workers


def _nanoseconds(seconds: Any) -> Int64:
    return np.asarray(np.rint(seconds.astype(np.float64) * 1e9), np.int64)


def _lay_out(columns: Mapping[str, Any]) -> tuple[Int64, Int64, Int64]:
    """When each step begins and ends in the run, and the numbers of the steps, ascending."""
    steps, which = np.unique(columns["step"], return_inverse=True)
    start = _nanoseconds(columns["start_ts"])
    longest = np.zeros(len(steps), np.int64)
    np.maximum.at(longest, which, start + _nanoseconds(columns["duration"]))
    end = np.cumsum(longest)
    return end - longest, end, steps.astype(np.int64)


def _operations_by_worker(
    table: pa.Table, columns: Mapping[str, Any], begin: Int64, steps: Int64, workers: Sequence[_Worker]
) -> Iterator[tuple[_Worker, list[_Operation]]]:
    start = begin[np.searchsorted(steps, columns["step"])] + _nanoseconds(columns["start_ts"])
    end = start + _nanoseconds(columns["duration"])
    order = np.lexsort((columns["seq_id"], end, start, columns["step"], columns["rank"]))
    ranks = columns["rank"][order]
    optypes = pc.cast(table["optype"], pa.string()).take(pa.array(order)).to_pylist()
    sorted_columns = [
        column[order].tolist()
        for column in (columns["step"], start, end, columns["seq_id"], columns["mc"], columns["mb_id"])
    ]
    operations = [_Operation(*fields) for fields in zip(optypes, *sorted_columns, strict=True)]
    for worker in workers:
        first, last = np.searchsorted(ranks, [worker.rank, worker.rank + 1])
        yield worker, operations[first:last]


class _Grid:
    """The process groups of the job: one for every type of communication, because each is numbered by itself."""

    def __init__(self, workers: Sequence[_Worker], optypes: Sequence[str]) -> None:
        self._names = sorted({_group_name(optype) for optype in optypes if _operation_name(optype)})
        self._rank = {(worker.stage, worker.dp_rank): worker.rank for worker in workers}
        self._stages = sorted({worker.stage for worker in workers})
        self._dp_ranks = sorted({worker.dp_rank for worker in workers})
        self._groups: dict[tuple[str, _Worker], Group] = {}

    def sizes(self) -> dict[str, int]:
        return {"pp_size": len(self._stages), "dp_size": len(self._dp_ranks)}

    def neighbour(self, worker: _Worker, distance: int) -> int:
        """The rank so many stages on; after the last stage comes the first, with its next chunk."""
        position = (self._stages.index(worker.stage) + distance) % len(self._stages)
        return self._rank[self._stages[position], worker.dp_rank]

    def group(self, name: str, worker: _Worker) -> Group:
        """The group that operations of this name run on."""
        key = name, worker
        if key not in self._groups:
            role, members = self._members(name, worker)
            ordinal = self._names.index(name)
            self._groups[key] = Group(group_id(members, ordinal), members, ordinal, role, name)
        return self._groups[key]

    def groups_of(self, worker: _Worker) -> list[Group]:
        groups = [self.group(name, worker) for name in self._names]
        return [group for group in groups if worker.rank in group.ranks]

    def _members(self, name: str, worker: _Worker) -> tuple[str, tuple[int, ...]]:
        if name in ("forward", "backward"):
            return "pp", self._ranks((stage, worker.dp_rank) for stage in self._stages)
        if name.startswith("embedding"):
            return "embedding", self._ranks((stage, worker.dp_rank) for stage in (self._stages[0], self._stages[-1]))
        if name.startswith("layernorm"):
            return "tp", (worker.rank,)  # the trace holds one rank of each tensor-parallel group
        return "dp", self._ranks((worker.stage, dp_rank) for dp_rank in self._dp_ranks)

    def _ranks(self, places: Any) -> tuple[int, ...]:
        return tuple(sorted({self._rank[place] for place in places}))


class _Rows:
    """The rows of one rank."""

    def __init__(self, worker: _Worker, grid: _Grid, stride: int, position_of_step: Mapping[int, int]) -> None:
        self._worker = worker
        self._grid = grid
        self._stride = stride
        self._position = position_of_step

    def of(self, operations: Sequence[_Operation], bounds: Mapping[int, tuple[int, int]]) -> Iterator[Row]:
        number = 0
        for step, group in groupby(operations, key=lambda operation: operation.step):
            of_step = list(group)
            begin, end = bounds[step]
            yield span_row(schema.STEP, "step", schema.COMPUTE, begin, end, step=step, timing=schema.CUDA_EVENT_TIMING)
            work = [operation for operation in of_step if _operation_name(operation.optype) is None]
            communication = [operation for operation in of_step if _operation_name(operation.optype) is not None]
            yield from map(self._work, work)
            rows = [self._communication(operation, number + place) for place, operation in enumerate(communication)]
            yield from (span_row(**fields) for fields in rows)
            standing = stalls(
                [(begin, begin), *((operation.start, operation.end) for operation in work)],
                [(operation.start, operation.end) for operation in communication],
                end,
            )
            for stall in standing:
                fields = rows[stall.on]
                yield span_row(
                    **{
                        **fields,
                        "kind": schema.STALL,
                        "lane": schema.COMPUTE,
                        "start": stall.start,
                        "end": stall.end,
                        "id": -1,
                        "stalled_on": fields["id"],
                    }
                )
            number += len(communication)

    def _work(self, operation: _Operation) -> Row:
        kind = _WORK.get(operation.optype, schema.PHASE)
        is_phase = kind in (schema.FORWARD, schema.BACKWARD)
        return span_row(
            kind,
            operation.optype,
            schema.HOST if kind == schema.GC else schema.COMPUTE,
            operation.start,
            operation.end,
            step=operation.step,
            microbatch=operation.microbatch if is_phase else -1,
            chunk=operation.chunk if is_phase else -1,
            stage=self._worker.stage,
            timing=schema.CUDA_EVENT_TIMING,
        )

    def _communication(self, operation: _Operation, number: int) -> dict[str, Any]:
        message = _MESSAGES.get(operation.optype)
        group = self._grid.group(_group_name(operation.optype), self._worker)
        return {
            "kind": schema.P2P if message else schema.COLLECTIVE,
            "name": _operation_name(operation.optype),
            "lane": schema.COMMUNICATION,
            "start": operation.start,
            "end": operation.end,
            "step": operation.step,
            "chunk": operation.chunk,
            "stage": self._worker.stage,
            "group": group.id,
            "seq": self._position[operation.step] * self._stride + operation.seq,
            "peer": self._grid.neighbour(self._worker, message[2]) if message else -1,
            "is_async": True,
            "id": number,
            "timing": schema.CUDA_EVENT_TIMING,
        }


def _group_name(optype: str) -> str:
    """Of the group that a type of communication has to itself; both sides of a message share one."""
    return _MESSAGES[optype][1] if optype in _MESSAGES else optype


@cache
def _operation_name(optype: str) -> str | None:
    """The operation of a communication; None for work of the compute lane."""
    if optype in _MESSAGES:
        return _MESSAGES[optype][0]
    return next((name for ending, name in _COLLECTIVES.items() if optype.endswith(ending)), None)
