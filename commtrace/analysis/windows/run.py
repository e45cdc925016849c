"""Measures a run window by window, here or on workers: never more of it than one window is in memory.

>>> run = measure_run("commtrace-runs/my-run", step_series)                              # doctest: +SKIP
>>> run.result.wall_ns                                                                   # doctest: +SKIP

A run that fits into one window is analysed as a whole. A larger one is looked at first (:mod:`.survey`): that tells
how the clocks differ, which steps count, and where in the files they lie. Then its windows are read and measured one
by one, and what was measured is added up. What is found does not depend on how many windows there are, nor on who
measures them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.clocks.align import Alignment, apply
from commtrace.analysis.matched import of_ranks
from commtrace.analysis.matching.coverage import RowCounts
from commtrace.analysis.replay.scenarios import PlacedProgram, Places, Replay, ReplayedSteps, Scenario, replay_of
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.steps.choice import StepChoice, choose_steps, without_torn_steps
from commtrace.analysis.windows.step_windows import (
    MOST_ROWS,
    StepWindow,
    analyse_window,
    cut_windows,
    steps_read,
    window_of,
)
from commtrace.analysis.windows.survey import Survey, survey_run
from commtrace.errors import CommtraceError
from commtrace.trace.files.locate import find_run_directory
from commtrace.trace.files.reader import find_segments
from commtrace.trace.run import Run

MOST_BYTES: Final = 16_000_000
"""Files of a run that is analysed as a whole: about two million rows, which take 0.8 GB. Windows take twice as long:
every row is read twice or more often."""


_ADVICE: Final = (
    "It may have run out of memory, of which each worker takes about 500 MB: use --workers 1, or give the workers of a "
    "cluster more memory or fewer threads each."
)


class Addable(Protocol):
    """What is measured in some steps; sums of several are that of all of these steps."""

    def __add__(self, other: Any, /) -> Any: ...


Result = TypeVar("Result", bound=Addable)


class Workers(NamedTuple):
    """Who reads ranks and windows.

    Attributes:
        executor: its workers must see the files; None for this process.
        num_workers: how many there are.
        deaths: what is raised in place of a result when a worker has died.
    """

    executor: Executor | None = None
    num_workers: int = 1
    deaths: tuple[type[Exception], ...] = (BrokenExecutor,)


ALONE: Final = Workers()


@dataclass(frozen=True, slots=True)
class MeasuredRun(Generic[Result]):
    """A run and what its steps add up to.

    Attributes:
        recorded: the run; of one that was measured window by window, it holds few rows.
        alignment: how its clocks were brought together.
        steps: which steps count, and why the others do not.
        counts: by rank, of all rows that were recorded (with ``steps``: in these).
        result: what was measured in the steps that count.
    """

    recorded: Run
    alignment: Alignment
    steps: StepChoice
    counts: Mapping[int, RowCounts]
    result: Result


def measure_run(
    path: str | Path,
    measure: Callable[[Analysis], Result],
    steps: str | None = None,
    workers: Workers = ALONE,
    *,
    most_bytes: int = MOST_BYTES,
    most_rows: int = MOST_ROWS,
) -> MeasuredRun[Result]:
    """Measure the steps of a run that count: those asked for, or all but the first.

    Args:
        path: a run directory, a directory that holds exactly one, or ``DIRECTORY/latest``.
        measure: what to measure in some steps. Workers import it by its name.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``; they are read as one window.
        workers: who measures the windows.
        most_bytes: of a run that is read as a whole.
        most_rows: of a window, unless a single step has more.

    Raises:
        RunNotFoundError: nothing was recorded there, or a worker does not see it.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
        CommtraceError: a worker died.
    """
    return open_run(path, steps, workers, most_bytes=most_bytes, most_rows=most_rows).measure(measure)


def measure_analysis(analysis: Analysis, measure: Callable[[Analysis], Result]) -> MeasuredRun[Result]:
    """Measure the steps that count of a run that was analysed as a whole: it is one window."""
    counts = {rank: RowCounts.of(trace.spans) for rank, trace in analysis.recorded.ranks.items()}
    return MeasuredRun(analysis.recorded, analysis.alignment, analysis.steps, counts, measure(analysis))


def open_run(
    path: str | Path,
    steps: str | None = None,
    workers: Workers = ALONE,
    *,
    most_bytes: int = MOST_BYTES,
    most_rows: int = MOST_ROWS,
) -> WholeRun | LargeRun:
    """Return the steps of a run that count, ready to be measured.

    Arguments and errors are those of :func:`measure_run`.
    """
    large = None if steps else survey_large_run(path, workers, most_bytes, most_rows)
    return large or WholeRun(analyse(path, steps))


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A run that is one window, in memory."""

    analysis: Analysis

    @property
    def recorded(self) -> Run:
        return self.analysis.recorded

    @property
    def aligned(self) -> Run:
        """The ranks that count, on one clock, with the rows of the steps that count."""
        return self.analysis.run

    @property
    def alignment(self) -> Alignment:
        return self.analysis.alignment

    @property
    def steps(self) -> StepChoice:
        return self.analysis.steps

    def measure(self, measure: Callable[[Analysis], Result]) -> MeasuredRun[Result]:
        """Measure the steps that count."""
        return measure_analysis(self.analysis, measure)

    def read_steps(self, steps: Sequence[int]) -> Analysis:
        """Return an analysis that holds these steps: that of all of them."""
        return self.analysis

    def replay(self, statistics: StepStatistics) -> Replay:
        """Return what replays these steps, of which there are statistics."""
        return replay_of(self.analysis.replayed.run, self.analysis.program, statistics)


@dataclass(frozen=True, slots=True)
class LargeRun:
    """A run that is measured window by window.

    Attributes:
        survey: where its rows are, and how its clocks were brought together.
        steps: which steps count, and why the others do not.
        workers: who measures the windows.
        most_rows: of a window, unless a single step has more.
    """

    survey: Survey
    steps: StepChoice
    workers: Workers = ALONE
    most_rows: int = MOST_ROWS

    @property
    def recorded(self) -> Run:
        """The run, with few of its rows."""
        return self.survey.outline

    @property
    def aligned(self) -> Run:
        """The ranks that count, on one clock, with the rows of steps, but not with what happened in them."""
        return of_ranks(apply(self.survey.outline, self.survey.alignment), self.steps.ranks)

    @property
    def alignment(self) -> Alignment:
        return self.survey.alignment

    def measure(self, measure: Callable[[Analysis], Result]) -> MeasuredRun[Result]:
        """Measure the steps that count.

        Raises:
            RunNotFoundError: a worker does not see the files.
            CommtraceError: a worker died, or all files were deleted meanwhile.
        """
        outline, alignment = self.survey.outline, self.survey.alignment
        one = partial(_measure_window, measure=measure, alignment=alignment, ranks=self.steps.ranks)
        windows = cut_windows(self.survey, self.steps, self.most_rows)
        whole = reduce(add, _in_order(one, windows, self.workers))
        if whole.result is None:
            raise CommtraceError(
                f"{outline.path}: all of its steps were deleted while they were read. {whole.problems[0]}"
            )
        new = (one for one in dict.fromkeys(whole.problems) if one not in outline.problems)
        recorded = replace(outline, problems=(*outline.problems, *new))
        counts = {rank: one.counts for rank, one in self.survey.ranks.items()}
        return MeasuredRun(recorded, alignment, replace(self.steps, used=whole.steps), counts, whole.result)

    def read_steps(self, steps: Sequence[int]) -> Analysis:
        """Read and analyse some of the steps that count, which may lie far apart; those that are still there."""
        recorded = window_of(self.survey, self.steps, steps).read()
        found = steps_read(recorded, self.steps.ranks, sorted(steps))
        return analyse_window(recorded, self.alignment, self.steps.ranks, found, self.steps.used)

    def replay(self, statistics: StepStatistics) -> Replay:
        """Return what replays these steps, of which there are statistics: each time, all windows are read again."""
        places = Places.of(statistics)

        def replayed(scenarios: Sequence[Scenario]) -> ReplayedSteps:
            return self.measure(partial(_replay_window, places=places, scenarios=scenarios)).result

        return Replay(statistics, replayed)


def survey_large_run(
    path: str | Path, workers: Workers = ALONE, most_bytes: int = MOST_BYTES, most_rows: int = MOST_ROWS
) -> LargeRun | None:
    """Look at a large run in which steps were marked; None for any other: it is one window.

    Arguments and errors are those of :func:`measure_run`.
    """
    problems: list[str] = []
    directory = find_run_directory(Path(path))
    segments = find_segments(directory, problems)
    if sum(segment.size for own in segments.values() for segment in own) <= most_bytes:
        return None
    try:
        survey = survey_run(directory, segments, problems, workers.executor)
    except workers.deaths as error:
        raise CommtraceError(f"A worker died while it looked for the steps of {directory}. {_ADVICE}") from error
    choice = choose_steps(survey.outline, keep_warm_up=False)
    if not survey.alignment.keeps_order:
        choice = without_torn_steps(choice, apply(survey.outline, survey.alignment))
    return LargeRun(survey, choice, workers, most_rows) if choice.used else None


@dataclass(frozen=True, slots=True)
class _WindowResult(Generic[Result]):
    """What was measured in these steps; None where the files of all of them were deleted meanwhile."""

    result: Result | None
    steps: tuple[int, ...]
    problems: tuple[str, ...]

    def __add__(self, other: _WindowResult[Result]) -> _WindowResult[Result]:
        results = [one for one in (self.result, other.result) if one is not None]
        return _WindowResult(
            reduce(add, results) if results else None, self.steps + other.steps, self.problems + other.problems
        )


def _measure_window(
    window: StepWindow, measure: Callable[[Analysis], Result], alignment: Alignment, ranks: Sequence[int]
) -> _WindowResult[Result]:
    recorded = window.read()
    steps = steps_read(recorded, ranks, window.steps)
    result = measure(analyse_window(recorded, alignment, ranks, steps, window.steps_of_run)) if steps else None
    return _WindowResult(result, steps, recorded.problems)


def _replay_window(analysis: Analysis, places: Places, scenarios: Sequence[Scenario]) -> ReplayedSteps:
    return PlacedProgram.of(analysis.replayed.run, analysis.program, places).replay(scenarios)


def _in_order(
    measure: Callable[[StepWindow], _WindowResult[Result]], windows: Iterable[StepWindow], workers: Workers
) -> Iterator[_WindowResult[Result]]:
    """Yield the result of each window, in their order; so many windows are made at a time as keep all workers busy."""
    if workers.executor is None:
        yield from map(measure, windows)
        return
    waiting: deque[tuple[StepWindow, Future[_WindowResult[Result]]]] = deque()
    for window in windows:
        waiting.append((window, _submitted(measure, window, workers.executor)))
        if len(waiting) > 2 * workers.num_workers:
            yield _result(*waiting.popleft(), workers)
    while waiting:
        yield _result(*waiting.popleft(), workers)


def _submitted(
    measure: Callable[[StepWindow], _WindowResult[Result]], window: StepWindow, executor: Executor
) -> Future[_WindowResult[Result]]:
    try:
        return executor.submit(measure, window)
    except BrokenExecutor as error:  # a worker has died of one that waits already, which is to be named
        failed: Future[_WindowResult[Result]] = Future()
        failed.set_exception(error)
        return failed


def _result(window: StepWindow, future: Future[_WindowResult[Result]], workers: Workers) -> _WindowResult[Result]:
    try:
        return future.result()
    except workers.deaths as error:
        first, last = window.steps[0], window.steps[-1]
        raise CommtraceError(
            f"A worker died before the window of steps {first} to {last} was measured, for which {window.num_rows:,} "
            f"rows are read. {_ADVICE}"
        ) from error
