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

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from commtrace.errors import ImportFileError
from commtrace.importers.rows import Imported, group_rows, imported_rank, mark_row, new_run, write_rank_spans
from commtrace.importers.whatif_grid import Grid, Worker
from commtrace.importers.whatif_spans import STEP_NAME, Job, Operations, Steps, spans_by_worker
from commtrace.importers.whatif_types import operation_type
from commtrace.trace import schema
from commtrace.trace.files.segment_index import first_line
from commtrace.trace.inputs import MOST_RANKS, open_file, printable, read_file
from commtrace.trace.spans import Int64

_COLUMNS: Final = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc",
)  # fmt: skip
_MOST_ROWS: Final = 100_000
_MOST_ROWS_PER_BYTE: Final = 10
_LARGEST_META: Final = 1 << 20
_SIZE: Final = re.compile("[0-9]{1,6}")
_LONGEST_SECONDS: Final = 10_000_000
_SIZES: Final = {"pp_size": "pp", "dp_size": "dp", "tp_size": "tp", "vpp_size": "vpp"}


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
    job, operations = _understood(trace, _read(trace))
    sizes = {**job.grid.sizes(), **(_read_sizes(meta) if meta else {})}
    num_spans = 0
    for worker, spans in zip(job.workers, spans_by_worker(job, operations), strict=True):
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


def _read(path: Path) -> pa.Table:
    try:
        table = _table(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last one where a column's name is damaged
        raise ImportFileError(f"{path} is no Parquet file that can be read: {first_line(error)}") from error
    if not len(table):
        raise ImportFileError(f"{path} has no rows.")
    for name in _COLUMNS:
        kind = table[name].type
        if name == "optype":
            is_right = pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind)
        else:
            is_right = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not is_right or (name == "optype" and table[name].null_count):
            raise ImportFileError(f"{path}: column {name} holds {kind}, or nothing in some rows.")
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
            raise ImportFileError(f"{path} says that it holds {rows:,} rows, which do not fit into its bytes.")
        table = file.read(columns=list(_COLUMNS))
        table.validate(full=True)
        return table


def _understood(path: Path, table: pa.Table) -> tuple[Job, Operations]:
    columns = {name: table[name].to_numpy() for name in _COLUMNS if name != "optype"}
    _check_places(path, columns)
    numbers, step = np.unique(columns["step"], return_inverse=True)
    columns["start_ts"] = _since_the_step_began(columns["start_ts"], step)
    _check_times(path, columns)
    workers, worker = _workers(path, columns)
    optypes, optype = _types(table["optype"])
    types = [operation_type(one) for one in optypes]
    steps, start, end = _lay_out(numbers, step, columns)
    stride = int(columns["seq_id"].max()) + 1
    names = [STEP_NAME, *dict.fromkeys(one.name for one in types if one.name != STEP_NAME)]
    job = Job(workers, types, steps, Grid(workers, types), stride, names)
    seq, chunk, microbatch = (_numbers(columns[name]) for name in ("seq_id", "mc", "mb_id"))
    order = np.lexsort((seq, end, start, worker * len(steps.number) + step))
    return job, Operations(worker, optype, step, start, end, seq, chunk, microbatch).take(order)


def _numbers(column: npt.NDArray[Any]) -> Int64:
    """Return a column as integers; −1 for missing values."""
    if not _may_lack(column):
        return column.astype(np.int64)
    known = column.astype(np.float64)
    return np.where(np.isnan(known), schema.NOT_APPLICABLE, known).astype(np.int64)


def _may_lack(column: npt.NDArray[Any]) -> bool:
    """Return whether rows may have no value: whole numbers of which some are missing come as floats."""
    return not np.issubdtype(column.dtype, np.integer)


def _check_places(path: Path, columns: Mapping[str, Any]) -> None:
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
            raise ImportFileError(f"{path}: {name} of {bad} of {len(numbers)} rows is a number that no job has.")


def _since_the_step_began(start: npt.NDArray[Any], step: Int64) -> npt.NDArray[np.float64]:
    """Return seconds from the first operation of the step on; a trace may count them from elsewhere, such as 1970."""
    seconds = start.astype(np.float64)
    first = np.full(int(step.max()) + 1, np.inf)
    np.fmin.at(first, step, seconds)
    return np.asarray(seconds - first[step])


def _check_times(path: Path, columns: Mapping[str, Any]) -> None:
    for name in ("start_ts", "duration"):
        seconds = columns[name].astype(np.float64)
        bad = int((~(np.abs(seconds) <= _LONGEST_SECONDS)).sum())  # NaN compares as False
        if bad:
            raise ImportFileError(
                f"{path}: {name} of {bad} of {len(seconds)} rows is no time in seconds within its step (missing, NaN, "
                f"or more than {_LONGEST_SECONDS:,} s). Write seconds since the start of the step, and leave out steps "
                "of which rows are missing."
            )
    if not (columns["duration"] > 0).any():
        raise ImportFileError(f"{path}: no operation takes any time. Is duration in seconds?")


def _workers(path: Path, columns: Mapping[str, Any]) -> tuple[list[Worker], Int64]:
    """Return the workers, ascending by rank, and of each row the position of its worker."""
    ranks, example, which = np.unique(columns["rank"], return_index=True, return_inverse=True)
    places = [columns[name][example] for name in ("stage", "dp_rank")]
    if any((columns[name] != place[which]).any() for name, place in zip(("stage", "dp_rank"), places, strict=True)):
        raise ImportFileError(f"{path}: a rank is on more than one stage or data-parallel rank.")
    workers = [Worker(*map(int, place)) for place in zip(ranks, *places, strict=True)]
    there = {(worker.stage, worker.dp_rank) for worker in workers}
    if len(there) < len(workers):
        raise ImportFileError(f"{path}: several ranks are on the same stage and data-parallel rank.")
    stages, dp_ranks = (sorted(set(values)) for values in zip(*there, strict=True))
    absent = len(stages) * len(dp_ranks) - len(there)
    if absent:
        grid = ((stage, dp_rank) for stage in stages for dp_rank in dp_ranks)
        stage, dp_rank = next(place for place in grid if place not in there)
        raise ImportFileError(
            f"{path}: stage {stage} of data-parallel rank {dp_rank} has no rows, and the study's rules "
            f"need all {len(stages)} stages of all {len(dp_ranks)} data-parallel ranks ({absent} missing)."
        )
    return workers, which.astype(np.int64)


def _types(optype: pa.ChunkedArray) -> tuple[list[str], Int64]:
    """Return the types of operations that occur, and of each row the position of its type."""
    coded = optype.unify_dictionaries().combine_chunks() if pa.types.is_dictionary(optype.type) else None
    coded = optype.combine_chunks().dictionary_encode() if coded is None else coded
    used, which = np.unique(coded.indices.to_numpy(), return_inverse=True)
    words = coded.dictionary.to_pylist()
    return [printable(words[code]) for code in used.tolist()], which.astype(np.int64)


def _nanoseconds(seconds: Any) -> Int64:
    return np.asarray(np.rint(seconds.astype(np.float64) * 1e9), np.int64)


def _lay_out(numbers: Int64, step: Int64, columns: Mapping[str, Any]) -> tuple[Steps, Int64, Int64]:
    """Return the steps, which have these numbers, one behind the other; and of each row, which is of a step, start
    and end.
    """
    start = _nanoseconds(columns["start_ts"])
    end = start + _nanoseconds(columns["duration"])
    longest = np.zeros(len(numbers), np.int64)
    np.maximum.at(longest, step, end)
    ends = np.cumsum(longest)
    begins = ends - longest
    return Steps(numbers.astype(np.int64), begins, ends), start + begins[step], end + begins[step]
