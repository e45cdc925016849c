"""Reports of a rank on the last few seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta

from commtrace.analysis.matching.stages import MOST_GROUPS, Flow
from commtrace.analysis.statistics import sigma_of_deviations
from commtrace.analysis.stragglers.costs import occurrence
from commtrace.analysis.stragglers.places import tensor_group_of
from commtrace.findings.causes import PAUSES
from commtrace.findings.own_cost import OwnCost
from commtrace.findings.status import MOST_MEANS, JobMeans
from commtrace.live.monitoring.job_steps import MOST_REPORTED, RankStep, RepetitionCounter
from commtrace.live.monitoring.sampled_steps import StepSample, StepSampler
from commtrace.live.monitoring.waits import NO_BLOCK, BlockReport, BlockWaits
from commtrace.live.monitoring.wire_types import Count, Duration, Instant, Key, Number, Rank, Text, WindowNumber
from commtrace.live.rank import MOST_READINGS, LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace.metadata import DeviceState
from commtrace.trace.schema import Row
from commtrace.trace.spans import Int64

WORK: Final = ("compute", *PAUSES, "unknown")
"""Kinds of a rank's own time; ``compute`` is forward, backward, recompute and optimizer."""

_PHASES_OF_COMPUTE: Final = ("forward", "backward", "recompute", "optimizer")
_MOST_PAUSES: Final = 64
_SHORTEST_PAUSE_NS: Final = 1_000_000
_RARE: Final = 0.6
"""A kind whose time mostly falls into at most this share of the steps is a pause. More than half: an event of every
other step would otherwise be a pause in one window and work in the next."""
_MOST_ROLES: Final = 6
MOST_SUMS: Final = 64
"""Limit of the sums of work in a report: of a window with more steps, several are in one sum."""

_FEWEST_STEPS: Final = 2
"""One step has no scatter: steps longer than a window are gathered over several."""


class Pause(NamedTuple):
    """An event in few steps: its index in ``WORK``, the step, its duration, and the step's begin in epoch ns."""

    work: Count
    step: Number
    ns: Duration
    begin_ns: Instant = 0


class WorkSum(NamedTuple):
    """The work of a rank in steps that follow each other, without pauses."""

    step: Number  # the first one
    steps: Annotated[int, Meta(ge=1, lt=1 << 31)]
    work_ns: Duration  # in all of them
    begin_ns: Instant  # of the first one, epoch


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One rank in one window. Times are ns per step, means over the steps that ended in the window; 0 if none did."""

    rank: Rank
    host: Text
    stage: Count  # pipeline stage; 0 without a pipeline
    window: WindowNumber  # windows with one number are compared
    steps: Count = 0  # that ended in it
    last_step: Number = -1  # the newest that ended so far; −1 before the first
    age_ns: Duration = 0  # time since it ended
    duration_ns: Duration = 0
    # by WORK, without waiting for other ranks
    work_ns: tuple[Duration, Duration, Duration, Duration, Duration, Duration] = (0, 0, 0, 0, 0, 0)
    error_ns: Duration = 0  # standard error of the sum of the work, from its scatter between the steps
    pauses: Annotated[tuple[Pause, ...], Meta(max_length=_MOST_PAUSES)] = ()  # in that work; the longest few
    # wait and transfer by role, bubble as pp; the largest few
    exposed_ns: Annotated[Mapping[Text, Duration], Meta(max_length=_MOST_ROLES)] = field(default_factory=dict)
    on_gpu: bool = False
    phase: Text = ""  # checkpoint or evaluation while no step ends because of one
    ended: bool = False  # the last report of the rank
    exception: Text = ""  # type of the uncaught one that ended the rank
    block: BlockReport = NO_BLOCK
    sample: StepSample | None = None
    tensor_group: Text = ""  # equal for the ranks of one tensor-parallel group
    # of the newest steps; empty if no exporter shows them
    step_times: Annotated[tuple[RankStep, ...], Meta(max_length=MOST_REPORTED)] = ()
    # of steps whose numbers are equal when divided by ``steps_per_sum``, so that all ranks divide them alike
    work_sums: Annotated[tuple[WorkSum, ...], Meta(max_length=MOST_SUMS)] = ()
    steps_per_sum: Annotated[int, Meta(ge=1, lt=1 << 31)] = 1
    device_model: Text = ""  # empty without readings
    # readings since the last window
    device_states: Annotated[tuple[DeviceState, ...], Meta(max_length=MOST_READINGS)] = ()
    # what its messages say of its place in a pipeline, if no framework tells the stage: see matching.stages.Flow
    sender: Number = -1
    groups: Annotated[tuple[Key, ...], Meta(max_length=MOST_GROUPS)] = ()
    own_cost: OwnCost | None = None  # of recording, from the rank's own steps

    @property
    def flow(self) -> Flow:
        return Flow(self.sender, self.groups)

    @property
    def steady_ns(self) -> list[float]:
        """Return the work without pauses."""
        work = [float(time) for time in self.work_ns]
        for pause in self.pauses:
            if pause.work < len(work):
                work[pause.work] -= pause.ns / max(self.steps, 1)
        return work

    @property
    def newest_ns(self) -> float:
        """Return the work without pauses in the newer half of the steps."""
        newest = self.work_sums[len(self.work_sums) // 2 :]
        if not newest:
            return sum(self.steady_ns)
        return sum(one.work_ns for one in newest) / sum(one.steps for one in newest)

    @property
    def first_step(self) -> int:
        """Return the first step that ended in the window."""
        return self.work_sums[0].step if self.work_sums else self.last_step - self.steps + 1

    @property
    def waiting_ns(self) -> int:
        """Return the exposed time: wait and transfer."""
        return sum(self.exposed_ns.values())


def job_means(reports: Sequence[WindowReport]) -> JobMeans | None:
    """Return the means of the newest window in which ranks ended steps; None before the first."""
    with_steps = [report for report in reports if report.steps]
    newest = max((report.window for report in with_steps), default=0)
    own = [report for report in with_steps if report.window == newest]
    if not own:
        return None
    totals: Counter[str] = Counter()
    for report in own:
        totals.update(report.exposed_ns)
    return JobMeans(
        step=max(report.last_step for report in own),
        ranks=len(own),
        step_ns=_mean([report.duration_ns for report in own]),
        work_ns={word: _mean([report.work_ns[at] for report in own]) for at, word in enumerate(WORK)},
        exposed_ns={role: time // len(own) for role, time in totals.most_common(MOST_MEANS)},
    )


class ReportWindow:
    """Gathers the steps of a window, and of blocks in ``waits``. Not thread-safe.

    ``times_every``: report begin and end of steps whose number is a multiple of this; 0: of none.
    """

    def __init__(self, rank: LiveRank, times_every: int = 0) -> None:
        self.waits = BlockWaits()
        self._rank = rank
        self._sampler = StepSampler(rank)
        self._steps: list[StepSummary] = []
        self._last_step = -1
        self._last_end_ns = 0
        self._times_every = times_every
        self._times: deque[RankStep] = deque(maxlen=MOST_REPORTED)
        self._repetitions = RepetitionCounter()

    def add(self, summary: StepSummary, rows: Sequence[Row] = ()) -> None:
        """Add a complete step with its rows."""
        self._steps.append(summary)
        self._sampler.add(summary.step, rows)
        self.waits.add(summary)
        self._last_step, self._last_end_ns = summary.step, summary.end_ns
        if self._times_every and summary.step % self._times_every == 0:
            epoch = self._rank.epoch_ns
            repetition = self._repetitions.begin(summary.step)
            self._times.append(RankStep(summary.step, repetition, epoch(summary.start_ns), epoch(summary.end_ns)))

    def close(self, number: int, now_ns: int) -> WindowReport:
        """Return the report of the steps so far, if there are at least two, and begin the next window.

        ``now_ns`` is on the monotonic clock.
        """
        steps: list[StepSummary] = []
        if len(self._steps) >= _FEWEST_STEPS:
            steps, self._steps = self._steps, []
        stage, flow = self._rank.told_stage, self._rank.flow
        step_times, device_states = tuple(self._times), self._rank.take_device_states()
        self._times.clear()
        work = np.array([work_of(step) for step in steps], np.int64).reshape(len(steps), len(WORK))
        begins_ns = {step.step: self._rank.epoch_ns(step.start_ns) for step in steps}
        pauses = _pauses(begins_ns, [step.step for step in steps], work)
        work_sums, steps_per_sum = _work_sums(steps, work, pauses, begins_ns)
        compute, data, garbage, checkpoint, evaluation, unknown = (_mean(column) for column in work.T.tolist())
        return WindowReport(
            rank=self._rank.rank,
            host=self._rank.metadata.node,
            stage=stage or 0,
            window=number,
            sender=flow.sender if stage is None else -1,
            groups=flow.groups if stage is None else (),
            steps=len(steps),
            last_step=self._last_step,
            age_ns=max(now_ns - self._last_end_ns, 0) if self._last_end_ns else 0,
            duration_ns=_mean([step.duration_ns for step in steps]),
            work_ns=(compute, data, garbage, checkpoint, evaluation, unknown),
            error_ns=_standard_error(work.sum(axis=1)),
            pauses=pauses,
            exposed_ns=_exposed(steps),
            on_gpu=any(step.device is not None for step in steps),
            phase=self._rank.phase(),
            block=self.waits.newest,
            sample=self._sampler.take() if steps else None,
            tensor_group=tensor_group_of(self._rank.marks.coordinates, self._rank.marks.parallel),
            step_times=step_times,
            work_sums=work_sums,
            steps_per_sum=steps_per_sum,
            device_model=self._rank.marks.completed(self._rank.metadata).device if device_states else "",
            device_states=device_states,
            own_cost=self._rank.own_cost.cost,
        )


def work_of(step: StepSummary) -> tuple[int, ...]:
    """Return the work of the rank in a step, ns, by the kinds in ``WORK``."""
    compute = sum(step.compute_ns.get(phase, 0) for phase in _PHASES_OF_COMPUTE)
    evaluation = step.compute_ns.get("evaluation", 0)
    rest = step.work_ns - compute - step.data_ns - step.gc_ns - evaluation
    return compute, step.data_ns, step.gc_ns, step.checkpoint_ns, evaluation, rest


def _pauses(begins_ns: Mapping[int, int], steps: Sequence[int], work: Int64) -> tuple[Pause, ...]:
    """Return the pauses; ``work`` has the shape (steps, kinds)."""
    if len(steps) < _FEWEST_STEPS:
        return ()
    found = (pause._replace(begin_ns=begins_ns[pause.step]) for pause in _pauses_of_kinds(steps, work))
    longest = sorted(found, key=lambda pause: -pause.ns)[:_MOST_PAUSES]
    return tuple(sorted(longest, key=lambda pause: (pause.work, pause.step)))


def _pauses_of_kinds(steps: Sequence[int], work: Int64) -> Iterator[Pause]:
    at = {step: row for row, step in enumerate(steps)}
    for kind in map(WORK.index, PAUSES):
        ns = work[:, kind]
        longest = [int(ns[at[step]]) for step in occurrence(steps, ns).steps]
        if not longest:
            continue
        # Of six that are alike, five hold most of the time: the sixth is one as well.
        struck = np.flatnonzero(ns >= np.median(longest) / 2).tolist()
        if len(struck) <= max(1, int(_RARE * len(steps))):
            pauses = (Pause(kind, steps[row], int(ns[row])) for row in struck)
            yield from (pause for pause in pauses if pause.ns >= _SHORTEST_PAUSE_NS)


def _work_sums(
    steps: Sequence[StepSummary], work: Int64, pauses: Sequence[Pause], begins_ns: Mapping[int, int]
) -> tuple[tuple[WorkSum, ...], int]:
    """Return sums of the work in at most ``MOST_SUMS`` parts of the steps, and the number of steps of a part."""
    paused_ns = Counter[int]()
    for pause in pauses:
        paused_ns[pause.step] += pause.ns
    per_sum = 1
    while len({step.step // per_sum for step in steps}) > MOST_SUMS:
        per_sum *= 2
    sums: list[WorkSum] = []
    for step, all_ns in zip(steps, work.sum(axis=1).tolist(), strict=True):
        work_ns = all_ns - paused_ns.pop(step.step, 0)
        last = sums[-1] if sums else None
        if last is not None and last.step // per_sum == step.step // per_sum and step.step > last.step:
            sums[-1] = last._replace(steps=last.steps + 1, work_ns=last.work_ns + work_ns)
        else:
            sums.append(WorkSum(step.step, 1, work_ns, begins_ns[step.step]))
    return tuple(sums[-MOST_SUMS:]), per_sum


def _exposed(steps: Sequence[StepSummary]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for step in steps:
        for role, time in (*step.exposed_ns.items(), ("pp", step.bubble_ns)):
            totals[role] = totals.get(role, 0) + time
    largest = sorted(((time, role) for role, time in totals.items() if time), reverse=True)[:_MOST_ROLES]
    return {role: time // len(steps) for time, role in largest}


def _standard_error(values: Int64) -> int:
    """Return the standard error of the mean, from the median deviation: one odd step must not hide the rest."""
    if len(values) < 2:
        return 0
    return round(sigma_of_deviations(values) / float(np.sqrt(len(values))))


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values) if values else 0
