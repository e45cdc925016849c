"""What a rank tells the others about the last few seconds: small enough to be published all the time.

>>> window = Window(rank)                                       # doctest: +SKIP
>>> window.add(summary)                                         # doctest: +SKIP
>>> report = window.close(number, now_ns)                       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from commtrace.live.declared import Count, Duration, Number, Rank, Text, WindowNumber
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.live.waits import NO_BLOCK, Block, BlockWaits
from commtrace.trace.spans import Int64

WORK: Final = ("compute", "data", "gc", "unknown")
"""What a rank's own time went to: forward, backward and recompute; input; garbage collection; anything else."""

_PHASES_OF_COMPUTE: Final = ("forward", "backward", "recompute")
_MOST_ROLES: Final = 6
_FEWEST_STEPS: Final = 2
"""One step tells nothing of its scatter: steps longer than a window are gathered over several."""

_MAD_TO_SIGMA: Final = 1.4826


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One rank in one window. Times are ns per step, means over the steps that ended in the window.

    Attributes:
        rank, host, stage: who; the pipeline stage is 0 where there is no pipeline.
        window: number of the window; windows of all ranks with one number are compared.
        steps: how many steps ended in it; all that follows is 0 where none did.
        last_step: the newest step that ended so far; −1 before the first.
        age_ns: how long ago it ended when this was made.
        duration_ns: of a step.
        work_ns: by the words of ``WORK``; waiting for other ranks is in none of them.
        error_ns: standard error of the sum of the work, from its scatter between the steps.
        exposed_ns: waiting and transfer by role, bubble as ``pp``; the largest few.
        checkpoint_ns: saving.
        on_gpu: whether it trains on one.
        phase: what it is in now in which no step ends: ``checkpoint``, ``evaluation``; else empty.
        ended: the rank has ended, and will report no more.
        exception: type of the one that nobody caught, if it ended for one; else empty.
        block: times in flight of the newest complete block of steps, for whoever finds the least of all ranks.
    """

    rank: Rank
    host: Text
    stage: Count
    window: WindowNumber
    steps: Count = 0
    last_step: Number = -1
    age_ns: Duration = 0
    duration_ns: Duration = 0
    work_ns: tuple[Duration, Duration, Duration, Duration] = (0, 0, 0, 0)
    error_ns: Duration = 0
    exposed_ns: Annotated[Mapping[Text, Duration], Meta(max_length=_MOST_ROLES)] = field(default_factory=dict)
    checkpoint_ns: Duration = 0
    on_gpu: bool = False
    phase: Text = ""
    ended: bool = False
    exception: Text = ""
    block: Block = NO_BLOCK

    @property
    def waiting_ns(self) -> int:
        """Standing still for others or for the network."""
        return sum(self.exposed_ns.values())


class Window:
    """Gathers the steps of a window. Not for several threads at a time.

    Attributes:
        waits: gathers them in blocks, too.
    """

    def __init__(self, rank: LiveRank) -> None:
        self.waits = BlockWaits()
        self._rank = rank
        self._steps: list[StepSummary] = []
        self._last_step = -1
        self._last_end_ns = 0

    def add(self, summary: StepSummary) -> None:
        """A step has ended."""
        self._steps.append(summary)
        self.waits.add(summary)
        self._last_step, self._last_end_ns = summary.step, summary.end_ns

    def close(self, number: int, now_ns: int) -> WindowReport:
        """The report of what was gathered, if that is more than one step; then gathering begins anew.

        Args:
            number: of the window.
            now_ns: monotonic.
        """
        steps: list[StepSummary] = []
        if len(self._steps) >= _FEWEST_STEPS:
            steps, self._steps = self._steps, []
        work = np.array([work_of(step) for step in steps], np.int64).reshape(len(steps), len(WORK))
        compute, data, garbage, unknown = (_mean(column) for column in work.T.tolist())
        return WindowReport(
            rank=self._rank.rank,
            host=self._rank.metadata.node,
            stage=int(self._rank.marks.coordinates.get("pp", 0)),
            window=number,
            steps=len(steps),
            last_step=self._last_step,
            age_ns=max(now_ns - self._last_end_ns, 0) if self._last_end_ns else 0,
            duration_ns=_mean([step.duration_ns for step in steps]),
            work_ns=(compute, data, garbage, unknown),
            error_ns=_standard_error(work.sum(axis=1)),
            exposed_ns=_exposed(steps),
            checkpoint_ns=_mean([step.checkpoint_ns for step in steps]),
            on_gpu=any(step.device is not None for step in steps),
            phase=self._rank.phase(),
            block=self.waits.newest,
        )


def work_of(step: StepSummary) -> tuple[int, ...]:
    """What the rank itself did in a step, ns, by the words of ``WORK``."""
    compute = sum(step.compute_ns.get(phase, 0) for phase in _PHASES_OF_COMPUTE)
    return compute, step.data_ns, step.gc_ns, step.work_ns - compute - step.data_ns - step.gc_ns


def _exposed(steps: Sequence[StepSummary]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for step in steps:
        for role, time in (*step.exposed_ns.items(), ("pp", step.bubble_ns)):
            totals[role] = totals.get(role, 0) + time
    largest = sorted(((time, role) for role, time in totals.items() if time), reverse=True)[:_MOST_ROLES]
    return {role: time // len(steps) for time, role in largest}


def _standard_error(values: Int64) -> int:
    """Of the mean; the scatter from the median deviation, so that one odd step does not blind the window."""
    if len(values) < 2:
        return 0
    deviation = float(np.median(np.abs(values - np.median(values))))
    return round(_MAD_TO_SIGMA * deviation / float(np.sqrt(len(values))))


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values) if values else 0
