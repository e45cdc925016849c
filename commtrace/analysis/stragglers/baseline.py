"""What the ranks of a job work where it is well: another run, for when its own ranks cannot tell what is normal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commtrace.analysis.replay_program import Program
from commtrace.analysis.straggler_costs import Bench
from commtrace.analysis.stragglers.limits import Thresholds
from commtrace.analysis.stragglers.slow_ranks import typical_work_of_stages
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run in which the job was well.

    Attributes:
        work_ns: by pipeline stage, what its typical rank works per step.
    """

    work_ns: Mapping[int, float]

    @classmethod
    def of(cls, run: Run, program: Program) -> Baseline:
        return cls(typical_work_of_stages(Bench.of(run, program, Thresholds())))

    def of_ranks(self, bench: Bench) -> dict[int, float]:
        """By rank of another run, what is normal at its stage; without the stages that this one lacks."""
        return {rank: self.work_ns[stage] for rank, stage in bench.stage_of_rank.items() if stage in self.work_ns}
