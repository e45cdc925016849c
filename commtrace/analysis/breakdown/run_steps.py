"""The duration of every step of a whole run, with the evaluations, checkpoints and restarts between the steps.

Steps that do not count in the numbers of a summary are here too, with the reason.

>>> run_steps(launches, choice, durations).is_outlier           # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import union
from commtrace.analysis.keys import pack
from commtrace.analysis.statistics import robust_sigma
from commtrace.analysis.steps.attempts import LaunchSteps
from commtrace.analysis.steps.choice import LENGTH_KNOWN, QUIET, StepChoice
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64

EVENTS: Final = (schema.KINDS[schema.EVALUATION], schema.KINDS[schema.CHECKPOINT], "restart")
RESTART: Final = EVENTS[2]

REPEATED: Final = "done again later"  # by the same process
EARLIER_LAUNCH: Final = "of an earlier launch"
NOT_CHOSEN: Final = "not among the steps asked for"

_AS_USUAL: Final = (*LENGTH_KNOWN, EARLIER_LAUNCH)
"""Reasons for which a step's duration is one like that of the steps that count."""

_OUTLIER_SIGMA: Final = 5.0
_OUTLIER_SHARE: Final = 0.1
"""An outlier is longer than the median by both."""


class Event(NamedTuple):
    """One of :data:`EVENTS`, epoch ns: from its begin on any rank until none is in it any more."""

    kind: str
    start_ns: int
    end_ns: int


class LaunchTimes(NamedTuple):
    """One launch of a job: the times of its steps, and what happened between or in them."""

    steps: LaunchSteps
    events: tuple[Event, ...]

    @classmethod
    def of(cls, run: Run) -> LaunchTimes:
        kinds = (schema.EVALUATION, schema.CHECKPOINT)
        return cls(LaunchSteps.of(run), tuple(chain.from_iterable(_events(run, kind) for kind in kinds)))

    def only(self, steps: Collection[int]) -> LaunchTimes:
        """Return the launch with these steps alone, and without what happened between them."""
        return LaunchTimes(self.steps.only(steps), ())


def _events(run: Run, kind: int) -> list[Event]:
    starts, ends = [], []
    for block in run.blocks:
        rows = np.flatnonzero(block.spans.kind == kind)
        offset = block.per_row(np.array([run.ranks[rank].metadata.anchor.offset_ns for rank in block.ranks]))[rows]
        starts.append(block.spans.start[rows] + offset)
        ends.append(block.spans.end[rows] + offset)
    whole = union(np.concatenate(starts), np.concatenate(ends))
    return [Event(schema.KINDS[kind], *bounds) for bounds in zip(whole.start.tolist(), whole.end.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Every attempt of every step, in the order of their begins; times are ns."""

    step: Int64  # number
    launch: Int64  # number of earlier starts of the job
    start_ns: Int64  # epoch
    duration_ns: Int64  # the mean over the ranks
    reason: Int64  # position in ``reasons`` of why the step does not count; −1 if it counts
    reasons: tuple[str, ...]
    events: tuple[Event, ...]  # in the order of their begins

    @property
    def is_usual(self) -> Bool:
        """Return a mask of the steps whose durations can be compared: without warm-up, incomplete and repeated ones."""
        usual = [number for number, reason in enumerate(self.reasons) if reason in _AS_USUAL]
        return np.isin(self.reason, [-1, *usual])

    @property
    def is_quiet(self) -> Bool:
        """Return a mask of the steps that were not recorded, to measure what recording costs."""
        return np.asarray(self.reason == (self.reasons.index(QUIET) if QUIET in self.reasons else len(self.reasons)))

    @property
    def median_ns(self) -> int | None:
        """Return the lower median of the steps as usual; None without any."""
        usual = np.sort(self.duration_ns[self.is_usual])
        return int(usual[(len(usual) - 1) // 2]) if len(usual) else None

    @property
    def is_outlier(self) -> Bool:
        """Return a mask of the usual steps longer than the median by 10 % and by 5 robust standard deviations."""
        usual = self.is_usual
        usual[usual] = is_outlier(self.duration_ns[usual])
        return usual


def is_outlier(duration_ns: Int64) -> Bool:
    """Return a mask of the steps that are longer than the median by 10 % and by 5 robust standard deviations."""
    if not len(duration_ns):
        return np.zeros(0, np.bool_)
    median = int(np.sort(duration_ns)[(len(duration_ns) - 1) // 2])
    sigma = robust_sigma(duration_ns.astype(np.float64))
    return np.asarray(duration_ns > median + max(_OUTLIER_SIGMA * sigma, _OUTLIER_SHARE * median))


def run_steps(launches: Sequence[LaunchTimes], choice: StepChoice, durations: Mapping[int, int]) -> RunSteps:
    """Return all steps of the launches of a job, oldest first; ``choice`` is of the newest one.

    ``durations`` are of the steps that count, ns on a common clock; those of others are by the clocks of the hosts.
    """
    steps_of_launches = [launch.steps for launch in launches]
    launch = np.repeat([steps.launch for steps in steps_of_launches], [len(steps.step) for steps in steps_of_launches])
    columns = zip(
        *((steps.step, steps.occurrence, steps.start_ns, steps.duration_ns) for steps in steps_of_launches), strict=True
    )
    step, occurrence, start_ns, duration_ns = (np.concatenate(column) for column in columns)
    is_numbered = all(steps.is_numbered for steps in steps_of_launches)
    is_last = _is_last_attempt(step, launch, occurrence, is_numbered=is_numbered)
    newest = int(launch.max(initial=0))
    counts = is_last & (launch == newest) & np.isin(step, choice.used)
    in_order = np.argsort(start_ns, kind="stable")
    reasons: dict[str, int] = {}
    why = np.full(len(step), -1)
    for row in in_order[~counts[in_order]].tolist():
        if not is_last[row]:
            reason = REPEATED
        elif launch[row] < newest:
            reason = EARLIER_LAUNCH
        else:
            reason = choice.left_out.get(int(step[row]), NOT_CHOSEN)
        why[row] = reasons.setdefault(reason, len(reasons))
    known = np.array([durations.get(number, -1) for number in step[counts].tolist()], np.int64)
    duration_ns[counts] = np.where(known >= 0, known, duration_ns[counts])
    return RunSteps(
        step=step[in_order],
        launch=launch[in_order],
        start_ns=start_ns[in_order],
        duration_ns=duration_ns[in_order],
        reason=why[in_order],
        reasons=tuple(reasons),
        events=tuple(
            sorted(
                [*chain.from_iterable(launch_times.events for launch_times in launches), *_restarts(steps_of_launches)],
                key=lambda event: (event.start_ns, event.kind),
            )
        ),
    )


def _is_last_attempt(step: Int64, launch: Int64, occurrence: Int64, *, is_numbered: bool) -> Bool:
    """Return a mask of the last attempt of each step; only numbers of the program's own tell those of two launches."""
    job = np.zeros_like(launch) if is_numbered else launch
    order = np.lexsort((occurrence, launch, step, job))
    key = pack((job, step))[order]
    is_last = np.empty(len(step), np.bool_)
    is_last[order] = np.append(key[1:] != key[:-1], True)[: len(step)]
    return is_last


def _restarts(launches: Sequence[LaunchSteps]) -> list[Event]:
    """Return the time from the last step of each launch to the first one of the next."""
    with_steps = [launch for launch in launches if len(launch.step)]
    return [
        Event(RESTART, int(earlier.end_ns.max()), int(later.start_ns.min())) for earlier, later in pairwise(with_steps)
    ]
