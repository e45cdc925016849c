"""The critical paths of all steps of a run that goes on, added up: what a counter of a metrics system is to show.

The path of a step leads from rank to rank, so that no rank can know it alone. It is found in the files of all ranks,
some seconds after the step.

>>> totals = PathTotals("commtrace-runs/my-run")                # doctest: +SKIP
>>> totals.read_on(), totals.path.shares[0]                     # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from commtrace.analysis.breakdown.critical_path import CriticalPath, critical_path
from commtrace.analysis.matched import match_run
from commtrace.analysis.steps.window import Window, recorded_steps
from commtrace.trace.files.reader import load_earlier_attempts, load_run
from commtrace.trace.files.tail import RunTail
from commtrace.trace.run import Run
from commtrace.trace.selection.step_range import StepRange


class _Launch(NamedTuple):
    """The identity of one start of a job."""

    run_id: str
    attempt: int
    session: int


class PathTotals:
    """Critical paths, added up. Every step is counted once, the first one of a run too, in each launch that had it.

    Args:
        path: a run directory, as for :func:`commtrace.trace.files.reader.load_run`.

    Attributes:
        path: of all steps so far.
        run_id: of the run; empty before the first step.
        nodes: by rank, its host.
        last_step: the newest that is in it; −1 before the first.
        num_left_out: steps whose path is not known, as the clocks of the hosts could not be brought together.
        has_ended: every rank has ended in order, and all of its steps are counted.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = CriticalPath(0, ())
        self.run_id = ""
        self.nodes: dict[int, str] = {}
        self.last_step = -1
        self.num_left_out = 0
        self.has_ended = False
        self._source = path
        self._tail = RunTail(path)
        self._launch: _Launch | None = None
        self._next = 0

    def read_on(self, *, to_the_end: bool = False) -> int:
        """Add the steps that all ranks have ended by now, and return how many.

        The newest one waits until the next one has ended: its last communication may be waited for in there.

        Args:
            to_the_end: the newest one counts at once.

        Raises:
            RunNotFoundError: nothing was recorded there, or nothing yet.
            TraceFormatError: the files were written by a newer, incompatible commtrace.
        """
        before = self.path.num_steps + self.num_left_out
        newest = self._tail.read(steps=1)
        self._begin(newest.run)
        closed = all(trace.closed for trace in newest.run.ranks.values())
        end = newest.end if closed or to_the_end else newest.end - 1
        self._add(newest.run.path, end)
        self.has_ended = closed
        return self.path.num_steps + self.num_left_out - before

    def _begin(self, run: Run) -> None:
        """Of another launch of the job, steps are counted anew; what the one before still had comes first."""
        launch = _launch_of(run)
        if launch == self._launch:
            return
        if self._launch is not None and self._launch.run_id == launch.run_id:
            for earlier in load_earlier_attempts(run):
                if earlier.any_metadata.attempt == self._launch.attempt:
                    self._count(earlier, StepRange(self._next))
        self._launch, self._next = launch, 0
        self.run_id = launch.run_id

    def _add(self, directory: Path, end: int) -> None:
        """Count the steps below ``end``."""
        if self._next >= end:
            return
        context = load_run(directory, StepRange(self._next - 1, end + 1))
        if _launch_of(context) == self._launch:  # else the job has been started again since the look at its end
            self._count(context, StepRange(self._next, end))
            self._next = end

    def _count(self, context: Run, wanted: StepRange) -> None:
        window = Window.of(context, wanted)
        if not recorded_steps(window.recorded):
            return
        matched = match_run(window, str(wanted))
        used = matched.steps.used
        if not used:
            return
        self.nodes.update({rank: trace.metadata.node for rank, trace in window.recorded.ranks.items()})
        found = critical_path(matched.context, matched.alignment)
        if found is None:
            self.num_left_out += len(used)
        else:
            self.path = self.path.plus(found)
        self.last_step = used[-1]


def _launch_of(run: Run) -> _Launch:
    metadata = run.any_metadata
    return _Launch(metadata.run_id, metadata.attempt, max(one.metadata.session for one in run.ranks.values()))
