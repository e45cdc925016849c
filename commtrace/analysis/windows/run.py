"""Measure a run window by window, here or on workers, with at most one window in memory.

A survey (:mod:`.survey`) first finds the clocks, the steps that count and the places of their rows. The number of
windows or workers does not change the result.

>>> measure_run("commtrace-runs/my-run", step_series).result.wall_ns  # doctest: +SKIP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.matched import of_ranks
from commtrace.analysis.matching.coverage import RowCounts
from commtrace.analysis.replay.observed_steps import ObservedSteps
from commtrace.analysis.replay.scenarios import Addable, Replay
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
from commtrace.analysis.windows.survey import RowsOfSteps, Survey, survey_rank, survey_run
from commtrace.errors import CommtraceError
from commtrace.trace import schema
from commtrace.trace.files.locate import Segment
from commtrace.trace.files.reader import RunFiles, find_files, load_files
from commtrace.trace.run import Run

MOST_BYTES: Final = 16_000_000
"""Size of the largest run that is analysed as a whole: about two million rows, which take 1.2 GB. Windows take longer:
every row is read twice."""

FEWEST_STEPS: Final = 5
"""With fewer recorded steps, each window would be the whole run: a step is read with two before it and one after it."""


_ADVICE: Final = (
    "It may have run out of memory, of which each worker takes about 300 MB: use --workers 1, or give the workers of a "
    "cluster more memory or fewer threads each."
)


Result = TypeVar("Result", bound=Addable)


class Workers(NamedTuple):
    """Processes that read ranks and windows."""

    executor: Executor | None = None  # its workers must see the files; None for this process
    num_workers: int = 1
    deaths: tuple[type[Exception], ...] = (BrokenExecutor,)  # raised in place of a result when a worker has died


ALONE: Final = Workers()

OnProgress = Callable[[int, int], None]
"""Called with the number of steps that a pass over a run has measured, and of all its steps."""


@dataclass(frozen=True, slots=True)
class MeasuredRun(Generic[Result]):
    """A run and the sum over its steps."""

    recorded: Run  # with few rows if it was measured window by window
    alignment: Alignment
    steps: StepChoice
    counts: Mapping[int, RowCounts]  # by rank, of all rows that were recorded (with ``steps``: in these)
    result: Result  # of the steps that count


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
        measure: must be importable by its name on workers.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``; they are read as one window.

    Raises:
        RunNotFoundError: nothing was recorded there, or a worker does not see it.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
        CommtraceError: a worker died.
    """
    return open_run(path, steps, workers, most_bytes=most_bytes, most_rows=most_rows).measure(measure)


def open_run(
    path: str | Path,
    steps: str | None = None,
    workers: Workers = ALONE,
    *,
    most_bytes: int = MOST_BYTES,
    most_rows: int = MOST_ROWS,
) -> OpenedRun:
    """Return the steps of a run that count, ready to be measured; see :func:`measure_run`."""
    if steps:
        return OpenedRun.of(analyse(path, steps))
    files = find_files(path)
    return survey_large_run(files, workers, most_bytes, most_rows) or OpenedRun.of(analyse(load_files(files)))


class _StepsInMemory(NamedTuple):
    """The steps of a run that was analysed as a whole: a single window."""

    analysis: Analysis

    @property
    def recorded(self) -> Run:
        return self.analysis.recorded

    @property
    def aligned(self) -> Run:
        return self.analysis.run

    @property
    def alignment(self) -> Alignment:
        return self.analysis.alignment

    @property
    def steps(self) -> StepChoice:
        return self.analysis.steps

    @property
    def counts(self) -> Mapping[int, RowCounts]:
        return self.analysis.counts

    @property
    def typical_rows_of_step(self) -> int:
        rows = RowsOfSteps.sum([RowsOfSteps.of(block.spans) for block in self.analysis.run.blocks])
        return int(np.median(rows.num_rows))

    def windows(self) -> Iterator[Window]:
        yield _WindowInMemory(self.analysis)

    def analyse_steps(self, steps: Sequence[int]) -> Analysis:
        return self.analysis


class _StepsInFiles(NamedTuple):
    """The steps of a run that was surveyed: windows that are read one after the other."""

    survey: Survey
    steps: StepChoice
    most_rows: int = MOST_ROWS  # of a window, unless a single step has more

    @property
    def recorded(self) -> Run:
        return self.survey.outline

    @property
    def aligned(self) -> Run:
        return of_ranks(self.survey.aligned, self.steps.ranks)

    @property
    def alignment(self) -> Alignment:
        return self.survey.alignment

    @property
    def counts(self) -> Mapping[int, RowCounts]:
        return {rank: rank_survey.counts for rank, rank_survey in self.survey.ranks.items()}

    @property
    def typical_rows_of_step(self) -> int:
        return int(np.median(self.survey.rows_of_step.num_rows))

    def windows(self) -> Iterator[Window]:
        for window in cut_windows(self.survey, self.steps, self.most_rows):
            yield _WindowInFiles(window, self.alignment, self.steps.ranks)

    def analyse_steps(self, steps: Sequence[int]) -> Analysis:
        recorded = window_of(self.survey, self.steps, steps).read()
        found = steps_read(recorded, self.steps.ranks, sorted(steps))
        return analyse_window(recorded, self.alignment, self.steps.ranks, found, self.steps.used)


class Window(Protocol):
    """Steps that are analysed together."""

    @property
    def steps(self) -> tuple[int, ...]: ...

    @property
    def num_rows(self) -> int:
        """Return the number of rows that must be read."""

    def analyse(self) -> _AnalysedWindow: ...


class _AnalysedWindow(NamedTuple):
    analysis: Analysis | None  # None if the files of all of its steps were deleted meanwhile
    steps: tuple[int, ...]  # that are left
    problems: tuple[str, ...]  # of its files


class _WindowInMemory(NamedTuple):
    analysis: Analysis

    @property
    def steps(self) -> tuple[int, ...]:
        return self.analysis.steps.used

    @property
    def num_rows(self) -> int:
        return 0

    def analyse(self) -> _AnalysedWindow:
        return _AnalysedWindow(self.analysis, self.steps, ())


class _WindowInFiles(NamedTuple):
    window: StepWindow
    alignment: Alignment
    ranks: Sequence[int]

    @property
    def steps(self) -> tuple[int, ...]:
        return self.window.steps

    @property
    def num_rows(self) -> int:
        return self.window.num_rows

    def analyse(self) -> _AnalysedWindow:
        recorded = self.window.read()
        steps = steps_read(recorded, self.ranks, self.window.steps)
        if not steps:
            return _AnalysedWindow(None, steps, recorded.problems)
        analysis = analyse_window(recorded, self.alignment, self.ranks, steps, self.window.steps_of_run)
        return _AnalysedWindow(analysis, steps, recorded.problems)


MOST_KEPT: Final = 256_000_000
"""Bytes of models of windows that are kept: those of about 30 million rows. The other windows are read again."""


@dataclass(slots=True)
class _KeptModels:
    """The models of the first windows, so that a replay reads none of them again."""

    of_windows: dict[tuple[int, ...], ObservedSteps]  # by their steps
    are_all: bool = False
    num_bytes: int = 0

    def add(self, steps: tuple[int, ...], model: ObservedSteps) -> None:
        if steps not in self.of_windows and self.num_bytes + model.num_bytes <= MOST_KEPT:
            self.of_windows[steps] = model
            self.num_bytes += model.num_bytes


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """The steps of a run that count, ready to be measured and replayed, window by window."""

    source: _StepsInMemory | _StepsInFiles
    workers: Workers = ALONE
    on_progress: OnProgress | None = None
    _kept: _KeptModels = field(default_factory=lambda: _KeptModels({}), compare=False)

    @classmethod
    def of(cls, analysis: Analysis) -> OpenedRun:
        """Return the steps of a run that was analysed as a whole."""
        return cls(_StepsInMemory(analysis))

    @property
    def is_in_memory(self) -> bool:
        """Return whether all steps are one window, which nothing reads again."""
        return isinstance(self.source, _StepsInMemory)

    @property
    def recorded(self) -> Run:
        """Return the run; if it is not in memory, with few of its rows."""
        return self.source.recorded

    @property
    def aligned(self) -> Run:
        """Return the ranks that count, on one clock; rows of steps are among theirs, and all of them if in memory."""
        return self.source.aligned

    @property
    def alignment(self) -> Alignment:
        return self.source.alignment

    @property
    def steps(self) -> StepChoice:
        return self.source.steps

    def measure(self, measure: Callable[[Analysis], Result]) -> MeasuredRun[Result]:
        """Measure the steps that count.

        Raises:
            RunNotFoundError: a worker does not see the files.
            CommtraceError: a worker died, or all files were deleted meanwhile.
        """
        recorded, steps = self.recorded, self.steps
        sums: Result | None = None
        used, problems = list[int](), list[str]()
        for part in self._each(measure, self.source.windows()):
            used += part.steps
            if part.model is not None:
                self._kept.add(part.steps, part.model)
            if self.on_progress is not None:
                self.on_progress(len(used), len(steps.used))
            problems += part.problems
            if part.result is not None:
                sums = part.result if sums is None else sums + part.result
        self._kept.are_all = len(used) == sum(map(len, self._kept.of_windows))
        if sums is None:
            raise CommtraceError(f"{recorded.path}: all of its steps were deleted while they were read. {problems[0]}")
        if problems:
            recorded = replace(recorded, problems=tuple(dict.fromkeys((*recorded.problems, *problems))))
        if len(used) < len(steps.used):
            steps = replace(steps, used=tuple(used))
        return MeasuredRun(recorded, self.alignment, steps, self.source.counts, sums)

    def read(self, reading: Callable[[ObservedSteps], Result]) -> Result:
        """Return what is read off the models of the steps that count; a window whose model was not kept is read again.

        Raises:
            ReplayError: the steps cannot be replayed.
            CommtraceError: a worker died, or all files were deleted meanwhile.
        """
        parts = {steps: reading(model) for steps, model in self._kept.of_windows.items()}
        if not self._kept.are_all or not parts:
            windows = (window for window in self.source.windows() if window.steps not in parts)
            for part in self._each(partial(_read_model, reading=reading), windows):
                if part.result is not None:
                    parts[part.steps] = part.result
        if not parts:
            raise CommtraceError(f"{self.recorded.path}: all of its steps were deleted while they were read.")
        return reduce(add, (parts[steps] for steps in sorted(parts)))

    @property
    def typical_rows_of_step(self) -> int:
        """Return the median number of rows of a step."""
        return self.source.typical_rows_of_step

    def analyse_steps(self, steps: Sequence[int]) -> Analysis:
        """Analyse some of the steps that count, as far as they still exist, or all of them if they are in memory."""
        return self.source.analyse_steps(steps)

    def replay(self, statistics: StepStatistics) -> Replay:
        """Return a replay of these steps."""
        return Replay(statistics, self.read)

    def _each(
        self, measure: Callable[[Analysis], Result], windows: Iterable[Window]
    ) -> Iterator[_WindowResult[Result]]:
        return _in_order(
            partial(_measure_window, measure=measure), windows, ALONE if self.is_in_memory else self.workers
        )


def survey_large_run(
    files: RunFiles, workers: Workers = ALONE, most_bytes: int = MOST_BYTES, most_rows: int = MOST_ROWS
) -> OpenedRun | None:
    """Survey a large run with marked steps; return None for any other. See :func:`measure_run`."""
    segments = files.segments
    if sum(
        segment.size for segments_of_rank in segments.values() for segment in segments_of_rank
    ) <= most_bytes or _has_few_steps(segments):
        return None
    try:
        survey = survey_run(files, workers.executor)
    except workers.deaths as error:
        raise CommtraceError(f"A worker died while it looked for the steps of {files.directory}. {_ADVICE}") from error
    choice = choose_steps(survey.outline, keep_warm_up=False)
    if not survey.alignment.keeps_order:
        choice = without_torn_steps(choice, survey.aligned)
    return OpenedRun(_StepsInFiles(survey, choice, most_rows), workers) if choice.used else None


def _has_few_steps(segments: Mapping[int, Sequence[Segment]]) -> bool:
    if not segments:
        return False
    first = segments[min(segments)]
    metadata = first[0].metadata
    spans = survey_rank(first, clocks={metadata.rank: (metadata.node, metadata.boot_id)}).trace.spans
    return int(np.count_nonzero(spans.kind == schema.STEP)) < FEWEST_STEPS


@dataclass(frozen=True, slots=True)
class _WindowResult(Generic[Result]):
    """A measurement of these steps; None if the files of all of them were deleted meanwhile."""

    result: Result | None
    steps: tuple[int, ...]
    problems: tuple[str, ...]
    model: ObservedSteps | None = None  # if the measurement has needed it


def _measure_window(window: Window, measure: Callable[[Analysis], Result]) -> _WindowResult[Result]:
    analysis, steps, problems = window.analyse()
    if analysis is None:
        return _WindowResult(None, steps, problems)
    return _WindowResult(measure(analysis), steps, problems, analysis.kept_model)


def _read_model(analysis: Analysis, reading: Callable[[ObservedSteps], Result]) -> Result:
    return reading(analysis.observed)


def _in_order(
    measure: Callable[[Window], _WindowResult[Result]], windows: Iterable[Window], workers: Workers
) -> Iterator[_WindowResult[Result]]:
    """Yield the result of each window, in order. Only as many windows exist at a time as keep all workers busy."""
    if workers.executor is None:
        yield from map(measure, windows)
        return
    waiting: deque[tuple[Window, Future[_WindowResult[Result]]]] = deque()
    for window in windows:
        waiting.append((window, _submitted(measure, window, workers.executor)))
        if len(waiting) > 2 * workers.num_workers:
            yield _result(*waiting.popleft(), workers)
    while waiting:
        yield _result(*waiting.popleft(), workers)


def _submitted(
    measure: Callable[[Window], _WindowResult[Result]], window: Window, executor: Executor
) -> Future[_WindowResult[Result]]:
    try:
        return executor.submit(measure, window)
    except BrokenExecutor as error:  # a worker has died of one that waits already, which is to be named
        failed: Future[_WindowResult[Result]] = Future()
        failed.set_exception(error)
        return failed


def _result(window: Window, future: Future[_WindowResult[Result]], workers: Workers) -> _WindowResult[Result]:
    try:
        return future.result()
    except workers.deaths as error:
        first, last = window.steps[0], window.steps[-1]
        raise CommtraceError(
            f"A worker died before the window of steps {first} to {last} was measured, for which {window.num_rows:,} "
            f"rows are read. {_ADVICE}"
        ) from error
