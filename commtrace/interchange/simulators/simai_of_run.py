"""A measured step as a SimAI workload: what the rank computed, cut where it communicated.

Every collective is a row, with the compute before it. The rows of the forwards come first, those of the backwards
behind them in reverse, because SimAI goes through the rows backwards in its second half. Input and weight gradients
are not measured apart: both are in the input gradient's field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.states import COMPUTE
from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.operations import communication_rows
from commtrace.errors import ConfigurationError
from commtrace.interchange.simulators.aicb_log import rank_of
from commtrace.interchange.simulators.aiob import ComputeLane
from commtrace.interchange.simulators.simai_workload import NO_PART, OPERATIONS, Workload, WorkloadLayer, WorkloadPart
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

TP, EP, DP, DP_EP, PP = "TP", "EP", "DP", "DP_EP", "PP"

_CLASSES: Final = {
    "tp": TP,
    "ep": EP,
    "tp-ep": EP,
    "dp": DP,
    "dp-cp": DP,
    "fsdp": DP,
    "expert-dp": DP_EP,
    "pp": PP,
}
_SUFFIXES: Final = {TP: "", EP: "_EP", DP: "", DP_EP: "_DP_EP"}
_FORWARD, _BACKWARD, _STEP = "forward", "backward", "step"
_WAYS: Final = {schema.FORWARD: _FORWARD, schema.BACKWARD: _BACKWARD}


def class_of(role: str, roles: Sequence[str]) -> str:
    """Return SimAI's class of a role, such as TP; empty if it has none. ``roles`` are those of the run's groups."""
    if role == "world" and not {DP, TP, PP} & {_CLASSES.get(known_role) for known_role in roles}:
        return DP  # data parallelism over all ranks needs no group of its own
    return _CLASSES.get(role, "")


def roles_of_groups(run: Run) -> list[str]:
    """Return the roles of all process groups of a run, ascending."""
    return sorted({group.role for trace in run.ranks.values() for group in trace.groups.values()})


@dataclass(frozen=True, slots=True)
class MeasuredWorkload:
    """The step whose length is the median of those that count."""

    workload: Workload
    rank: int
    step: int
    wall_ns: int
    notes: tuple[str, ...]


class _Piece(NamedTuple):
    """Compute up to a collective, or up to the end of a phase."""

    way: str
    microbatch: int
    compute_ns: int
    role: str = ""
    operation: str = ""
    num_bytes: int = 0


def workload_of_rank(analysis: Analysis, rank: int) -> MeasuredWorkload:
    """Return the median step of a rank.

    Raises:
        ConfigurationError: the rank was not recorded, no step counts, or it has no forward or backward.
    """
    trace = rank_of(analysis.run, rank)
    times = analysis.partition
    rows = np.flatnonzero((times.rank == rank) & (times.step >= 0))
    if not len(rows):
        raise ConfigurationError(f"no step of rank {rank} counts, so there is no step to write")
    chosen = int(rows[np.argsort(times.wall_ns[rows], kind="stable")[(len(rows) - 1) // 2]])
    step, compute_ns = int(times.step[chosen]), int(times.total(COMPUTE)[chosen])
    pieces = list(_pieces(analysis, trace, step))
    if not any(piece.way in (_FORWARD, _BACKWARD) for piece in pieces):
        raise ConfigurationError(f"rank {rank} recorded no forward and no backward, which SimAI needs")
    notes: Counter[str] = Counter()
    roles = roles_of_groups(analysis.run)
    in_phases = sum(piece.compute_ns for piece in pieces)
    layers = _layers(pieces, roles, notes)
    rest = max(compute_ns - in_phases, 0)
    head = WorkloadLayer("step_compute", input_gradient=WorkloadPart(rest))
    workload = Workload(
        tp=_size(trace, "tp"),
        ep=_size(trace, "ep"),
        pp=_size(trace, "pp"),
        chunks=max(trace.topology.get("chunks", 0), trace.parallel.get("vpp", 0), 1),
        microbatches=_microbatches(trace.spans, step),
        world_size=analysis.run.world_size,
        pipeline_bytes=_pipeline_bytes(analysis, trace, step),
        layers=(head, *layers),
    )
    said = tuple(f"{count} calls of the step are left out: {reason}." for reason, count in notes.items())
    return MeasuredWorkload(workload, rank, step, int(times.wall_ns[chosen]), said)


def _size(trace: RankTrace, dimension: str) -> int:
    sizes = [group.size for group in trace.groups.values() if group.role == dimension]
    return trace.parallel.get(dimension) or max(sizes, default=1)


def _microbatches(spans: Spans, step: int) -> int:
    rows = (spans.kind == schema.FORWARD) & (spans.step == step)
    return max(len(np.unique(spans.microbatch[rows])), 1)


def _pipeline_bytes(analysis: Analysis, trace: RankTrace, step: int) -> int:
    spans, roles = trace.spans, analysis.roles
    rows = (spans.kind == schema.P2P) & (spans.step == step) & (roles.ranks[trace.rank].role == roles.code("pp"))
    return int(spans.bytes[rows].max()) if rows.any() else 0


def _pieces(analysis: Analysis, trace: RankTrace, step: int) -> Iterator[_Piece]:
    """Yield the pieces of a step by time."""
    run, spans = analysis.run, trace.spans
    lane = ComputeLane.of(analysis, trace.rank)
    roles = analysis.roles.ranks[trace.rank].role
    words = analysis.roles.words
    in_step = spans.step == step
    phases = np.flatnonzero(in_step & np.isin(spans.kind, list(_WAYS)))
    calls = np.flatnonzero(in_step & communication_rows(spans) & (spans.kind == schema.COLLECTIVE))
    starts = spans.start[calls]
    covered = 0  # phases may overlap where forward and backward are combined
    outside = np.ones(len(calls), np.bool_)
    timed_pieces: list[tuple[int, _Piece]] = []
    for phase in phases.tolist():
        begin, end = max(int(spans.start[phase]), covered), int(spans.end[phase])
        covered = max(covered, end)
        inside = np.flatnonzero((starts >= begin) & (starts < end))
        outside[inside] = False
        way, microbatch, since = _WAYS[int(spans.kind[phase])], int(spans.microbatch[phase]), begin
        for call in inside.tolist():
            at, row = int(starts[call]), int(calls[call])
            role = words[roles[row]]
            name = run.names[spans.name[row]] if spans.name[row] >= 0 else ""
            compute = _compute_ns(lane, since, at)
            timed_pieces.append((at, _Piece(way, microbatch, compute, role, name, int(spans.bytes[row]))))
            since = at
        if end > since:
            timed_pieces.append((end, _Piece(way, microbatch, _compute_ns(lane, since, end))))
    for call in np.flatnonzero(outside).tolist():
        row = int(calls[call])
        name = run.names[spans.name[row]] if spans.name[row] >= 0 else ""
        timed_pieces.append((int(starts[call]), _Piece(_STEP, -1, 0, words[roles[row]], name, int(spans.bytes[row]))))
    yield from (piece for _, piece in sorted(timed_pieces, key=lambda timed: timed[0]))


def _compute_ns(lane: ComputeLane, begin: int, end: int) -> int:
    return int(lane.compute_ns(np.array([begin]), np.array([end]))[0])


def _layers(pieces: Sequence[_Piece], roles: Sequence[str], notes: Counter[str]) -> list[WorkloadLayer]:
    ways: dict[str, list[WorkloadLayer]] = {_STEP: [], _FORWARD: [], _BACKWARD: []}
    for piece in pieces:
        of_way = ways[piece.way]
        microbatch = f"_microbatch{piece.microbatch}" if piece.microbatch >= 0 else ""
        layer = _layer(f"{piece.way}{microbatch}_{len(of_way)}", piece, roles, notes)
        if layer is not None:
            of_way.append(layer)
    # SimAI comes to the rows of the step last, when it goes backwards
    return [*reversed(ways[_STEP]), *ways[_FORWARD], *reversed(ways[_BACKWARD])]


def _layer(name: str, piece: _Piece, roles: Sequence[str], notes: Counter[str]) -> WorkloadLayer | None:
    part, weight_gradient = WorkloadPart(piece.compute_ns), NO_PART
    if piece.operation:
        group_class = class_of(piece.role, roles)
        reason = _unknown(piece, group_class)
        if reason:
            notes[reason] += 1
        elif group_class in (DP, DP_EP):
            weight_gradient = WorkloadPart(0, OPERATIONS[piece.operation] + _SUFFIXES[group_class], piece.num_bytes)
        else:
            part = WorkloadPart(piece.compute_ns, OPERATIONS[piece.operation] + _SUFFIXES[group_class], piece.num_bytes)
    if part == weight_gradient == NO_PART:
        return None
    if piece.way == _FORWARD:
        return WorkloadLayer(name, forward=part, weight_gradient=weight_gradient)
    return WorkloadLayer(name, input_gradient=part, weight_gradient=weight_gradient)


def _unknown(piece: _Piece, group_class: str) -> str:
    if group_class not in _SUFFIXES:
        return f"SimAI has no group for {piece.role}"
    if piece.operation not in OPERATIONS:
        return f"SimAI does not simulate {piece.operation or 'an unknown operation'}"
    return "" if piece.num_bytes >= 0 else "their bytes are unknown"
