"""The price of a suspicion: what every step would save, and whether that stands out of the noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from commtrace.analysis.breakdown.occurrence import Occurrence, occurrence
from commtrace.analysis.replay.peers import Float64, PeerComparison, compare_with_peers
from commtrace.analysis.replay.program import Program, stage_of
from commtrace.analysis.statistics import ERROR_OF_MEDIAN, QUARTILES_APART
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64


class Cost(NamedTuple):
    """The time that a fix would save.

    Attributes:
        ms: per step, typically.
        share: of the step.
        standard_error_ms: of ``ms``, from how the savings scatter over steps.
        persistence: share of the steps that save at least half of ``ms``.
        when: in which steps most of it is saved.
    """

    ms: float
    share: float
    standard_error_ms: float
    persistence: float
    when: Occurrence


@dataclass(frozen=True, slots=True)
class Bench:
    """A program with what every search needs.

    Attributes:
        steady: which steps count: all but the first one of the job, the warm-up, if there are others.
        counted: which segments lie in them.
        actual_ns: replayed steps with the measured durations.
        step_ns: the typical measured step.
        replay_error: typical difference between the two, as a share.
        work: comparison of the working time of segments with that of the peers.
    """

    run: Run
    program: Program
    thresholds: Thresholds
    steady: Bool
    counted: Bool
    actual_ns: Int64
    stage_of_rank: Mapping[int, int]
    step_ns: float
    replay_error: float
    work: PeerComparison

    @classmethod
    def of(cls, run: Run, program: Program, thresholds: Thresholds) -> Bench:
        first = min(trace.first_step for trace in run.ranks.values())
        steady = (program.steps > first) | (len(program.steps) == 1)
        counted = steady[program.segments.step]
        measured, actual = program.measured_step_times(), program.step_times()
        return cls(
            run=run,
            program=program,
            thresholds=thresholds,
            steady=steady,
            counted=counted,
            actual_ns=actual,
            stage_of_rank={rank: stage_of(trace) for rank, trace in run.ranks.items()},
            step_ns=float(np.median(measured[steady])),
            replay_error=float(np.median((np.abs(actual - measured) / np.maximum(measured, 1))[steady])),
            work=compare_with_peers(program.segments, program.segments.work_ns, counted, program.work),
        )

    @property
    def num_steps(self) -> int:
        """Return how many steps count."""
        return int(self.steady.sum())

    @property
    def noise_is_known(self) -> bool:
        """Return whether there are enough steps to tell what is slow from what scatters."""
        return self.num_steps >= self.thresholds.fewest_steps

    def within(self, steps: Bool) -> Bench:
        """Return the same for a stretch of the run: these of the steps that count."""
        steady = self.steady & steps
        counted = steady[self.program.segments.step]
        return replace(
            self,
            steady=steady,
            counted=counted,
            step_ns=float(np.median(self.program.measured_step_times()[steady])),
            work=compare_with_peers(self.program.segments, self.program.segments.work_ns, counted, self.program.work),
        )

    def saved_ns(self, segment_ns: Int64 | None, transfer_ns: Int64 | None = None) -> Int64:
        """Return what each step of the program would save with these durations."""
        return np.asarray(self.actual_ns - self.program.step_times(segment_ns, transfer_ns))

    def cost(self, segment_ns: Int64 | None, transfer_ns: Int64 | None = None, *, rare: bool = False) -> Cost:
        """Return what the steps would save with these durations; the mean over steps for what strikes now and then."""
        return self.cost_of(self.saved_ns(segment_ns, transfer_ns), rare=rare)

    def cost_of(self, saved_ns: Int64, *, rare: bool = False) -> Cost:
        """Return the cost of what would save so much of each step of the program."""
        saved = saved_ns[self.steady] / 1e6
        typical = float(saved.mean() if rare else np.median(saved))
        persistence = float((saved >= max(typical, 1e-6) / 2).mean())
        if not rare and persistence:
            # Steps in which it costs nothing count, single ones that the machine held up do not.
            typical = float(np.median(saved[saved >= max(typical, 1e-6) / 2])) * persistence
        return Cost(
            ms=typical,
            share=typical * 1e6 / self.step_ns,
            standard_error_ms=ERROR_OF_MEDIAN * robust_sigma(saved) / np.sqrt(len(saved)),
            persistence=persistence,
            when=occurrence(self.program.steps[self.steady].tolist(), saved * 1e6),
        )

    def passes(self, cost: Cost, *, rare: bool = False, meant: bool = False) -> bool:
        """Return whether a cost is large, lasting, and stands out of its own noise.

        Args:
            cost: of the fix.
            rare: it strikes now and then, and has spans of its own.
            meant: the program does it on purpose, so that it is no chance even if it happens once.
        """
        limits = self.thresholds
        if cost.ms < limits.cost_ms or cost.share < limits.share_of_step:
            return False
        if meant:
            return True
        if rare:
            often = len(cost.when.steps) >= limits.fewest_strikes or not self.noise_is_known
            return often and cost.persistence >= limits.rare_persistence
        return cost.persistence >= limits.majority and cost.ms >= limits.standard_errors * cost.standard_error_ms

    def gpu_hours_per_day(self, cost: Cost) -> float:
        """Device hours that a day of the job would save."""
        return cost.share * 24 * self.run.world_size


def robust_sigma(values: Float64) -> float:
    """Standard deviation estimated from the quartiles: single outliers do not count, two equal camps do."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / QUARTILES_APART
