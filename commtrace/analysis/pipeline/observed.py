"""The pipeline of a job, reconstructed from its spans.

>>> find_pipeline(open_run("commtrace-runs/my-run")).schedule   # doctest: +SKIP
'1f1b'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.chain import Analysis
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.pipeline.bubble import (
    BubbleCauses,
    RankWaits,
    StageBubble,
    bubbles_of_stages,
    measure_waits,
    replayed_bubbles,
)
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.ideal import Ideal
from commtrace.analysis.replay.program import common_steps
from commtrace.analysis.replay.step_statistics import StatisticsParts, StepStatistics
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.schedule import UNKNOWN, RecognisedSchedule, bubble, recognise
from commtrace.trace.spans import Int32


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline and its idle time: means over ranks and steps.

    The *phase* lasts from the first forward to the last backward of any stage; a stage is *idle* in it when it runs
    neither. Idle time compares with the theoretical bubble of equal stages and microbatches, over the phase,
    (p − 1)/(v·m + p − 1), or over the work, (p − 1)/(v·m); None where no formula holds.
    """

    schedule: str  # see commtrace.trace.schedule
    reason: str  # why it is unknown; else empty
    stages: int  # p
    chunks: int  # v, per stage
    microbatches: int  # m, per step and replica
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


class Actions(NamedTuple):
    """The sequence of a rank's actions in a step: F, B, I or W, with microbatch and chunk."""

    letter: npt.NDArray[np.str_]
    microbatch: Int32
    chunk: Int32

    def words(self) -> list[str]:
        columns = (self.letter.tolist(), self.microbatch.tolist(), self.chunk.tolist())
        return [f"{letter}{microbatch}.{chunk}" for letter, microbatch, chunk in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class PipelineTotals:
    """Sums of the ranks of a pipeline; those of several windows add up."""

    ranks: Mapping[int, RankWaits]
    last_step: Mapping[int, Actions]  # of the last step that all ranks recorded; empty without one

    def __add__(self, later: PipelineTotals) -> PipelineTotals:
        ranks = {rank: waits + later.ranks[rank] for rank, waits in self.ranks.items()}
        return PipelineTotals(ranks, later.last_step or self.last_step)

    def by_stage(self) -> dict[int, list[int]]:
        """Return the ranks of each stage that run forwards, ascending."""
        stages: dict[int, list[int]] = {}
        for rank, waits in self.ranks.items():
            if waits.chunks:
                stages.setdefault(waits.stage or 0, []).append(rank)
        return dict(sorted(stages.items()))

    @property
    def is_pipeline(self) -> bool:
        """Return whether there are two stages, and a step that all ranks recorded."""
        return len(self.by_stage()) > 1 and bool(self.last_step)

    def pipeline(self, causes: BubbleCauses | None = None) -> Pipeline | None:
        """Return the pipeline, with the causes of its bubbles if given; None if there is none."""
        if not self.is_pipeline:
            return None
        by_stage = self.by_stage()
        first = [ranks[0] for ranks in by_stage.values()]
        orders = [self.last_step[rank].words() for rank in first]
        chunks = max(self.ranks[rank].chunks for rank in first)
        microbatches = max(sum(action[0] == "F" for action in order) for order in orders) // chunks
        schedule = _of_several_pipelines(by_stage, self.last_step) or recognise(orders, chunks)
        bubbles = bubbles_of_stages(self.ranks, causes.ranks if causes else {})
        shares = _shares(bubbles)
        theory = bubble(schedule.name, len(first), microbatches, chunks)
        return Pipeline(
            schedule=schedule.name,
            reason=schedule.reason,
            stages=len(first),
            chunks=chunks,
            microbatches=microbatches,
            idle_fraction_of_phase=shares.idle_of_phase,
            theoretical_fraction_of_phase=theory.fraction_of_step if theory else None,
            idle_ratio_to_work=shares.idle_to_work,
            theoretical_ratio_to_work=theory.ratio_to_work if theory else None,
            phase_fraction_of_step=shares.phase_of_step,
            bubble_fraction_of_step=shares.bubble_of_step,
            drain_fraction_of_step=shares.drain_of_step,
            per_stage=tuple(bubbles),
        )


def pipeline_totals(run: Run, matches: Matches, roles: Roles) -> PipelineTotals:
    """Add up the pipeline of an aligned run from its spans, without a replay."""
    steps = common_steps(run)
    last = {rank: _actions(run, trace, int(steps[-1])) for rank, trace in run.ranks.items()} if len(steps) else {}
    return PipelineTotals(measure_waits(run, matches, roles), last)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of some steps; ``work`` is None where they cannot be replayed."""

    totals: PipelineTotals
    work: StatisticsParts | None

    def __add__(self, later: _Measured) -> _Measured:
        work = None if self.work is None or later.work is None else self.work + later.work
        return _Measured(self.totals + later.totals, work)


def _measure(analysis: Analysis) -> _Measured:
    totals = pipeline_totals(analysis.run, analysis.matches, analysis.roles)
    try:
        program, replayed_ns = analysis.program, analysis.observed.step_ns()
    except ReplayError:
        return _Measured(totals, None)  # the bubble is measured all the same; its causes are then left out
    work, transfers = analysis.work, analysis.transfers
    parts = StatisticsParts.of(analysis.replayed.run, program, work, transfers, replayed_ns=replayed_ns)
    return _Measured(totals, parts)


def find_pipeline(run: OpenedRun) -> Pipeline | None:
    """Return the pipeline of a run; None without two stages, or without a step that all ranks recorded."""
    if not run.steps.used:
        return None
    measured = run.measure(_measure).result
    return pipeline_with_causes(run, measured.totals, None if measured.work is None else measured.work.joined())


def pipeline_with_causes(run: OpenedRun, totals: PipelineTotals, statistics: StepStatistics | None) -> Pipeline | None:
    """Return the pipeline of measured steps; without ``statistics``, those of its replay, its causes are left out."""
    if statistics is None or not totals.is_pipeline:
        return totals.pipeline()
    return totals.pipeline(run.read(partial(replayed_bubbles, ideal=Ideal.of(statistics))))


def _of_several_pipelines(
    by_stage: Mapping[int, Sequence[int]], orders: Mapping[int, Actions]
) -> RecognisedSchedule | None:
    """Return an unknown schedule if ranks of one stage differ, as one rank cannot stand for them; else None."""
    for stage, (first, *others) in by_stage.items():
        for second in others:
            if not np.array_equal(orders[first].letter == "F", orders[second].letter == "F"):
                return RecognisedSchedule(
                    UNKNOWN,
                    f"Ranks {first} and {second}, both of stage {stage}, run different forwards and backwards in a "
                    "step: there is more than one pipeline, or some of them were not recorded.",
                )
    return None


def _actions(run: Run, trace: RankTrace, step: int) -> Actions:
    spans = trace.spans
    rows = np.flatnonzero(((spans.kind == schema.FORWARD) | (spans.kind == schema.BACKWARD)) & (spans.step == step))
    letter = np.full(len(rows), "F")
    for code in np.unique(spans.name[rows]).tolist():
        name = run.names[code] if code >= 0 else ""
        letter[(spans.name[rows] == code) & (spans.kind[rows] == schema.BACKWARD)] = _letter_of_backward(name)
    return Actions(letter, spans.microbatch[rows], np.maximum(spans.chunk[rows], 0))


def _letter_of_backward(name: str) -> str:
    if "weight" in name or "wgrad" in name:
        return "W"
    return "I" if "input" in name or "dgrad" in name else "B"


class _Shares(NamedTuple):
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
