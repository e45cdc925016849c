"""The what-if analysis of a published trace, by the rules of its authors.

The order of operations is read off the first step of the first replica and holds for all. For one stage:

* forwards and backwards run one after the other, in the order of their starts;
* sends and receives of one type run one after the other; the i-th receive of a type is needed by the i-th compute of
  that type and posted after compute i − 1; the i-th send follows compute i;
* the first backward send and receive are posted after the last but one compute before the first backward;
* the gather of a chunk's parameters precedes its first forward; its gradients are reduced after its last backward if
  overlapped, else after all computes and the all-reduces of layer norm and embedding gradients;
* then come clipping, a collective of all ranks, and the optimizer.

Source: ByteDance-Seed/StragglerAnalysis, whose results are published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.replay.graph import ReplayGraph
from commtrace.analysis.replay.whatif import Experiment, WhatIf, analyse_experiment
from commtrace.analysis.statistics import grouped_median
from commtrace.errors import TraceFormatError
from commtrace.interchange.whatif_study.trace import WhatIfTrace, is_whatif_run, whatif_trace_of
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

_MERGED: Final = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
"""Both sides of a transfer count as one operation."""

_MOST_CELLS: Final = 250_000
"""Durations replayed at once; few enough to stay in the caches."""

COMPUTE: Final = ("forward-compute", "backward-compute", "optimizer", "gc")
"""Operations that are idealised by the mean; all others are communication."""

_FORWARD: Final = "forward-compute"
_BACKWARD: Final = "backward-compute"
_GATHER: Final = "params-all-gather"
_SCATTER: Final = "grads-reduce-scatter"
_SEPARATE: Final = "separate-grads-all-reduce"
_LAYER_NORM: Final = "layernorm-grads-all-reduce"
_EMBEDDING: Final = "embedding-grads-all-reduce"
_CLIP: Final = "optimizer-clip-main-grad"
_OPTIMIZER: Final = "optimizer"
_COLLECTION: Final = "gc"

_PEER_OF: Final = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
"""The type of the other side, and its distance in stages."""
_CLOCK_SLACK_NS: Final = 50_000

_EARLY_NS: Final = 10_000_000
"""A transfer more negative than this was a send that did not wait: it took no time."""


def slowdown_of_study(run: Run) -> Callable[[Run], WhatIf] | None:
    """Return what replays the steps of an imported trace of the study; None for any other run."""
    if not is_whatif_run(run):
        return None
    return lambda run: analyse_whatif_trace(whatif_trace_of(run))


def analyse_whatif_trace(trace: WhatIfTrace) -> WhatIf:
    """Return the what-if analysis of such a trace, by the rules of its authors."""
    graph = build_graph(trace)
    durations = np.where(graph.is_communication, graph.transfer_ns, trace.duration_ns)
    types, kind = _types(trace)
    operations, operation_of_type = np.unique([_MERGED.get(name, name) for name in types], return_inverse=True)

    ideal_ns = _ideal(types, kind, durations)
    at_once = max(1, _MOST_CELLS // max(len(durations), 1))

    def replay(masks: Sequence[Bool]) -> npt.NDArray[np.int64]:
        parts = [np.stack(masks[first : first + at_once]) for first in range(0, len(masks), at_once)]
        return np.concatenate([graph.step_times(np.where(part, ideal_ns, durations)) for part in parts])

    return analyse_experiment(
        Experiment(
            replay=replay,
            operations=operations.tolist(),
            operation=operation_of_type.reshape(-1).astype(np.int64)[kind],
            stage=trace.stage,
            dp_rank=trace.dp_rank,
            worker=trace.rank,
            steps=trace.steps.tolist(),
            measured_step_ns=_measured_steps(trace),
        )
    )


def _types(trace: WhatIfTrace) -> tuple[list[str], Int64]:
    """Return the types of operations, and the position of each row's type; all copies have one type."""
    types, kind = np.unique(trace.optype[:: trace.copies], return_inverse=True)
    return types.tolist(), np.repeat(kind.reshape(-1).astype(np.int64), trace.copies)


def _ideal(types: Sequence[str], kind: Int64, durations: Int64) -> Int64:
    """Return the mean (compute) or median (communication) over all rows of the same type."""
    mean = np.bincount(kind, durations.astype(np.float64)) / np.bincount(kind)
    median = grouped_median(kind, durations, len(types))
    return np.asarray(np.rint(np.where(np.isin(types, COMPUTE), mean, median)), np.int64)[kind]


def _measured_steps(trace: WhatIfTrace) -> Int64:
    ends = np.zeros(len(trace.steps), np.int64)
    np.maximum.at(ends, trace.step, trace.end_ns)
    return ends


class _StudyOperation(NamedTuple):
    """An operation of one step of one replica."""

    optype: str
    seq: int
    stage: int


@dataclass
class _Model:
    """Operations of one replica and step: their dependencies, and the members of each communication."""

    index: dict[_StudyOperation, int]
    waits_for: dict[_StudyOperation, list[_StudyOperation]] = field(default_factory=dict)
    communications: list[list[_StudyOperation]] = field(default_factory=list)

    def chain(self, operations: Iterable[_StudyOperation], after: Sequence[_StudyOperation] = ()) -> None:
        """Make each operation wait for the one before it, and the first one for ``after``."""
        before = list(after)
        for operation in operations:
            self.waits_for.setdefault(operation, []).extend(before)
            before = [operation]

    def wait(self, operation: _StudyOperation, awaited: _StudyOperation) -> None:
        self.waits_for.setdefault(operation, []).append(awaited)


@dataclass(frozen=True, slots=True)
class Graph:
    """The dependencies of all rows of a trace."""

    replay: ReplayGraph
    duration_of_edge: Int64  # by edge, the row whose duration is its weight; one past the last row for none
    last_nodes: Int64  # the ends of each step, of shape (steps, ends)
    is_communication: Bool  # rows whose duration is a transfer, after the last participant has started
    transfer_ns: Int64  # of these rows, as measured; else 0

    def step_times(self, durations_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return step durations, shape (scenarios, steps), from durations, shape (scenarios, rows)."""
        scenarios, rows = durations_ns.shape
        padded = np.empty((rows + 1, scenarios), np.int64)
        padded[:-1], padded[-1] = durations_ns.T, 0
        ends = self.replay.times(padded[self.duration_of_edge])[self.last_nodes]
        return np.ascontiguousarray(ends.max(axis=1).T)


def build_graph(trace: WhatIfTrace) -> Graph:
    """Return the dependency graph of all replicas and steps of a trace.

    Raises:
        TraceFormatError: messages and computes do not belong together.
    """
    model = _model(trace)
    copies, rows = trace.copies, len(trace.optype)
    copy = np.arange(copies)
    of_step = trace.step[:copies]
    replicas_together = (_GATHER, _SCATTER, _SEPARATE, _CLIP)

    # Node 0 is the start of the step, node r + 1 the end of row r, the rest are the joins of communications.
    join_of: dict[_StudyOperation, Int64] = {}
    next_node = rows + 1
    for members in model.communications:
        together = members[0].optype in replicas_together
        nodes = next_node + (of_step if together else copy)
        next_node += len(trace.steps) if together else copies
        join_of.update(dict.fromkeys(members, nodes))

    sources, targets, durations = [], [], []
    for operation, number in model.index.items():
        row = number * copies + copy
        starts = join_of.get(operation, row + 1)
        before = model.waits_for.get(operation, [])
        own_duration = np.full(copies, rows) if operation in join_of else row
        sources += [model.index[predecessor] * copies + copy + 1 for predecessor in before]
        if not before:
            sources.append(np.zeros(copies, np.int64))
        targets += [starts] * max(len(before), 1)
        durations += [own_duration] * max(len(before), 1)
        if operation in join_of:
            sources.append(starts)
            targets.append(row + 1)
            durations.append(row)
    last = [number * copies + copy + 1 for operation, number in model.index.items() if operation.optype == _OPTIMIZER]
    if not last:
        raise TraceFormatError(f"the trace has no operation of type {_OPTIMIZER}, with which the study's steps end.")
    is_communication = np.zeros(rows, np.bool_)
    join = np.zeros(rows, np.int64)
    for operation, nodes in join_of.items():
        row = model.index[operation] * copies + copy
        is_communication[row], join[row] = True, nodes
    return Graph(
        replay=ReplayGraph.from_edges(next_node, np.concatenate(sources), np.concatenate(targets)),
        duration_of_edge=np.concatenate(durations),
        last_nodes=np.stack(last)
        .reshape(len(last), len(trace.steps), -1)
        .transpose(1, 0, 2)
        .reshape(len(trace.steps), -1),
        is_communication=is_communication,
        transfer_ns=_transfers(trace, is_communication, join),
    )


def _transfers(trace: WhatIfTrace, is_communication: Bool, join: Int64) -> Int64:
    last_start = np.zeros(int(join.max(initial=0)) + 1, np.int64)
    np.maximum.at(last_start, join[is_communication], trace.start_ns[is_communication])
    transfer = trace.end_ns - last_start[join]
    return np.where(is_communication & (transfer > -_EARLY_NS), transfer, 0)


def _model(trace: WhatIfTrace) -> _Model:
    first = slice(None, None, trace.copies)
    operations = [
        _StudyOperation(str(optype), int(seq), int(stage))
        for optype, seq, stage in zip(trace.optype[first], trace.seq[first], trace.stage[first], strict=True)
    ]
    model = _Model({operation: number for number, operation in enumerate(operations)})
    stages = int(trace.stage.max()) + 1
    data_parallel = trace.sizes.get("dp_size", 1) * trace.sizes.get("dsp_size", 1) > 1
    overlapped = bool((trace.optype == _SEPARATE).any())
    by_stage = [_StudyStage(trace, model, stage, stages) for stage in range(stages)]
    for stage in by_stage:
        stage.add(data_parallel=data_parallel, overlapped=overlapped)
    model.communications += _pairs(by_stage)
    if data_parallel:
        model.communications += [
            [operation] for operation in operations if operation.optype in (_GATHER, _SCATTER, _SEPARATE)
        ]
    ends = [_StudyOperation(_EMBEDDING, 0, stage) for stage in sorted({0, stages - 1})]
    clips = [_StudyOperation(_CLIP, 0, stage) for stage in range(stages)]
    for members in (ends, clips):
        model.communications += [[member for member in members if member in model.index]]
    model.communications = [members for members in model.communications if members]
    return model


def _pairs(stages: Sequence[_StudyStage]) -> Iterator[list[_StudyOperation]]:
    """Yield the k-th effective send of a type with the k-th effective receive of its counterpart; the others alone."""
    for stage in stages:
        for optype, operations in stage.effective.items():
            peer_type, distance = _PEER_OF[optype]
            peer = (stage.number + distance) % len(stages)
            peers = stages[peer].effective.get(peer_type, [])
            if len(operations) != len(peers):
                raise TraceFormatError(
                    f"stage {stage.number} has {len(operations)} {optype} and stage {peer} {len(peers)} {peer_type}, "
                    "so the study's rules cannot pair them: rows of the trace are missing or doubled."
                )
            if optype.endswith("-send"):
                yield from ([send, receive] for send, receive in zip(operations, peers, strict=True))
        yield from ([operation] for operation in stage.idle)


class _StudyStage:
    """One stage of the first replica in the first step."""

    def __init__(self, trace: WhatIfTrace, model: _Model, number: int, stages: int) -> None:
        self.number = number
        self.effective: dict[str, list[_StudyOperation]] = {}
        self.idle: list[_StudyOperation] = []
        self._model = model
        self._model_chunks = (int(trace.chunk.max()) + 1) * stages
        rows = np.flatnonzero(trace.stage[:: trace.copies] == number) * trace.copies
        order = np.lexsort((trace.optype[rows], trace.seq[rows], trace.start_ns[rows]))
        rows = rows[order]
        self._operations = [_StudyOperation(str(trace.optype[row]), int(trace.seq[row]), number) for row in rows]
        self._row = dict(zip(self._operations, rows.tolist(), strict=True))
        self._trace = trace

    def add(self, *, data_parallel: bool, overlapped: bool) -> None:
        computes = self._of(_FORWARD, _BACKWARD)
        self._model.chain(computes)
        for optype in _PEER_OF:
            self._model.chain(self._of(optype))
            self._tie_to_computes(optype)
        first = next((position for position, compute in enumerate(computes) if compute.optype == _BACKWARD), 0)
        if first >= 2:
            for optype in ("backward-recv", "backward-send"):
                if _StudyOperation(optype, 0, self.number) in self._row:
                    self._model.wait(_StudyOperation(optype, 0, self.number), computes[first - 2])
        if data_parallel:
            self._model.chain(self._of(_GATHER, _SCATTER))
            self._gathers_before_forwards()
            if overlapped:
                self._scatters_after_backwards()
        self._end_of_step(computes, data_parallel=data_parallel, overlapped=overlapped)

    def _of(self, *optypes: str) -> list[_StudyOperation]:
        return [operation for operation in self._operations if operation.optype in optypes]

    def _start(self, operation: _StudyOperation) -> int:
        return int(self._trace.start_ns[self._row[operation]])

    def _end(self, operation: _StudyOperation) -> int:
        return int(self._trace.end_ns[self._row[operation]])

    def _chunk(self, operation: _StudyOperation) -> int:
        return int(self._trace.chunk[self._row[operation]])

    def _tie_to_computes(self, optype: str) -> None:
        """Tie each receive to the compute that needs it, and each send to its compute.

        The recorder also wrote operations without a launch: receives after the last compute, sends before the end of
        the first one, and those that would leave the model at its first or last chunk.
        """
        direction, side = optype.split("-")
        computes = self._of(f"{direction}-compute")
        if not computes:
            raise TraceFormatError(
                f"stage {self.number} has no {direction}-compute; the study's rules need one of each microbatch."
            )
        by_seq = {compute.seq: compute for compute in computes}
        if side == "recv":
            last_start = max(map(self._start, computes)) + _CLOCK_SLACK_NS
            launched = [operation for operation in self._of(optype) if self._start(operation) <= last_start]
        else:
            first_end = min(map(self._end, computes)) - _CLOCK_SLACK_NS
            launched = [operation for operation in self._of(optype) if self._end(operation) >= first_end]
        if len(launched) > len(computes):
            raise TraceFormatError(
                f"stage {self.number} has {len(launched)} {optype} and {len(computes)} {direction}-compute, so the "
                "study's rules cannot pair them: rows of the trace are missing or doubled."
            )
        skipped = 1 if side == "recv" and len(launched) + 1 == len(computes) else 0
        toward = 1 if optype in ("forward-send", "backward-recv") else -1
        effective = []
        for number, operation in enumerate(launched, start=skipped):
            compute = by_seq[number]
            if side == "send":
                self._model.wait(operation, compute)
            else:
                self._model.wait(compute, operation)
                if number > 0:
                    self._model.wait(operation, by_seq[number - 1])
            if 0 <= int(self._trace.model_chunk[self._row[compute]]) + toward < self._model_chunks:
                effective.append(operation)
        self.effective[optype] = effective
        self.idle += [operation for operation in self._of(optype) if operation not in effective]

    def _gathers_before_forwards(self) -> None:
        last_gather = {
            self._chunk(gather): gather for gather in sorted(self._of(_GATHER), key=lambda operation: operation.seq)
        }
        for chunk, gather in last_gather.items():
            forwards = [operation for operation in self._of(_FORWARD) if self._chunk(operation) == chunk]
            if forwards:
                self._model.wait(forwards[0], gather)

    def _scatters_after_backwards(self) -> None:
        chunks_seen = set()
        for scatter in sorted(self._of(_SCATTER), key=lambda operation: operation.seq):
            chunk = self._chunk(scatter)
            backwards = [operation for operation in self._of(_BACKWARD) if self._chunk(operation) == chunk]
            if chunk not in chunks_seen and backwards:
                self._model.wait(scatter, max(backwards, key=self._end))
            chunks_seen.add(chunk)

    def _end_of_step(self, computes: Sequence[_StudyOperation], *, data_parallel: bool, overlapped: bool) -> None:
        scatters = sorted(self._of(_SCATTER), key=lambda operation: operation.seq)
        collection = _StudyOperation(_COLLECTION, 0, self.number)
        last = max(computes, key=self._end)
        after = [last]
        if collection in self._row:
            self._model.wait(collection, last)
            after = [collection]
        tail = [_StudyOperation(optype, 0, self.number) for optype in (_LAYER_NORM, _EMBEDDING)]
        if data_parallel and overlapped:
            after = [*scatters[-1:], *after]
            tail.append(_StudyOperation(_SEPARATE, 0, self.number))
        elif data_parallel:
            tail += scatters
        tail += [_StudyOperation(optype, 0, self.number) for optype in (_CLIP, _OPTIMIZER)]
        self._model.chain([operation for operation in tail if operation in self._row], after)
