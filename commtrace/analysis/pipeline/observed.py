"""The pipeline of a job, reconstructed from its spans: stages, chunks, microbatches, schedule, and its bubbles.

>>> pipeline = reconstruct_pipeline(run, matches)               # doctest: +SKIP
>>> pipeline.schedule, pipeline.idle_fraction_of_phase          # doctest: +SKIP
('1f1b', 0.29)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.pipeline.bubble import MeasuredWaits, StageBubble, bubbles_of_stages, measure_waits
from commtrace.analysis.pipeline.schedule import (
    UNKNOWN,
    Schedule,
    recognise,
    theoretical_fraction_of_phase,
    theoretical_ratio_to_work,
)
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import Program, build_program, common_steps, stage_of
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline and where it idles. Times are means over ranks and steps, ns per step.

    A pipeline's *phase* lasts from the first forward of any stage to the last backward of any stage. A stage is *idle*
    in it when it runs no forward and no backward: it waits for its neighbours (the bubble), for transfers, and, having
    done its last backward, for the others to do theirs (the drain). That is what a schedule's theoretical bubble is to
    be compared with. Both are given over the phase, and over the work (all forwards and backwards).

    Attributes:
        schedule: gpipe, 1f1b, interleaved_1f1b, looped_bfs, zb1p, interleaved_zero_bubble, zbv, dualpipev, zero_bubble
            or unknown; see :mod:`commtrace.analysis.pipeline.schedule`.
        reason: why it is unknown; else empty.
        stages, chunks, microbatches: p, v (chunks per stage) and m (per step and replica).
        idle_fraction_of_phase: measured.
        theoretical_fraction_of_phase: the bubble that equal stages and microbatches have: (p − 1)/(v·m + p − 1); None
            where no formula holds.
        idle_ratio_to_work, theoretical_ratio_to_work: the same over the work: (p − 1)/(v·m).
        phase_fraction_of_step, bubble_fraction_of_step, drain_fraction_of_step: measured.
        per_stage: ascending.
    """

    schedule: str
    reason: str
    stages: int
    chunks: int
    microbatches: int
    idle_fraction_of_phase: float
    theoretical_fraction_of_phase: float | None
    idle_ratio_to_work: float
    theoretical_ratio_to_work: float | None
    phase_fraction_of_step: float
    bubble_fraction_of_step: float
    drain_fraction_of_step: float
    per_stage: tuple[StageBubble, ...]

    def to_json(self) -> JsonObject:
        return {
            "schedule": self.schedule,
            "reason": self.reason,
            "stages": self.stages,
            "chunks": self.chunks,
            "microbatches": self.microbatches,
            "fraction_of_phase": {
                "idle": self.idle_fraction_of_phase,
                "theoretical_bubble": self.theoretical_fraction_of_phase,
            },
            "ratio_to_work": {"idle": self.idle_ratio_to_work, "theoretical_bubble": self.theoretical_ratio_to_work},
            "fraction_of_step": {
                "phase": self.phase_fraction_of_step,
                "bubble": self.bubble_fraction_of_step,
                "drain": self.drain_fraction_of_step,
            },
            "per_stage": [stage.to_json() for stage in self.per_stage],
        }


@dataclass(frozen=True, slots=True)
class ObservedPipeline:
    """A pipeline as its spans show it, without a replay; its fields mean the same as those of :class:`Pipeline`."""

    run: Run
    schedule: Schedule
    stages: int
    chunks: int
    microbatches: int
    waits: MeasuredWaits

    def explained(self, program: Program | None) -> Pipeline:
        """Return the pipeline, with the causes of its bubbles if there is a program to replay."""
        schedule, stages, chunks, microbatches = self.schedule, self.stages, self.chunks, self.microbatches
        bubbles = bubbles_of_stages(self.run, self.waits, program)
        shares = _shares(bubbles)
        return Pipeline(
            schedule=schedule.name,
            reason=schedule.reason,
            stages=stages,
            chunks=chunks,
            microbatches=microbatches,
            idle_fraction_of_phase=shares.idle_of_phase,
            theoretical_fraction_of_phase=theoretical_fraction_of_phase(schedule.name, stages, chunks, microbatches),
            idle_ratio_to_work=shares.idle_to_work,
            theoretical_ratio_to_work=theoretical_ratio_to_work(schedule.name, stages, chunks, microbatches),
            phase_fraction_of_step=shares.phase_of_step,
            bubble_fraction_of_step=shares.bubble_of_step,
            drain_fraction_of_step=shares.drain_of_step,
            per_stage=tuple(bubbles),
        )


def observe_pipeline(run: Run, matches: Matches, roles: Roles | None = None) -> ObservedPipeline | None:
    """Return what the spans of a run tell of its pipeline, without a replay.

    Args:
        run: with aligned clocks.
        matches: its communications, joined.
        roles: of this run, where the caller has them.

    Returns:
        None where there are no two stages, or no step that all ranks recorded.
    """
    steps = common_steps(run)
    by_stage: dict[int, list[RankTrace]] = {}
    for trace in run.ranks.values():
        if np.any(trace.spans.kind == schema.FORWARD):
            by_stage.setdefault(stage_of(trace), []).append(trace)
    if len(by_stage) < 2 or not len(steps):
        return None
    ordered = [by_stage[stage][0] for stage in sorted(by_stage)]
    chunks = max(_chunks(trace) for trace in ordered)
    step = int(steps[-1])
    orders = [_order(run, trace, step) for trace in ordered]
    return ObservedPipeline(
        run=run,
        schedule=_of_several_pipelines(by_stage, step) or recognise(orders, chunks),
        stages=len(ordered),
        chunks=chunks,
        microbatches=max(sum(action[0] == "F" for action in order) for order in orders) // chunks,
        waits=measure_waits(run, matches, roles),
    )


def reconstruct_pipeline(run: Run, matches: Matches, roles: Roles | None = None) -> Pipeline | None:
    """Return the pipeline of a run, from its spans alone, with the causes of its bubbles if it can be replayed.

    Arguments and result are those of :func:`observe_pipeline`.
    """
    observed = observe_pipeline(run, matches, roles)
    return observed.explained(_program(run, matches)) if observed else None


def _program(run: Run, matches: Matches) -> Program | None:
    try:
        return build_program(run, matches)
    except ReplayError:
        return None  # the bubble is measured all the same; its causes are then left out


def _chunks(trace: RankTrace) -> int:
    chunks = trace.spans.chunk[trace.spans.kind == schema.FORWARD]
    return int(chunks.max()) + 1 if chunks.max() >= 0 else 1


def _of_several_pipelines(by_stage: Mapping[int, Sequence[RankTrace]], step: int) -> Schedule | None:
    """No schedule, where ranks of one stage do different things: those of one of them are not those of all."""
    for stage, (first, *others) in by_stage.items():
        kinds = first.spans.kind[_phases(first, step)]
        for other in others:
            if not np.array_equal(kinds, other.spans.kind[_phases(other, step)]):
                return Schedule(
                    UNKNOWN,
                    f"Ranks {first.rank} and {other.rank}, both of stage {stage}, run different forwards and backwards "
                    "in a step: there is more than one pipeline, or some of them were not recorded.",
                )
    return None


def _phases(trace: RankTrace, step: int) -> Int64:
    """Return the forwards and backwards of a step, in order."""
    spans = trace.spans
    return np.flatnonzero(((spans.kind == schema.FORWARD) | (spans.kind == schema.BACKWARD)) & (spans.step == step))


def _order(run: Run, trace: RankTrace, step: int) -> list[str]:
    """Return what a rank does in a step: F, B, I or W with the microbatch and the chunk."""
    spans = trace.spans
    actions = []
    for row in _phases(trace, step):
        name = run.names[spans.name[row]] if spans.name[row] >= 0 else ""
        letter = "F" if spans.kind[row] == schema.FORWARD else _letter_of_backward(name)
        actions.append(f"{letter}{spans.microbatch[row]}.{max(spans.chunk[row], 0)}")
    return actions


def _letter_of_backward(name: str) -> str:
    if "weight" in name or "wgrad" in name:
        return "W"
    return "I" if "input" in name or "dgrad" in name else "B"


class _Shares(NamedTuple):
    """Of all stages, each counted as often as it has ranks."""

    idle_of_phase: float
    idle_to_work: float
    phase_of_step: float
    bubble_of_step: float
    drain_of_step: float


def _shares(bubbles: Sequence[StageBubble]) -> _Shares:
    ranks = np.array([len(stage.ranks) for stage in bubbles])

    def total(name: str) -> float:
        return float((np.array([getattr(stage, name) for stage in bubbles]) * ranks).sum())

    wall, phase, work = (max(total(name), 1.0) for name in ("wall_ns", "phase_ns", "work_ns"))
    idle = max(phase - work, 0.0)
    return _Shares(idle / phase, idle / work, phase / wall, total("bubble_ns") / wall, total("drain_ns") / wall)
