"""Reads the traces that were published with the what-if study of stragglers.

Such a trace (Parquet) has one row per operation: ``dp_rank, stage, rank, step, optype, start_ts, duration`` (seconds),
``seq_id`` (ordinal among the operations of its type in the step), ``mc`` (chunk on the rank), ``gmc`` (chunk in the
model). Its sizes are in a file of ``key: value`` lines. Format and rules: ByteDance-Seed/StragglerAnalysis.

>>> trace = read_whatif_trace("trace-ST.parquet", "meta-ST.yaml")    # doctest: +SKIP
>>> len(trace.steps)                                                 # doctest: +SKIP
32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.errors import TraceFormatError
from commtrace.trace.spans import Int64

COLUMNS: Final = (*("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc"),)


@dataclass(frozen=True, slots=True)
class WhatIfTrace:
    """The rows of such a trace, sorted by operation of the model-parallel group, then replica and step.

    Every replica and step runs the same operations: ``operation`` numbers them, ``copies`` is how often each is there,
    and row ``operation · copies + copy`` is the one of a copy.

    Attributes:
        sizes: of the job, as given: ``dp_size``, ``pp_size``, ``vpp_size``, ….
        steps: step numbers, ascending.
        optype: of each row; likewise the other columns.
        start_ns: since the start of its step.
    """

    sizes: Mapping[str, int]
    steps: Int64
    copies: int
    optype: npt.NDArray[np.str_]
    stage: Int64
    seq: Int64
    chunk: Int64
    model_chunk: Int64
    dp_rank: Int64
    rank: Int64
    step: Int64
    start_ns: Int64
    duration_ns: Int64

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.duration_ns


def read_whatif_trace(trace: str | Path, meta: str | Path) -> WhatIfTrace:
    """Read a trace and its sizes.

    Raises:
        TraceFormatError: columns are missing, or replicas or steps differ in their operations.
    """
    import pyarrow.parquet as pq  # here: what it brings along is a tenth of the start of a command that reads none

    table = pq.read_table(trace)
    missing = sorted(set(COLUMNS) - set(table.column_names))
    if missing:
        raise TraceFormatError(
            f"{trace} has no columns {', '.join(missing)}; a what-if trace has {', '.join(COLUMNS)}."
        )
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "optype"}
    optype = np.array(table["optype"].to_pylist())
    steps, step = np.unique(columns["step"], return_inverse=True)
    order = np.lexsort((columns["dp_rank"], step, columns["seq_id"], optype, columns["stage"]))
    copies = len(steps) * len(np.unique(columns["dp_rank"]))
    rows = {name: values[order] for name, values in columns.items()}
    start = _ns(rows["start_ts"])
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, step[order], start)
    read = WhatIfTrace(
        sizes=read_sizes(meta),
        steps=steps.astype(np.int64),
        copies=copies,
        optype=optype[order],
        stage=rows["stage"].astype(np.int64),
        seq=rows["seq_id"].astype(np.int64),
        chunk=rows["mc"].astype(np.int64),
        model_chunk=rows["gmc"].astype(np.int64),
        dp_rank=rows["dp_rank"].astype(np.int64),
        rank=rows["rank"].astype(np.int64),
        step=step[order].astype(np.int64),
        start_ns=start - first[step[order]],
        duration_ns=_ns(rows["duration"]),
    )
    _check_copies(read, trace)
    return read


def read_sizes(path: str | Path) -> dict[str, int]:
    """Return the whole numbers of a file of ``key: value`` lines; other lines are left out."""
    pairs = (line.partition(":") for line in Path(path).read_text(encoding="utf-8").splitlines())
    return {key.strip(): int(value) for key, _, value in pairs if value.strip().isdecimal()}


def _ns(seconds: npt.NDArray[Any]) -> Int64:
    return np.asarray(np.rint(seconds.astype(np.float64) * 1e9), np.int64)


def _check_copies(trace: WhatIfTrace, path: str | Path) -> None:
    if len(trace.optype) % trace.copies == 0:
        shape = (-1, trace.copies)
        same = [np.ptp(column.reshape(shape), axis=1).max() == 0 for column in (trace.stage, trace.seq)]
        if all(same) and (trace.optype.reshape(shape) == trace.optype.reshape(shape)[:, :1]).all():
            return
    raise TraceFormatError(
        f"{path}: the operations differ between steps or data-parallel ranks; all must run the same ones."
    )
