"""Divide the time of a run's steps beyond the ideal by cause: a sum that adds up.

The steps are replayed several times, each time with one more thing ideal; each difference is the cost of that thing.

>>> lost = lost_time(statistics, replay.replay(scenarios_of_lost_time(statistics)), slow)  # doctest: +SKIP
>>> lost.steps_ns - lost.ideal_ns == sum(lost.costs_ns().values())  # doctest: +SKIP
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from commtrace.analysis.engines import on_gpu
from commtrace.analysis.keys import sort_groups
from commtrace.analysis.replay.ideal import equal_stages
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.replay.scenarios import (
    MEASURED,
    IdealWork,
    NoTransfers,
    Replay,
    ReplayedSteps,
    Scenario,
    WithoutPauses,
)
from commtrace.analysis.replay.step_statistics import StepStatistics, WorkTable
from commtrace.analysis.statistics import grouped_median
from commtrace.analysis.stragglers.late_hosts import is_launch_bound_job
from commtrace.findings.causes import CAUSES, DATA, JOB, OF_DIVISION, PART_OF_LOSS, PAUSES, advice
from commtrace.findings.finding import LOST, Finding, finding_id
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class LostTime:
    """The time in steps: the mean over the ranks, summed over the steps; ns."""

    num_steps: int
    gpus: int | None  # of the job; None if it did not run on GPUs
    steps_ns: int  # the whole
    ideal_ns: int  # work of the mean rank if the same work took as long as on the quicker ranks
    stragglers_ns: int  # cost of the findings on slow ranks
    imbalance_ns: int  # other differences in the same work: uneven stages and sequences, scatter
    exposed_communication_ns: int
    bubble_ns: int  # waiting of equal stages that is due to the schedule of a pipeline
    input_ns: int
    rest_ns: int  # garbage collection, checkpoints, evaluation, launches, between steps, and what no replay sees
    # How much of it the cost of each finding is, in their order: with what is left of the parts, the time beyond the
    # ideal. Not in the JSON.
    of_findings: tuple[int, ...] = field(default=(), kw_only=True)

    def costs_ns(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COSTS}

    def plus(self, other: LostTime) -> LostTime:
        """Return the sum of two parts of one job, whose findings differ."""
        names = ("num_steps", "steps_ns", "ideal_ns", *_COSTS)
        return LostTime(gpus=self.gpus, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def to_json(self) -> JsonObject:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "of_findings"}


_COSTS: Final = (
    "stragglers_ns", "imbalance_ns", "exposed_communication_ns", "bubble_ns", "input_ns", "rest_ns",
)  # fmt: skip


def scenarios_of_lost_time(statistics: StepStatistics) -> tuple[Scenario, ...]:
    """Return the scenarios that :func:`lost_time` needs."""
    work_ns = _ideal_work(statistics.table)
    only_working = WithoutPauses(PAUSES)
    quick = Scenario((only_working, IdealWork(work_ns, np.ones(len(work_ns), np.bool_))))
    return (
        MEASURED,
        Scenario((WithoutPauses((DATA,)),)),
        Scenario((only_working,)),
        quick,
        quick + Scenario(transfers=(NoTransfers(),)),
        quick + Scenario(transfers=(NoTransfers(),), without_launches=True),
    )


def lost_time(
    statistics: StepStatistics, replayed: ReplayedSteps, slow: Sequence[Finding], gpus: int | None = None
) -> LostTime:
    """Divide the time of steps, whose clocks agree, by cause.

    ``replayed`` are in :func:`scenarios_of_lost_time`; ``gpus`` is None if the job did not run on GPUs.
    """
    sums = replayed.sums
    num_steps, steps_ns = sums.num_steps, sums.measured_ns
    as_replayed, without_input, only_work, even, without_transfers, without_launches = sums.replayed_ns.tolist()
    ideal_ns = round(int(sums.work_ns[-1]) / len(statistics.ranks))

    is_pipeline = len(np.unique(statistics.table.entries.stage)) > 1
    waiting = without_launches - sums.between_ns - ideal_ns
    parts = {
        "imbalance_ns": only_work - even,
        "exposed_communication_ns": even - without_transfers,
        "bubble_ns": waiting if is_pipeline else 0,
        "input_ns": as_replayed - without_input,
        "rest_ns": steps_ns
        - as_replayed
        + (without_input - only_work)
        + (without_transfers - without_launches)
        + (0 if is_pipeline else waiting)
        + sums.between_ns,
    }
    # Work that takes long on all ranks counts as ideal, whatever it waits for.
    causes = [CAUSES[finding.cause] for finding in slow]
    costs_ns = [0 if is_launch_bound_job(finding) else round((finding.cost_ns or 0.0) * num_steps) for finding in slow]
    of_findings, stragglers_ns = [0] * len(slow), 0
    for part, part_ns in parts.items():
        sharing = [number for number, cause in enumerate(causes) if cause.part == part]
        for number, share_ns in zip(sharing, _shares([costs_ns[each] for each in sharing], part_ns), strict=True):
            of_findings[number] = share_ns
    for cause, ns in zip(causes, of_findings, strict=True):
        if cause.mended_at != "division":  # the cost of these stays in the imbalance
            parts[cause.part] -= ns
            stragglers_ns += ns
    return LostTime(num_steps, gpus, steps_ns, ideal_ns, stragglers_ns, **parts, of_findings=tuple(of_findings))


def lost_time_of_steps(run: Run, observed: ObservedProgram, slow: Sequence[Finding]) -> LostTime:
    """Divide the time of steps that are in memory, whose clocks agree; ``observed`` are those of ``run``."""
    _, steps, statistics = observed
    replayed = Replay.of(steps, statistics).replay(scenarios_of_lost_time(statistics))
    return lost_time(statistics, replayed, slow, run.world_size if on_gpu(run) else None)


def lost_findings(lost: LostTime, slow: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the parts of lost time without what the findings ``slow``, with which it was divided, take of them."""
    of_division = sum(ns for finding, ns in zip(slow, lost.of_findings, strict=True) if finding.cause in OF_DIVISION)
    for cause, name in PART_OF_LOSS.items():
        part_ns = (getattr(lost, name) - (of_division if name == "imbalance_ns" else 0)) / lost.num_steps
        yield Finding(
            id=finding_id(LOST, JOB, cause),
            kind=LOST,
            place=JOB,
            cause=cause,
            cost_ns=part_ns,
            share=part_ns * lost.num_steps / lost.steps_ns if lost.steps_ns else None,
            part_ns=part_ns,
            advice=advice(cause, 0, JOB),
        )


def _shares(costs_ns: Sequence[int], part_ns: int) -> list[int]:
    """Return the costs; if a part of lost time is less than all of them, that part, divided in proportion to them."""
    total_ns, part_ns = sum(costs_ns), max(part_ns, 0)
    if total_ns <= part_ns:
        return list(costs_ns)
    ends = [cost_ns * part_ns // total_ns for cost_ns in accumulate(costs_ns, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _ideal_work(table: WorkTable) -> Int64:
    """Return the duration of each kind of work on the quicker ranks, made equal over the stages."""
    work_ns = _typical_of_quicker_ranks(table)
    return equal_stages(table, work_ns, work_ns * table.count)


def _typical_of_quicker_ranks(table: WorkTable) -> Int64:
    """Return the lower quartile over ranks of the median of the same work on each rank."""
    work = table.entries.work
    if not len(work):
        return np.zeros(0, np.int64)
    medians = grouped_median(table.entry, table.work_ns, len(work))
    by_work = np.lexsort((medians, work))
    _, begins = sort_groups(work)
    size = np.diff(np.append(begins, len(work)))
    quartile = medians[by_work[begins + (size - 1) // 4]]
    return np.asarray(np.rint(quartile[work]), np.int64)
