"""The critical paths and the lost time of all steps of a running job, from the files of all ranks, for counters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from commtrace.analysis.breakdown.critical_path import CriticalPath, critical_path
from commtrace.analysis.matched import Matched, match_run
from commtrace.analysis.matching.operations import is_kernel_trace
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.observed_steps import ObservedProgram
from commtrace.analysis.steps.attempts import LaunchSteps, repeated_steps, without_last_attempts
from commtrace.analysis.steps.choice import ChosenSteps, recorded_steps
from commtrace.analysis.stragglers.lost_time import LostTime, lost_time_of_steps
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.findings.formatting import ranges
from commtrace.trace.files.reader import load_earlier_attempts, load_run
from commtrace.trace.files.tail import RunTail
from commtrace.trace.run import Run
from commtrace.trace.selection import StepRange


class _Launch(NamedTuple):
    run_id: str
    attempt: int
    session: int


class PathTotals:
    """The sum of critical paths and lost time over every attempt of every step, the first step too.

    A repeated step counts each time: all of it was job time. ``lost`` is None while unknown, ``run_id`` empty and
    ``last_step`` −1 before the first step; ``num_left_out`` counts steps without a path, for want of aligned clocks.
    ``has_ended`` means that every rank ended cleanly and all steps are counted.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = CriticalPath(0, ())
        self.lost: LostTime | None = None
        self.run_id = ""
        self.nodes: dict[int, str] = {}
        self.last_step = -1
        self.num_left_out = 0
        self.has_ended = False
        self._source = path
        self._tail = RunTail(path)
        self._launch: _Launch | None = None
        self._next = 0
        self._attempts: dict[int, int] = {}

    def read_on(self, *, to_the_end: bool = False) -> int:
        """Add the steps that all ranks have ended, and return their number.

        The newest step waits for the end of the next, where its last communication may end, unless ``to_the_end``.

        Raises:
            RunNotFoundError: nothing was recorded there yet.
            TraceFormatError: the files were written by a newer, incompatible commtrace.
        """
        before = self.path.num_steps + self.num_left_out
        newest = self._tail.read(steps=1)
        self._begin(newest.run)
        closed = all(trace.closed for trace in newest.run.ranks.values())
        end = newest.end if closed or to_the_end else newest.end - 1
        self._add(newest.run.path, end, is_the_end=closed or to_the_end)
        self.has_ended = closed
        return self.path.num_steps + self.num_left_out - before

    def _begin(self, run: Run) -> None:
        """Start counting anew for another launch of the job, after the rest of the previous one."""
        launch = _launch_of(run)
        if launch == self._launch:
            return
        if self._launch is not None and self._launch.run_id == launch.run_id:
            for earlier in load_earlier_attempts(run):
                if earlier.any_metadata.attempt == self._launch.attempt:
                    self._count(earlier, StepRange(self._next))
        self._launch, self._next, self._attempts = launch, 0, {}
        self.run_id = launch.run_id

    def _add(self, directory: Path, end: int, *, is_the_end: bool) -> None:
        if self._next >= end and not (is_the_end and self._next):
            return  # nothing new, or steps that are done again: they count when the job is further than before
        around = StepRange(self._next - 1) if is_the_end else StepRange(self._next - 1, end + 1)
        context = load_run(directory, around)
        if _launch_of(context) != self._launch:
            return  # the job has been started again since the look at its end
        if is_the_end:  # a job that goes back right before its end ends with a lower number
            end = max(recorded_steps(context), default=end - 1) + 1
        attempts = _attempts_of(context)
        if attempts.get(self._next - 1, 1) > self._attempts.get(self._next - 1, 1):
            self._count_again(load_run(directory, StepRange(0, self._next)))
        if self._next < end:
            self._count(context, StepRange(self._next, end))
            self._attempts.update({step: count for step, count in attempts.items() if self._next <= step < end})
            self._next = end

    def _count_again(self, run: Run) -> None:
        """Count later attempts of steps that were counted before."""
        attempts = _attempts_of(run)
        left = {step: count - self._attempts.get(step, 1) for step, count in attempts.items() if step < self._next}
        self._attempts.update({step: attempts[step] for step in left})
        earlier: Run | None = run
        while earlier is not None and any(count > 0 for count in left.values()):
            for first, last in ranges(step for step, count in left.items() if count > 0):
                self._count_one(earlier, StepRange(first, last + 1))
            left = {step: count - 1 for step, count in left.items()}
            earlier = without_last_attempts(earlier)

    def _count(self, context: Run, wanted: StepRange) -> None:
        attempt: Run | None = context
        while attempt is not None:
            self._count_one(attempt, wanted)
            attempt = without_last_attempts(attempt)

    def _count_one(self, context: Run, wanted: StepRange) -> None:
        window = ChosenSteps.of(context, wanted)
        if not recorded_steps(window.recorded):
            return
        matched = match_run(window, str(wanted))
        used = matched.steps.used
        if not used:
            return
        self.nodes.update({rank: trace.metadata.node for rank, trace in window.recorded.ranks.items()})
        path = critical_path(matched.context, matched.alignment)
        if path is None:
            self.num_left_out += len(used)
        else:
            self.path = self.path.plus(path)
        self.last_step = used[-1]
        lost = _lost(matched)
        if lost is not None:
            self.lost = lost if self.lost is None else self.lost.plus(lost)


def _lost(matched: Matched) -> LostTime | None:
    """Return None where clocks do not agree, only kernels were recorded, or the steps cannot be replayed."""
    run, matches = matched.run, matched.matches
    if not matches.clocks_agree or any(is_kernel_trace(trace.spans) for trace in run.ranks.values()):
        return None
    try:
        observed = ObservedProgram.of(run, matches)
    except ReplayError:
        return None
    return lost_time_of_steps(run, observed, find_stragglers(run, matches, observed=observed).slow)


def _attempts_of(run: Run) -> dict[int, int]:
    return {repeated.step: len(repeated.attempts) for repeated in repeated_steps([LaunchSteps.of(run)])}


def _launch_of(run: Run) -> _Launch:
    metadata = run.any_metadata
    return _Launch(metadata.run_id, metadata.attempt, max(trace.metadata.session for trace in run.ranks.values()))
