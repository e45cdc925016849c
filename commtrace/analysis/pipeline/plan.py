"""The plan of a pipeline: its step replayed with mean forwards and backwards and no transfers.

The recorded order and dependencies are kept. Time that the real step takes beyond the plan is not the schedule's fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.keys import pack
from commtrace.analysis.replay.edges import worked_before
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.ideal import mean_work
from commtrace.analysis.replay.program import Program, build_program, stage_of
from commtrace.analysis.replay.segments import BACKWARD, FORWARD
from commtrace.analysis.replay.step_statistics import WorkTable
from commtrace.analysis.timeline import BUBBLE, Outline, OutlineRank, RankBoxes, StepBoxes, rank_label
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64

_KIND_OF = {FORWARD: schema.FORWARD, BACKWARD: schema.BACKWARD}
_MOST_RANKS = 64
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The forwards and backwards of one rank, by start; ns from the start of the step."""

    rank: int
    kind: Int64
    microbatch: Int64
    chunk: Int64
    start_ns: Int64
    end_ns: Int64


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """One step of the plan, with one rank per stage of one replica; it ends with the last backward of any rank."""

    step: int
    duration_ns: int
    ranks: tuple[RankPlan, ...]


class PlanTimeline(TypedDict):
    """A plan as one step of a timeline, with the outline that it needs."""

    outline: Outline
    step: StepBoxes


def plan_of_steps(analysis: Analysis, steps: Sequence[int]) -> PlanTimeline | None:
    """Return the schedule with the mean forwards and backwards of these steps; None if there is none."""
    rows = analysis.replayed
    try:
        plan = plan_of(rows.run, build_program(rows.run, rows.matches, np.array(steps, np.int64)))
    except ReplayError:
        return None  # the summary meets the same error, and reports it
    return plan_timeline(rows.run, plan) if plan else None


def plan_of(run: Run, program: Program) -> PlannedPipeline | None:
    """Return the plan of the first replayed step; None for a run without forwards on several stages."""
    ranks = _one_replica(run)
    times = _phase_times(program, step=0)
    plans = tuple(plan for rank in ranks if (plan := _of_rank(program, times, rank)) is not None)
    if len(plans) < 2:
        return None
    begin = min(int(plan.start_ns[0]) for plan in plans)
    moved = tuple(_moved(plan, begin) for plan in plans)
    return PlannedPipeline(int(program.steps[0]), max(int(plan.end_ns.max()) for plan in moved), moved)


def _one_replica(run: Run) -> list[int]:
    """Return one rank of every stage, at position 0 of every other parallel dimension if known."""
    chosen: dict[int, tuple[bool, int]] = {}
    for rank, trace in run.ranks.items():
        elsewhere = any(position for name, position in trace.coordinates.items() if name != "pp")
        stage = stage_of(trace)
        chosen[stage] = min((elsewhere, rank), chosen.get(stage, (True, rank)))
    return [rank for _, (_, rank) in sorted(chosen.items())][:_MOST_RANKS]


@dataclass(frozen=True, slots=True)
class _PhaseTimes:
    segment: Int64
    start: Int64
    end: Int64


def _phase_times(program: Program, step: int) -> _PhaseTimes:
    work = WorkTable.of(program.segments)
    segment_ns = mean_work(work)[work.entry]
    times = program.times(segment_ns, np.zeros_like(program.transfers.ns))
    edges = program.edges
    # Along the lanes: into the end of a stall and into the end of a step.
    along = np.isin(edges.target[: len(edges.first_piece)], program.last_node)
    into_ends = np.flatnonzero(along & (edges.end_piece > edges.first_piece))
    lane = np.unique(np.concatenate([program.stalls.lane_edge, into_ends]))
    count = (edges.end_piece - edges.first_piece)[lane]
    edge = np.repeat(lane, count)
    offset = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count)
    piece = edges.first_piece[edge] + offset
    scaled = program.scaled_pieces(segment_ns)
    before = worked_before(scaled)
    start = times[edges.source[edge]] + before[piece] - before[edges.first_piece[edge]]
    segment = program.piece_segment[piece]
    chosen = program.segments.step[segment] == step
    return _PhaseTimes(segment[chosen], start[chosen], (start + scaled[piece])[chosen])


def _of_rank(program: Program, times: _PhaseTimes, rank: int) -> RankPlan | None:
    segments = program.segments
    of_rank = (segments.rank[times.segment] == rank) & np.isin(segments.kind[times.segment], (FORWARD, BACKWARD))
    if not of_rank.any():
        return None
    segment, start, end = times.segment[of_rank], times.start[of_rank], times.end[of_rank]
    _, first, phase = np.unique(
        pack([segments.kind[segment], segments.instance[segment]]), return_index=True, return_inverse=True
    )
    begins, ends = np.full(len(first), np.iinfo(np.int64).max), np.zeros(len(first), np.int64)
    np.minimum.at(begins, phase.reshape(-1), start)
    np.maximum.at(ends, phase.reshape(-1), end)
    order = np.argsort(begins, kind="stable")
    of_phase = segment[first][order]
    kinds = np.where(segments.kind[of_phase] == FORWARD, _KIND_OF[FORWARD], _KIND_OF[BACKWARD])
    return RankPlan(rank, kinds, segments.microbatch[of_phase], segments.chunk[of_phase], begins[order], ends[order])


def _moved(plan: RankPlan, begin: int) -> RankPlan:
    return RankPlan(plan.rank, plan.kind, plan.microbatch, plan.chunk, plan.start_ns - begin, plan.end_ns - begin)


def plan_timeline(run: Run, plan: PlannedPipeline) -> PlanTimeline:
    """Return the plan as one step of a timeline (see :mod:`.timeline`), with the outline that it needs."""
    return {
        "outline": {
            "residual_ns": None,
            "kinds": list(schema.KINDS),
            "states": ["wait", "transfer", "bubble"],
            "timings": list(schema.TIMINGS),
            "roles": ["pp"],
            "names": [],
            "ranks": [_outline(run.ranks[planned.rank]) for planned in plan.ranks],
        },
        "step": {
            "step": plan.step,
            "base_ns": 0,
            "duration_ns": plan.duration_ns,
            "ranks": [_boxes(index, planned, plan.duration_ns) for index, planned in enumerate(plan.ranks)],
        },
    }


def _outline(trace: RankTrace) -> OutlineRank:
    return {
        "rank": trace.rank,
        "host": trace.metadata.node,
        "coordinates": dict(trace.coordinates),
        "label": rank_label(trace),
        "lanes": [],
    }


def _boxes(index: int, plan: RankPlan, duration_ns: int) -> RankBoxes:
    count = len(plan.start_ns)
    begins = np.concatenate([[0], plan.end_ns])
    ends = np.concatenate([plan.start_ns, [duration_ns]])
    gaps = np.flatnonzero(ends > begins)
    nowhere, none = [_NOWHERE] * len(gaps), [0] * len(gaps)
    empty: dict[str, list[int]] = {"kind": [], "name": [], "start": [], "duration": []}
    return {
        "rank_index": index,
        "start": 0,
        "end": duration_ns,
        "work": {
            "kind": plan.kind.tolist(),
            "name": [_NOWHERE] * count,
            "start": plan.start_ns.tolist(),
            "duration": (plan.end_ns - plan.start_ns).tolist(),
            "microbatch": plan.microbatch.tolist(),
            "chunk": plan.chunk.tolist(),
            "stage": [_NOWHERE] * count,
            "depth": [0] * count,
        },
        "stalls": {
            "state": [BUBBLE] * len(gaps),
            "role": none,
            "communication": nowhere,
            "start": begins[gaps].tolist(),
            "duration": (ends - begins)[gaps].tolist(),
            "microbatch": nowhere,
            "chunk": nowhere,
            "stage": nowhere,
            "depth": none,
        },
        "host": empty,
        "communication": {**empty, "lane": [], "sublane": [], "wait": []},
    }
