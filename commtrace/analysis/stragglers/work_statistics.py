"""Statistics of the work of a run by rank and step, which all searches for stragglers are based on.

>>> WorkStatistics.of(run, StepStatistics.of(run, program), Thresholds())  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from commtrace.analysis.replay.step_statistics import Entries, StepStatistics, WorkTable
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.analysis.stragglers.peers import PeerComparison, compare_with_peers
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64


@dataclass(frozen=True, slots=True)
class WorkStatistics:
    """The statistics of a run, of which some steps count."""

    run: Run  # on one clock
    thresholds: Thresholds
    of_steps: StepStatistics  # of all steps of the run
    steady: Bool  # the steps that count: all but the first one of the job, the warm-up, if there are others
    stage_of_rank: Mapping[int, int]
    peers: PeerComparison  # of the steps that count

    @classmethod
    def of(cls, run: Run, of_steps: StepStatistics, thresholds: Thresholds) -> WorkStatistics:
        steady = warmed_up(run, of_steps)
        stages = dict(zip(of_steps.ranks.tolist(), of_steps.stages.tolist(), strict=True))
        return cls(run, thresholds, of_steps, steady, stages, compare_with_peers(of_steps.table, steady))

    def within(self, steps: Bool) -> WorkStatistics:
        """Return the statistics of those of these steps that count."""
        steady = self.steady & steps
        return replace(self, steady=steady, peers=compare_with_peers(self.table, steady))

    @property
    def table(self) -> WorkTable:
        return self.of_steps.table

    @property
    def entries(self) -> Entries:
        """Return the kinds of work of every rank."""
        return self.table.entries

    @property
    def counted(self) -> Bool:
        """Return which rows of the table lie in the steps that count."""
        return self.steady[self.table.step]

    @property
    def ranks(self) -> Int64:
        return self.of_steps.ranks

    @property
    def steps(self) -> Int64:
        """Return the numbers of the steps that count."""
        return self.of_steps.steps[self.steady]

    @property
    def num_steps(self) -> int:
        return int(self.steady.sum())

    @property
    def noise_is_known(self) -> bool:
        """Return whether there are enough steps to separate slow ranks from noise."""
        return self.num_steps >= self.thresholds.fewest_steps

    @property
    def step_ns(self) -> float:
        return float(np.median(self.of_steps.measured_ns[self.steady]))

    @property
    def mean_step_ns(self) -> float:
        return float(self.of_steps.measured_ns[self.steady].mean())

    @property
    def replay_error(self) -> float:
        """Return the typical difference of replayed and measured steps, as a share."""
        measured, replayed = self.of_steps.measured_ns, self.of_steps.replayed_ns
        return float(np.median((np.abs(replayed - measured) / np.maximum(measured, 1))[self.steady]))

    @property
    def work_ns(self) -> Float64:
        """Return the work of every rank in every step that counts, shape (ranks, steps)."""
        return self.by_step(self.table.work_ns)

    def pauses_ns(self, cause: str) -> Float64:
        """Return the pauses of one kind of PAUSES in each step that counts, shape (ranks, steps)."""
        return self.of_steps.pauses_ns[cause][:, self.steady].astype(np.float64)

    def pauses_ns_of_run(self, cause: str) -> Float64:
        """Return the pauses in all steps of the run but the warm-up, even if this is one of its stretches."""
        counted = warmed_up(self.run, self.of_steps)
        return self.of_steps.pauses_ns[cause][:, counted].astype(np.float64)

    def by_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a column of the table, shape (ranks, steps that count)."""
        return self.by_every_step(values)[:, self.steady]

    def by_every_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a column of the table, shape (ranks, steps of the run)."""
        steps = len(self.of_steps.steps)
        cell = np.searchsorted(self.ranks, self.table.rank) * steps + self.table.step
        sums = np.bincount(cell, values, minlength=len(self.ranks) * steps)
        return np.asarray(sums.reshape(-1, steps), np.float64)

    def beyond_stage(self, values_ns: Float64) -> Float64:
        """Return the values of each rank beyond the median of its stage, in each step that counts."""
        stage = self.stages
        beyond = np.zeros_like(values_ns)
        for one in np.unique(stage):
            beyond[stage == one] = values_ns[stage == one] - np.median(values_ns[stage == one], axis=0)
        return beyond

    @property
    def stages(self) -> Int64:
        return np.array([self.stage_of_rank[rank] for rank in self.ranks.tolist()], np.int64)


def warmed_up(run: Run, of_steps: StepStatistics) -> Bool:
    """Return which steps count: all but the first one of the job, if there are others."""
    first = min(trace.first_step for trace in run.ranks.values())
    return np.asarray((of_steps.steps > first) | (len(of_steps.steps) == 1))
