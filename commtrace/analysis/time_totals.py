"""Divide the time of some steps, by rank; totals of several windows add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from commtrace.analysis.breakdown.partition import Partition, concatenate
from commtrace.analysis.breakdown.rank_means import RankMean, RankTotals, rank_totals
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.unmatched import UnmatchedSums, sum_unmatched
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class TimeTotals:
    """The time of some steps by state."""

    parts: tuple[Partition, ...]  # each of some of the steps, without ``stalled_ns``
    ranks: Mapping[int, RankTotals]  # sums over the steps

    def __add__(self, other: TimeTotals) -> TimeTotals:
        return TimeTotals(self.parts + other.parts, {rank: own + other.ranks[rank] for rank, own in self.ranks.items()})

    def partition(self) -> Partition:
        """Return the partition of all of the steps."""
        return concatenate(self.parts)

    def means(self, run: Run) -> list[RankMean]:
        """Return the mean step of every rank that has steps; ``run`` describes the ranks."""
        states = self.parts[0].states
        return [own.mean(run.ranks[rank], states) for rank, own in self.ranks.items() if own.num_steps]


def time_totals(analysis: Analysis, unmatched: UnmatchedSums | None = None) -> TimeTotals:
    """Divide the time of the steps that count; ``unmatched`` is of these, if it is known already."""
    times = analysis.partition
    unmatched = unmatched or sum_unmatched(analysis.context, times)
    ranks = rank_totals(analysis.run, times, analysis.matches, unmatched.ranks)
    return TimeTotals((replace(times, stalled_ns={}),), ranks)
