"""Sums over the steps of a run: everything that a summary needs without a replay.

>>> step_totals(analyse("commtrace-runs/my-run")).means(run)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commtrace.analysis.breakdown.critical_path import CriticalPath, critical_path
from commtrace.analysis.breakdown.modules import ModuleTime, add_modules, module_table
from commtrace.analysis.breakdown.rank_means import RankMean, RankTotals
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.table import CommunicationSums, communication_sums
from commtrace.analysis.communication.unmatched import UnmatchedSums, sum_unmatched
from commtrace.analysis.matching.coverage import Captured, find_captured
from commtrace.analysis.pipeline.observed import PipelineTotals, pipeline_totals
from commtrace.analysis.problems import StepNumbers, find_step_numbers
from commtrace.analysis.stragglers.awaited import AwaitedTotals, awaited_totals
from commtrace.analysis.time_totals import SummedSteps, add_ranks, means_of_ranks, totals_of_ranks
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over some steps. Totals of several windows of a run add up to those of the run."""

    steps: SummedSteps
    ranks: Mapping[int, RankTotals]
    critical_path: CriticalPath | None  # None without steps or common clocks
    communication: CommunicationSums
    unmatched: UnmatchedSums
    modules: tuple[ModuleTime, ...]  # longest first
    captured: Captured
    awaited: AwaitedTotals
    numbers: StepNumbers
    pipeline: PipelineTotals

    def __add__(self, later: StepTotals) -> StepTotals:
        path, later_path = self.critical_path, later.critical_path
        return StepTotals(
            steps=self.steps + later.steps,
            ranks=add_ranks(self.ranks, later.ranks),
            critical_path=None if path is None or later_path is None else path.plus(later_path),
            communication=self.communication + later.communication,
            unmatched=self.unmatched + later.unmatched,
            modules=tuple(add_modules(self.modules, later.modules)),
            captured=self.captured + later.captured,
            awaited=self.awaited + later.awaited,
            numbers=self.numbers + later.numbers,
            pipeline=self.pipeline + later.pipeline,
        )

    def means(self, run: Run) -> list[RankMean]:
        """Return the mean step of every rank that has steps; ``run`` describes the ranks."""
        return means_of_ranks(run, self.ranks, self.steps.states)


def step_totals(analysis: Analysis) -> StepTotals:
    """Add up the steps that count."""
    context, times = analysis.context, analysis.partition
    unmatched = sum_unmatched(context, times)
    return StepTotals(
        steps=SummedSteps.of(times),
        ranks=totals_of_ranks(analysis, unmatched),
        critical_path=critical_path(context, analysis.alignment) if analysis.steps.used else None,
        communication=communication_sums(context.run, context.matches, times, context.roles, context.steps),
        unmatched=unmatched,
        modules=tuple(module_table(context.run, times, context.steps)),
        captured=find_captured(analysis.run, analysis.roles, context.steps),
        awaited=awaited_totals(context),
        numbers=find_step_numbers(context),
        pipeline=pipeline_totals(analysis.run, analysis.matches, analysis.roles),
    )
