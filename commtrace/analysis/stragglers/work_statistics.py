"""Statistics of the work of a run by rank and step, compared with the same work (stage, chunk, phase) of peers.

All searches for stragglers are based on them.

>>> WorkStatistics.of(run, StepStatistics.of(run, program), Thresholds())  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.segments import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from commtrace.analysis.replay.step_statistics import Entries, StepStatistics, WorkTable
from commtrace.analysis.statistics import Float64, grouped_median, leave_one_out_median
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

PHASES: Final = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
"""Kinds of work by the cause that names one of them as the only slow one."""

_USUAL: Final = 0.5
"""Work that a rank does less often per step is no part of every step."""


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """Typical durations of every kind of work on every rank, and of the same work on its peers.

    The last entries are work that others of a stage do and a rank does not: it takes no time.
    """

    rank: Int64
    kind: Int64
    work: Int64  # equal for the same work on different ranks
    own_ns: Float64  # median over steps of the mean over microbatches
    peer_ns: Float64  # median of ``own_ns`` over other ranks, or the normal ones (see among); NaN without
    per_step: Float64  # how often a step has this work, in the mean

    def among(self, normal: Int64) -> PeerComparison:
        """Return the comparison with these ranks only, where one of them does the same work."""
        is_normal = np.isin(self.rank, normal) & np.isfinite(self.own_ns)
        peer = np.full(len(self.own_ns), np.nan)
        peer[is_normal] = leave_one_out_median(self.work[is_normal], self.own_ns[is_normal])
        medians = grouped_median(self.work[is_normal], self.own_ns[is_normal], int(self.work.max(initial=-1)) + 1)
        peer[~is_normal] = medians[self.work[~is_normal]]
        return replace(self, peer_ns=np.where(np.isnan(peer), self.peer_ns, peer))

    def from_typical_ns(self) -> dict[int, float]:
        """Return, by rank, its excess per step over the median of all ranks, summed over kinds of work."""
        several = np.isfinite(self.peer_ns) & np.isfinite(self.own_ns)
        groups = int(self.work.max(initial=-1)) + 1
        typical = grouped_median(self.work[several], self.own_ns[several], groups)
        beyond = np.where(several, (self.own_ns - typical[self.work]) * self.per_step, 0.0)
        totals = np.bincount(self.rank, beyond, minlength=int(self.rank.max(initial=-1)) + 1)
        return {rank: float(totals[rank]) for rank in np.unique(self.rank).tolist()}

    @property
    def ratio(self) -> Float64:
        """Return the share of its time that each entry would take at the speed of the peers."""
        comparable = (self.own_ns > 0) & np.isfinite(self.peer_ns)
        ratio = np.ones(len(self.own_ns))
        ratio[comparable] = self.peer_ns[comparable] / self.own_ns[comparable]
        return ratio

    @property
    def usual_ns(self) -> Float64:
        """Return the time of the peers per step for each entry; 0 without peers."""
        return np.nan_to_num(self.peer_ns * self.per_step)

    @property
    def excess_ns(self) -> Float64:
        """Return the excess of each entry over the peers per step; 0 without peers."""
        return np.asarray(np.nan_to_num(self.own_ns - self.peer_ns) * self.per_step)


def compare_with_peers(table: WorkTable, steps: Bool) -> PeerComparison:
    """Compare the work of every rank in some steps with the same work on the other ranks."""
    entries, counted = table.entries, np.flatnonzero(steps[table.step])
    entry, step = table.entry[counted], table.step[counted]
    cells, cell = grouped(pack([entry, step]))
    cell_entry = entry[cells]
    size = np.bincount(cell, minlength=len(cells))
    mean = np.bincount(cell, table.work_ns[counted], minlength=len(cells)) / np.maximum(size, 1)
    own = grouped_median(cell_entry, mean, len(entries.rank))
    per_step = np.bincount(cell_entry, size, minlength=len(entries.rank)) / max(len(np.unique(step)), 1)
    rank, kind, stage = (column.astype(np.int64) for column in (entries.rank, entries.kind, entries.stage))
    work = entries.work
    pauses = _pauses_of_others(rank, stage, kind, work, per_step)
    own = np.concatenate([own, np.zeros(len(pauses.rank))])
    work = np.concatenate([work, pauses.work])
    return PeerComparison(
        rank=np.concatenate([rank, pauses.rank]),
        kind=np.concatenate([kind, pauses.kind]),
        work=work,
        own_ns=own,
        peer_ns=leave_one_out_median(work, own),
        per_step=np.concatenate([per_step, pauses.per_step]),
    )


class _Pauses(NamedTuple):
    """Work that takes no time on a rank; one row per rank and work."""

    rank: Int64
    kind: Int64
    work: Int64
    per_step: Float64


def _pauses_of_others(rank: Int64, stage: Int64, kind: Int64, work: Int64, per_step: Float64) -> _Pauses:
    """Return the work between two phases that only some ranks of a stage do, for its other ranks."""
    # A pause of 0 ns is no segment: a rank whose host launches late would have nothing to compare its pause with.
    usual = np.flatnonzero((kind >= BETWEEN) & (per_step > _USUAL))
    usual = usual[np.unique(work[usual], return_index=True)[1]]
    ranks, at = np.unique(rank, return_index=True)
    which, other = np.nonzero(stage[usual][:, np.newaxis] == stage[at])
    which, other = usual[which], ranks[other]
    key = pack([np.concatenate([work[which], work]), np.concatenate([other, rank])])
    missing = ~np.isin(key[: len(which)], key[len(which) :])
    which = which[missing]
    return _Pauses(other[missing], kind[which], work[which], per_step[which])


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

    def between_ns(self, cause: str) -> Float64:
        """Return the pauses of one kind between each step that counts and the one before, shape (ranks, steps)."""
        known = self.of_steps.between.pauses_ns.get(cause)
        return (
            np.zeros((len(self.ranks), self.num_steps)) if known is None else known[:, self.steady].astype(np.float64)
        )

    def pauses_ns_of_run(self, cause: str) -> Float64:
        """Return the pauses in all steps of the run but the warm-up, even if this is one of its stretches."""
        counted = warmed_up(self.run, self.of_steps)
        return self.of_steps.pauses_ns[cause][:, counted].astype(np.float64)

    def by_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a column of the table, shape (ranks, steps that count)."""
        return self.of_steps.by_rank_and_step(values)[:, self.steady]

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
