"""Steps that ran more than once: after a restart of the job from a checkpoint, or a rollback within one launch.

A summary's tables are of the last attempt of each step; all attempts are listed in time order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

_FIRST_EARLIER: Final = -2
"""Rows of step n in a repeated attempt have the number −2 − n."""


class StepTime(NamedTuple):
    """A step of the job in one launch: from its earliest begin on any rank to its latest end, epoch ns."""

    step: int
    occurrence: int  # number of earlier runs in this launch
    launch: int  # number of earlier starts of the job
    start_ns: int
    end_ns: int


class Attempt(NamedTuple):
    """One attempt of a step, counted from 1, in a launch of the job, counted from 0; ``start_ns`` is epoch ns."""

    attempt: int
    launch: int
    start_ns: int
    duration_ns: int


class RepeatedStep(NamedTuple):
    """A step that ran more than once, with its attempts in time order."""

    step: int
    attempts: tuple[Attempt, ...]

    def to_json(self) -> JsonObject:
        return {"step": self.step, "attempts": [attempt._asdict() for attempt in self.attempts]}


class LaunchSteps(NamedTuple):
    """The times of every attempt of every step of one launch; ``is_numbered`` if the program numbers its steps."""

    times: tuple[StepTime, ...]
    is_numbered: bool

    @classmethod
    def of(cls, launch: Run) -> LaunchSteps:
        is_numbered = all("step_numbers" in trace.topology for trace in launch.ranks.values())
        return cls(tuple(_step_times(launch)), is_numbered)


def _step_times(launch: Run) -> Iterable[StepTime]:
    times: dict[tuple[int, int], StepTime] = {}
    for trace in launch.ranks.values():
        spans, anchor = trace.spans, trace.metadata.anchor
        rows = np.flatnonzero(spans.kind == schema.STEP)
        rows = rows[np.argsort(spans.start[rows], kind="stable")]
        offset = anchor.realtime_ns - anchor.monotonic_ns
        numbers = number_of(spans.step[rows]).tolist()
        before: dict[int, int] = {}
        for step, start, end in zip(numbers, spans.start[rows].tolist(), spans.end[rows].tolist(), strict=True):
            occurrence = before[step] = before.get(step, -1) + 1
            own = StepTime(step, occurrence, trace.metadata.attempt, start + offset, end + offset)
            known = times.get((step, occurrence), own)
            times[step, occurrence] = own._replace(
                start_ns=min(own.start_ns, known.start_ns), end_ns=max(own.end_ns, known.end_ns)
            )
    return times.values()


def repeated_steps(launches: Sequence[LaunchSteps]) -> list[RepeatedStep]:
    """Return the steps that ran more than once, ascending; launches are oldest first."""
    # Only numbers of the program's own identify the steps of two launches.
    comparable = launches if all(launch.is_numbered for launch in launches) else launches[-1:]
    by_step: dict[int, list[StepTime]] = {}
    for launch in comparable:
        for time in launch.times:
            by_step.setdefault(time.step, []).append(time)
    return [RepeatedStep(step, tuple(_in_order(times))) for step, times in sorted(by_step.items()) if len(times) > 1]


def _in_order(times: Sequence[StepTime]) -> Iterator[Attempt]:
    ordered = sorted(times, key=lambda time: (time.launch, time.occurrence))
    for attempt, time in enumerate(ordered, 1):
        yield Attempt(attempt, time.launch, time.start_ns, time.end_ns - time.start_ns)


class Repetitions(NamedTuple):
    """The steps that one process ran more than once."""

    number: Int32  # ascending
    until_ns: Int64  # end of the last attempt but one

    @classmethod
    def of(cls, spans: Spans) -> Repetitions:
        rows = np.flatnonzero((spans.kind == schema.STEP) & (spans.step >= 0))
        rows = rows[np.lexsort((spans.end[rows], spans.step[rows]))]
        number, end = spans.step[rows], spans.end[rows]
        follows = number[1:] == number[:-1]  # on another attempt of the same step
        last_but_one = np.flatnonzero(follows & ~np.append(follows[1:], False))
        return cls(number[last_but_one], end[last_but_one])

    def renumber(self, spans: Spans) -> Spans:
        """Return spans with other numbers for the rows of all attempts but the last one."""
        if not len(self.number):
            return spans
        at = np.minimum(np.searchsorted(self.number, spans.step), len(self.number) - 1)
        is_earlier_one = (self.number[at] == spans.step) & (spans.start < self.until_ns[at])
        return spans.replace(step=np.where(is_earlier_one, _FIRST_EARLIER - spans.step, spans.step))


def separate_attempts(run: Run) -> Run:
    """Return the run with other numbers for the rows of all attempts of a step but its last one."""
    ranks = {rank: _with_last_attempts(trace) for rank, trace in run.ranks.items()}
    if all(ranks[rank] is trace for rank, trace in run.ranks.items()):
        return run
    return replace(run, ranks=ranks)


def without_last_attempts(run: Run) -> Run | None:
    """Return all but the last attempts of steps that one process repeated; None if no step was repeated.

    Of three attempts the first two are left, so that a second call returns the first one alone.
    """
    run = separate_attempts(run)
    kept = {rank: is_earlier(trace.spans.step) for rank, trace in run.ranks.items()}
    if not any(rows.any() for rows in kept.values()):
        return None
    ranks = {}
    for rank, trace in run.ranks.items():
        spans = trace.spans.take(kept[rank])
        ranks[rank] = replace(trace, spans=spans.replace(step=number_of(spans.step)))
    return replace(run, ranks=ranks)


def is_earlier(step: Int32) -> Bool:
    """Return a mask of the rows of attempts that the same process repeated."""
    return np.asarray(step <= _FIRST_EARLIER)


def earlier_number(number: int) -> int:
    """Return the number for rows of a step in a repeated attempt."""
    return _FIRST_EARLIER - number


def number_of(step: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the true numbers of steps, also of repeated attempts."""
    return np.where(is_earlier(step), _FIRST_EARLIER - step, step)


def _with_last_attempts(trace: RankTrace) -> RankTrace:
    repeated = Repetitions.of(trace.spans)
    return replace(trace, spans=repeated.renumber(trace.spans)) if len(repeated.number) else trace
