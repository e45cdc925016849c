"""The duration of every step of a whole run, with the evaluations, checkpoints and restarts between the steps.

Steps that do not count in the numbers of a summary are here too, with the reason.

>>> run_steps(launches, choice, durations).is_outlier           # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import union
from commtrace.analysis.statistics import robust_sigma
from commtrace.analysis.steps.attempts import LaunchSteps, StepTime
from commtrace.analysis.steps.choice import DURATION_ONLY, StepChoice
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

EVENTS: Final = (schema.KINDS[schema.EVALUATION], schema.KINDS[schema.CHECKPOINT], "restart")
RESTART: Final = EVENTS[2]

REPEATED: Final = "done again later"
EARLIER_LAUNCH: Final = "of an earlier launch"
NOT_CHOSEN: Final = "not among the steps asked for"

_AS_USUAL: Final = (DURATION_ONLY, EARLIER_LAUNCH)
"""Reasons for which a step's duration is one like that of the steps that count."""

_OUTLIER_SIGMA: Final = 5.0
_OUTLIER_SHARE: Final = 0.1
"""An outlier is longer than the median by both."""


class Event(NamedTuple):
    """One of :data:`EVENTS`, epoch ns: from its begin on any rank until none is in it any more."""

    kind: str
    start_ns: int
    end_ns: int


class Launch(NamedTuple):
    """One launch of a job: the times of its steps, and what happened between or in them."""

    steps: LaunchSteps
    events: tuple[Event, ...]

    @classmethod
    def of(cls, run: Run) -> Launch:
        kinds = (schema.EVALUATION, schema.CHECKPOINT)
        return cls(LaunchSteps.of(run), tuple(chain.from_iterable(_events(run, kind) for kind in kinds)))

    def only(self, steps: Container[int]) -> Launch:
        """Return the launch with these steps alone, and without what happened between them."""
        times = tuple(time for time in self.steps.times if time.step in steps)
        return Launch(LaunchSteps(times, self.steps.is_numbered), ())


def _events(run: Run, kind: int) -> list[Event]:
    starts, ends = [], []
    for trace in run.ranks.values():
        rows = np.flatnonzero(trace.spans.kind == kind)
        offset = trace.metadata.anchor.realtime_ns - trace.metadata.anchor.monotonic_ns
        starts.append(trace.spans.start[rows] + offset)
        ends.append(trace.spans.end[rows] + offset)
    whole = union(np.concatenate(starts), np.concatenate(ends))
    return [Event(schema.KINDS[kind], *bounds) for bounds in zip(whole.start.tolist(), whole.end.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Every attempt of every step, in the order of their begins; times are ns."""

    step: Int64  # number
    launch: Int64  # number of earlier starts of the job
    start_ns: Int64  # epoch
    duration_ns: Int64  # from the begin on the first rank to the end on the last one
    reason: Int64  # position in ``reasons`` of why the step does not count; −1 if it counts
    reasons: tuple[str, ...]
    events: tuple[Event, ...]  # in the order of their begins

    @property
    def is_usual(self) -> Bool:
        """Return a mask of the steps whose durations can be compared: without warm-up, incomplete and repeated ones."""
        usual = [number for number, reason in enumerate(self.reasons) if reason in _AS_USUAL]
        return np.isin(self.reason, [-1, *usual])

    @property
    def median_ns(self) -> int | None:
        """Return the lower median of the steps as usual; None without any."""
        usual = np.sort(self.duration_ns[self.is_usual])
        return int(usual[(len(usual) - 1) // 2]) if len(usual) else None

    @property
    def is_outlier(self) -> Bool:
        """Return a mask of the usual steps longer than the median by 10 % and by 5 robust standard deviations."""
        median, usual = self.median_ns, self.is_usual
        if median is None:
            return usual
        sigma = robust_sigma(self.duration_ns[usual].astype(np.float64))
        excess = max(_OUTLIER_SIGMA * sigma, _OUTLIER_SHARE * median)
        return np.asarray(usual & (self.duration_ns > median + excess))


def run_steps(launches: Sequence[Launch], choice: StepChoice, durations: Mapping[int, int]) -> RunSteps:
    """Return all steps of the launches of a job, oldest first; ``choice`` is of the newest one.

    ``durations`` are of the steps that count, ns on a common clock; those of others are by the clocks of the hosts.
    """
    newest = max((time.launch for launch in launches for time in launch.steps.times), default=0)
    is_numbered = all(launch.steps.is_numbered for launch in launches)
    times = sorted((time for launch in launches for time in launch.steps.times), key=lambda time: time.start_ns)
    kept = _kept(times, is_numbered=is_numbered)
    counting = set(choice.used)
    reasons: dict[str, int] = {}

    def reason(time: StepTime) -> int:
        if time is not kept[_identity(time, is_numbered=is_numbered)]:
            return reasons.setdefault(REPEATED, len(reasons))
        if time.launch < newest:
            return reasons.setdefault(EARLIER_LAUNCH, len(reasons))
        if time.step in counting:
            return -1
        return reasons.setdefault(choice.left_out.get(time.step, NOT_CHOSEN), len(reasons))

    why = [reason(time) for time in times]
    return RunSteps(
        step=np.array([time.step for time in times], np.int64),
        launch=np.array([time.launch for time in times], np.int64),
        start_ns=np.array([time.start_ns for time in times], np.int64),
        duration_ns=np.array(
            [
                durations.get(time.step, time.end_ns - time.start_ns) if own < 0 else time.end_ns - time.start_ns
                for time, own in zip(times, why, strict=True)
            ],
            np.int64,
        ),
        reason=np.array(why, np.int64),
        reasons=tuple(reasons),
        events=tuple(
            sorted(
                [*chain.from_iterable(launch.events for launch in launches), *_restarts(launches)],
                key=lambda event: (event.start_ns, event.kind),
            )
        ),
    )


def _identity(time: StepTime, *, is_numbered: bool) -> tuple[int, int]:
    """Return equal keys for attempts of one step; only numbers of the program's own identify those of two launches."""
    return (0 if is_numbered else time.launch, time.step)


def _kept(times: Sequence[StepTime], *, is_numbered: bool) -> dict[tuple[int, int], StepTime]:
    """Return the last attempt of each step."""
    kept: dict[tuple[int, int], StepTime] = {}
    for time in times:
        known = kept.get(_identity(time, is_numbered=is_numbered))
        if known is None or (known.launch, known.occurrence) <= (time.launch, time.occurrence):
            kept[_identity(time, is_numbered=is_numbered)] = time
    return kept


def _restarts(launches: Sequence[Launch]) -> list[Event]:
    """Return the time from the last step of each launch to the first one of the next."""
    with_steps = [launch.steps.times for launch in launches if launch.steps.times]
    return [
        Event(RESTART, max(time.end_ns for time in earlier), min(time.start_ns for time in later))
        for earlier, later in pairwise(with_steps)
    ]
