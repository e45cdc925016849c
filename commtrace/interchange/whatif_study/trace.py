"""Restore the traces of the what-if study from runs that ``commtrace import whatif`` made.

The published results follow from the rules of the study, so these rules apply to such runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, numbered, pack
from commtrace.errors import TraceFormatError
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64

_TOPOLOGY_KEY: Final = "whatif"
_NO_ROWS: Final = (schema.STEP, schema.STALL)


@dataclass(frozen=True, slots=True)
class WhatIfTrace:
    """The rows of such a trace, sorted by operation of the model-parallel group, then replica and step.

    Every replica and step runs the same operations: row ``operation · copies + copy`` is the one of a copy.
    """

    sizes: Mapping[str, int]  # of the job: dp_size, pp_size, vpp_size, …
    steps: Int64  # ascending
    copies: int
    optype: npt.NDArray[np.str_]
    stage: Int64
    seq: Int64
    chunk: Int64
    model_chunk: Int64
    dp_rank: Int64
    rank: Int64
    step: Int64
    start_ns: Int64  # since the start of its step
    duration_ns: Int64

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.duration_ns


def is_whatif_run(run: Run) -> bool:
    """Return whether the run was made by ``commtrace import whatif``."""
    return all(_TOPOLOGY_KEY in trace.topology for trace in run.ranks.values())


def whatif_trace_of(run: Run) -> WhatIfTrace:
    """Return the trace in an imported run, of the steps that were loaded.

    Raises:
        TraceFormatError: the run was not made by ``commtrace import whatif``, or ranks of it are missing.
    """
    if not is_whatif_run(run) or len(run.ranks) != run.world_size:
        raise TraceFormatError(f"{run.path} is no complete run made by `commtrace import whatif`.")
    study = next(iter(run.ranks.values())).topology[_TOPOLOGY_KEY]
    stages = int(study["pp_size"])
    types: list[str] = []
    parts = [_rows_of_rank(run, trace, types) for trace in run.ranks.values()]
    optype, stage, seq, chunk, dp_rank, rank, step, start, duration = (
        np.concatenate([getattr(part, name) for part in parts]) for name in _TraceRows._fields
    )
    order_of_type = np.argsort(np.argsort(np.array(types)))
    steps, step = np.unique(step, return_inverse=True)
    step = step.reshape(-1)
    order = np.lexsort((dp_rank, step, seq, order_of_type[optype], stage))
    if not _is_regular((stage[order], optype[order], seq[order]), (step[order], dp_rank[order])):
        raise TraceFormatError(_what_is_irregular(run, steps, (stage, optype, seq), step, dp_rank))
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, step, start)
    names: npt.NDArray[np.str_] = np.array(types)[optype]
    in_phase = np.isin(types, ("forward-compute", "backward-compute"))[optype]
    return WhatIfTrace(
        sizes={name: int(value) for name, value in study.items() if name != "seq_stride"},
        steps=steps.astype(np.int64),
        copies=len(steps) * len(np.unique(dp_rank)),
        optype=names[order],
        stage=stage[order],
        seq=seq[order],
        chunk=chunk[order],
        model_chunk=np.where(in_phase, chunk * stages + stage, -1)[order],
        dp_rank=dp_rank[order],
        rank=rank[order],
        step=step[order].astype(np.int64),
        start_ns=(start - first[step])[order],
        duration_ns=duration[order],
    )


def _is_regular(operation: Sequence[Int64], copy: Sequence[Int64]) -> bool:
    """Return whether every step of every replica holds the same operations, each once; rows are ordered by both."""
    count = len(np.unique(copy[0])) * len(np.unique(copy[1]))
    if len(copy[0]) % count:
        return False
    alike = all((column.reshape(-1, count) == column[::count, np.newaxis]).all() for column in operation)
    return alike and all((column.reshape(-1, count) == column[:count]).all() for column in copy)


def _what_is_irregular(run: Run, steps: Int64, operation: Sequence[Int64], step: Int64, dp_rank: Int64) -> str:
    _, which = np.unique(pack(list(operation)), return_inverse=True)
    _, copy = np.unique(pack((step, dp_rank)), return_inverse=True)
    times = np.zeros((int(which.max()) + 1, int(copy.max()) + 1), np.int64)
    np.add.at(times, (which.reshape(-1), copy.reshape(-1)), 1)
    odd = (times != np.median(times, axis=1, keepdims=True)).any(axis=0)
    irregular = steps[np.unique(step[odd[copy.reshape(-1)]])].tolist()
    named = ", ".join(map(str, irregular[:8])) + (" …" if len(irregular) > 8 else "")
    what = f"steps {named} hold others than the rest" if irregular else "some come several times in a step"
    return (
        f"{run.path}: the study's rules compare operations one by one, and {what}: rows of the trace are missing or "
        "doubled. Leave those steps out of the trace and import it again, or choose others with --steps A:B."
    )


class _TraceRows(NamedTuple):
    optype: Int64  # position in a list of types
    stage: Int64
    seq: Int64
    chunk: Int64
    dp_rank: Int64
    rank: Int64
    step: Int64
    start: Int64
    duration: Int64


def _rows_of_rank(run: Run, trace: RankTrace, types: list[str]) -> _TraceRows:
    spans = trace.spans.take(~np.isin(trace.spans.kind, _NO_ROWS))
    optype = _types(run, trace, types, np.stack([spans.kind, spans.group, spans.name]).astype(np.int64))
    communicates = np.isin(spans.kind, (schema.COLLECTIVE, schema.P2P))
    stride = int(trace.topology[_TOPOLOGY_KEY]["seq_stride"])
    count = len(spans)
    return _TraceRows(
        optype=optype,
        stage=np.full(count, trace.coordinates["pp"], np.int64),
        seq=np.where(communicates, spans.seq % stride, _ordinals(optype, spans.step.astype(np.int64))),
        chunk=spans.chunk.astype(np.int64),
        dp_rank=np.full(count, trace.coordinates["dp"], np.int64),
        rank=np.full(count, trace.rank, np.int64),
        step=spans.step.astype(np.int64),
        start=spans.start,
        duration=spans.end - spans.start,
    )


def _types(run: Run, trace: RankTrace, types: list[str], columns: Int64) -> Int64:
    """Return the position of each row's type in ``types``, to which new types are added."""
    example, which = grouped(pack([numbered(column) for column in columns]))
    codes = []
    for kind, group, name in columns[:, example].T.tolist():
        word = run.names[name]
        if kind in (schema.P2P, schema.COLLECTIVE) and group not in trace.groups:
            raise TraceFormatError(f"{run.path}: rank {trace.rank} has communications without a group.")
        if kind == schema.P2P:
            word = f"{trace.groups[int(group)].name}-{word}"
        elif kind == schema.COLLECTIVE:
            word = trace.groups[int(group)].name
        if word not in types:
            types.append(word)
        codes.append(types.index(word))
    return np.array(codes, np.int64)[which]


def _ordinals(optype: Int64, step: Int64) -> Int64:
    """Return the number of earlier rows of the same type and step; rows are in time order."""
    key = pack((optype, step))
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(key[order]) != 0)) if len(key) else np.zeros(0, np.int64)
    ordinals = np.empty(len(key), np.int64)
    ordinals[order] = np.arange(len(key)) - np.repeat(begins, np.diff(np.append(begins, len(key))))
    return ordinals
