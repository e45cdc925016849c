"""The work of a job's ranks in another run that was healthy, for when its own ranks do not show what is normal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commtrace.analysis.replay.step_statistics import LinkTraffic, StepStatistics
from commtrace.analysis.stragglers.limits import RECORDED, Thresholds
from commtrace.analysis.stragglers.normal import BASELINE, Usual
from commtrace.analysis.stragglers.slow_links import typical_transfers
from commtrace.analysis.stragglers.slow_ranks import typical_work_of_stages
from commtrace.analysis.stragglers.uneven_stages import quickest_of_stages
from commtrace.analysis.stragglers.work_statistics import WorkStatistics
from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class HealthyRun:
    """A run in which the job was healthy."""

    work_ns: Mapping[int, float]  # by stage, of its typical rank, per step
    quickest_ns: Mapping[int, float]  # by stage, of its quickest rank, per step in forward and backward
    transfer_ns: Mapping[LinkTraffic, float]  # typical transfers

    @classmethod
    def of(cls, run: Run, statistics: StepStatistics) -> HealthyRun:
        work = WorkStatistics.of(run, statistics, Thresholds())
        return cls(typical_work_of_stages(work), _quickest(work), typical_transfers(work))

    @property
    def usual(self) -> Usual:
        """Return the usual work of stages and transfers over links."""
        return Usual(self.quickest_ns, self.transfer_ns, BASELINE)

    def of_ranks(self, work: WorkStatistics) -> dict[int, float]:
        """Return the normal work of each rank of another run, by its stage."""
        return {rank: self.work_ns[stage] for rank, stage in work.stage_of_rank.items() if stage in self.work_ns}

    def difference(self, work: WorkStatistics) -> str:
        """Say how the work of a run without slow ranks differs from this one's; empty if it does not."""
        work_ns, healthy_ns = typical_work_of_stages(work), self.work_ns
        if work_ns.keys() != healthy_ns.keys():
            stages = (
                f"{len(stages_ns)} pipeline stage{'s' * (len(stages_ns) != 1)}" for stages_ns in (healthy_ns, work_ns)
            )
            return f"The baseline does not fit this run: it has {next(stages)}, and this run {next(stages)}."
        if not any(work_ns.values()):  # no two ranks do the same work
            work_ns, healthy_ns = _quickest(work), self.quickest_ns
        works, usual = sum(work_ns.values()), sum(healthy_ns.values())
        if abs(works - usual) <= RECORDED.clearly * usual:
            return ""
        both = f"{works / len(work_ns) / 1e6:.1f} against {usual / len(work_ns) / 1e6:.1f} ms per step"
        if works > usual:
            return (
                f"All ranks work longer than in the baseline, by {works / usual - 1:.0%} ({both}): none is slower than "
                "the others. They have more to do, or what they share is slower (power, clocks, software): `commtrace "
                "compare` of both runs says which phase it is."
            )
        return (
            f"All ranks work less than in the baseline, by {1 - works / usual:.0%} ({both}): it has more to do, or was "
            "slow itself, and cannot serve as a baseline."
        )


def _quickest(work: WorkStatistics) -> dict[int, float]:
    return dict(zip(*(column.tolist() for column in quickest_of_stages(work)), strict=True))
