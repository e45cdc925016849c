"""Statistics of the work of a run: what each rank did in each step.

Everything that decides who is slow takes these, and no dependency graph; :mod:`.scenarios` says what steps would take
without it. Statistics of consecutive parts of a run add up to those of the whole:

>>> whole = StepStatistics.of(run, first) + StepStatistics.of(run, second)  # doctest: +SKIP
>>> work = WorkStatistics.of(run, whole, Thresholds())                      # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from commtrace.analysis.replay.program import Program, stage_of
from commtrace.analysis.replay.segments import Segments
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.analysis.stragglers.peers import Entries, PeerComparison, WorkTable, compare_with_peers
from commtrace.analysis.stragglers.transfers import TransferTable
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

DATA: Final = "data"
GC: Final = "gc"
CHECKPOINT: Final = "checkpoint"
EVALUATION: Final = "evaluation"
PAUSES: Final = (DATA, GC, CHECKPOINT, EVALUATION)
"""What has spans of its own and is no work."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """The work, pauses and transfers of all ranks in some steps.

    Attributes:
        ranks, steps: their numbers, ascending.
        measured_ns: of each step, the mean over the ranks.
        replayed_ns: of each step, with the measured durations.
        pauses_ns: by cause, one of PAUSES, shape (ranks, steps).
    """

    ranks: Int64
    steps: Int64
    measured_ns: Int64
    replayed_ns: Int64
    table: WorkTable
    pauses_ns: Mapping[str, Int64]
    transfers: TransferTable

    @classmethod
    def of(cls, run: Run, program: Program) -> StepStatistics:
        segments = program.segments
        shape = len(program.ranks), len(program.steps)
        cell = np.searchsorted(program.ranks, segments.rank) * shape[1] + segments.step

        def by_step(values_ns: Int64) -> Int64:
            return np.bincount(cell, values_ns, minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)

        return cls(
            ranks=program.ranks,
            steps=program.steps,
            measured_ns=program.measured_step_times(),
            replayed_ns=program.step_times(),
            table=WorkTable.of(segments),
            pauses_ns={cause: by_step(pause_ns(segments, cause)) for cause in PAUSES},
            transfers=TransferTable.of(run, program.transfers),
        )

    def __add__(self, other: StepStatistics) -> StepStatistics:
        """Return the statistics of these steps and of those that follow them, of the same ranks."""
        own, others = self.table, replace(other.table, step=other.table.step + np.int32(len(self.steps)))
        table = WorkTable(
            *(np.concatenate([getattr(own, one.name), getattr(others, one.name)]) for one in fields(WorkTable))
        )
        return StepStatistics(
            ranks=self.ranks,
            steps=np.concatenate([self.steps, other.steps]),
            measured_ns=np.concatenate([self.measured_ns, other.measured_ns]),
            replayed_ns=np.concatenate([self.replayed_ns, other.replayed_ns]),
            table=table,
            pauses_ns={cause: np.hstack([self.pauses_ns[cause], other.pauses_ns[cause]]) for cause in PAUSES},
            transfers=self.transfers.followed_by(other.transfers, len(self.steps)),
        )


@dataclass(frozen=True, slots=True)
class WorkStatistics:
    """The statistics of a run, of which some steps count.

    Attributes:
        run: the ranks, on one clock.
        of_steps: of all steps of the run.
        steady: which of them count: all but the first one of the job, the warm-up, if there are others.
        entries: the kinds of work of every rank.
        entry: of each row of the table.
        peers: comparison of the work in the steps that count with that of the peers.
    """

    run: Run
    thresholds: Thresholds
    of_steps: StepStatistics
    steady: Bool
    stage_of_rank: Mapping[int, int]
    entries: Entries
    entry: Int64
    peers: PeerComparison

    @classmethod
    def of(cls, run: Run, of_steps: StepStatistics, thresholds: Thresholds) -> WorkStatistics:
        steady = warmed_up(run, of_steps)
        entries, entry = of_steps.table.entries()
        peers = compare_with_peers(of_steps.table, entries, entry, steady)
        stages = {rank: stage_of(trace) for rank, trace in run.ranks.items()}
        return cls(run, thresholds, of_steps, steady, stages, entries, entry, peers)

    def within(self, steps: Bool) -> WorkStatistics:
        """Return the statistics of those of these steps that count."""
        steady = self.steady & steps
        peers = compare_with_peers(self.of_steps.table, self.entries, self.entry, steady)
        return replace(self, steady=steady, peers=peers)

    @property
    def table(self) -> WorkTable:
        return self.of_steps.table

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
        """Return whether there are enough steps to tell what is slow from what scatters."""
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
        """Return what ranks lost to one of PAUSES in each step that counts, shape (ranks, steps)."""
        return self.of_steps.pauses_ns[cause][:, self.steady].astype(np.float64)

    def pauses_ns_of_run(self, cause: str) -> Float64:
        """Return the same for all steps of the run but the warm-up, also where this is one of its stretches."""
        counted = warmed_up(self.run, self.of_steps)
        return self.of_steps.pauses_ns[cause][:, counted].astype(np.float64)

    def by_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a value of the rows of the table, by rank and step that counts."""
        return self.by_every_step(values)[:, self.steady]

    def by_every_step(self, values: Int64 | Float64) -> Float64:
        """Return sums of a value of the rows of the table, by rank and step of the run."""
        steps = len(self.of_steps.steps)
        cell = np.searchsorted(self.ranks, self.table.rank) * steps + self.table.step
        sums = np.bincount(cell, values, minlength=len(self.ranks) * steps)
        return np.asarray(sums.reshape(-1, steps), np.float64)

    def beyond_stage(self, values_ns: Float64) -> Float64:
        """Return how much more each rank has, in each step that counts, than the typical rank of its stage."""
        stage = self.stages
        beyond = np.zeros_like(values_ns)
        for one in np.unique(stage):
            beyond[stage == one] = values_ns[stage == one] - np.median(values_ns[stage == one], axis=0)
        return beyond

    @property
    def stages(self) -> Int64:
        return np.array([self.stage_of_rank[rank] for rank in self.ranks.tolist()], np.int64)


def pause_ns(segments: Segments, cause: str) -> Int64:
    return {
        DATA: segments.data_ns,
        GC: segments.gc_ns,
        CHECKPOINT: segments.checkpoint_ns,
        EVALUATION: segments.evaluation_ns,
    }[cause]


def warmed_up(run: Run, of_steps: StepStatistics) -> Bool:
    """Return which steps count: all but the first one of the job, if there are others."""
    first = min(trace.first_step for trace in run.ranks.values())
    return np.asarray((of_steps.steps > first) | (len(of_steps.steps) == 1))
