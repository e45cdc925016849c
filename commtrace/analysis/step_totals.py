"""Sums over the steps of a run: what a summary needs without a replay, but for stragglers.

>>> step_totals(analyse("commtrace-runs/my-run")).means(run)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from commtrace.analysis.breakdown.critical_path import CriticalPath, critical_path
from commtrace.analysis.breakdown.modules import ModuleTime, add_modules, module_table
from commtrace.analysis.breakdown.partition import Partition, concatenate
from commtrace.analysis.breakdown.rank_means import RankMean, RankTotals, rank_totals
from commtrace.analysis.breakdown.states import State
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth_by_size import BandwidthBySize, bandwidth_by_size
from commtrace.analysis.communication.table import CommunicationSums, UnmatchedSums, communication_sums, sum_unmatched
from commtrace.analysis.matching.coverage import Captured, find_captured
from commtrace.analysis.pipeline.observed import PipelineTotals, pipeline_totals
from commtrace.analysis.problems import StepNumbers, find_step_numbers
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class SummedSteps:
    """The time of some steps by state, summed over the ranks."""

    states: tuple[State, ...]  # columns of ``ns``
    step: Int64  # numbers
    ns: Int64  # steps × states
    num_ranks: int

    @classmethod
    def of(cls, partition: Partition) -> SummedSteps:
        step, which = np.unique(partition.step, return_inverse=True)
        ns = np.zeros((len(step), len(partition.states)), np.int64)
        np.add.at(ns, which.reshape(-1), partition.ns)
        return cls(partition.states, step.astype(np.int64), ns, len(np.unique(partition.rank)))

    @classmethod
    def joined(cls, parts: Sequence[SummedSteps]) -> SummedSteps:
        """Return the steps of all parts, which are of the same ranks."""
        return cls(
            parts[0].states,
            np.concatenate([part.step for part in parts]),
            np.concatenate([part.ns for part in parts]),
            max(part.num_ranks for part in parts),
        )

    def total(self, kind: str, detail: str | None = None) -> Int64:
        """Return the time of each step in the states of a kind, or in one phase or role of it."""
        chosen = [
            column for column, state in enumerate(self.states) if state.kind == kind and detail in (None, state.detail)
        ]
        return np.asarray(self.ns[:, chosen].sum(axis=1))


@dataclass(frozen=True, slots=True)
class TimeTotals:
    """The time of some steps by state."""

    parts: tuple[Partition, ...]  # each of some of the steps, without ``stalled_ns``
    ranks: Mapping[int, RankTotals]  # sums over the steps

    def __add__(self, other: TimeTotals) -> TimeTotals:
        return TimeTotals(self.parts + other.parts, add_ranks(self.ranks, other.ranks))

    def partition(self) -> Partition:
        """Return the partition of all of the steps."""
        return concatenate(self.parts)

    def means(self, run: Run) -> list[RankMean]:
        """Return the mean step of every rank that has steps; ``run`` describes the ranks."""
        return means_of_ranks(run, self.ranks, self.parts[0].states)


def means_of_ranks(run: Run, ranks: Mapping[int, RankTotals], states: Sequence[State]) -> list[RankMean]:
    """Return the mean step of every rank that has steps; ``run`` describes the ranks."""
    return [totals.mean(run.ranks[rank], states) for rank, totals in ranks.items() if totals.num_steps]


def add_ranks(ranks: Mapping[int, RankTotals], more: Mapping[int, RankTotals]) -> dict[int, RankTotals]:
    """Add the sums of the same ranks over other steps."""
    return {rank: totals + more[rank] for rank, totals in ranks.items()}


def time_totals(analysis: Analysis) -> TimeTotals:
    """Divide the time of the steps that count."""
    times = analysis.partition
    return TimeTotals((replace(times, stalled_ns={}),), totals_of_ranks(analysis))


def totals_of_ranks(analysis: Analysis, unmatched: UnmatchedSums | None = None) -> dict[int, RankTotals]:
    """Add up the steps that count, by rank; ``unmatched`` is of these, if it is known already."""
    times = analysis.partition
    unmatched = unmatched or sum_unmatched(analysis.context, times)
    return rank_totals(analysis.run, times, analysis.matches, unmatched.ranks)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over some steps. Totals of several windows of a run add up to those of the run."""

    parts: tuple[SummedSteps, ...]  # of consecutive steps
    ranks: Mapping[int, RankTotals]
    critical_path: CriticalPath | None  # None without steps or common clocks
    communication: CommunicationSums
    bandwidth: BandwidthBySize
    unmatched: UnmatchedSums
    modules: tuple[ModuleTime, ...]  # longest first
    captured: Captured
    numbers: StepNumbers
    pipeline: PipelineTotals

    def __add__(self, later: StepTotals) -> StepTotals:
        path, later_path = self.critical_path, later.critical_path
        return StepTotals(
            parts=self.parts + later.parts,
            ranks=add_ranks(self.ranks, later.ranks),
            critical_path=None if path is None or later_path is None else path.plus(later_path),
            communication=self.communication + later.communication,
            bandwidth=self.bandwidth + later.bandwidth,
            unmatched=self.unmatched + later.unmatched,
            modules=tuple(add_modules(self.modules, later.modules)),
            captured=self.captured + later.captured,
            numbers=self.numbers + later.numbers,
            pipeline=self.pipeline + later.pipeline,
        )

    def means(self, run: Run) -> list[RankMean]:
        """Return the mean step of every rank that has steps; ``run`` describes the ranks."""
        return means_of_ranks(run, self.ranks, self.parts[0].states)

    @property
    def steps(self) -> SummedSteps:
        """Return the time of each step; parts are joined anew each time."""
        return SummedSteps.joined(self.parts)


def step_totals(analysis: Analysis, numbers: StepNumbers | None = None) -> StepTotals:
    """Add up the steps that count; ``numbers`` are theirs, if they were compared before."""
    context, times, alignment = analysis.context, analysis.partition, analysis.alignment
    unmatched = sum_unmatched(context, times)
    return StepTotals(
        parts=(SummedSteps.of(times),),
        ranks=totals_of_ranks(analysis, unmatched),
        critical_path=critical_path(context, analysis.alignment) if analysis.steps.used else None,
        communication=communication_sums(context.run, context.matches, times, context.roles, context.steps),
        bandwidth=bandwidth_by_size(context, times, 0 if alignment.refused else alignment.residual_ns["p99"]),
        unmatched=unmatched,
        modules=tuple(module_table(context.run, times, context.steps)),
        captured=find_captured(analysis.run, analysis.roles, context.steps),
        numbers=numbers or find_step_numbers(context),
        pipeline=pipeline_totals(analysis.run, analysis.matches, analysis.roles),
    )
