"""Give notebooks and scripts the results of the commands, as tables and objects.

>>> run = commtrace.open("commtrace-runs/my-run", tables="pandas")        # doctest: +SKIP
>>> run.steps().groupby("rank")["bubble_ns"].mean()                        # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, overload

import pyarrow as pa

from commtrace.analysis.chain import Analysis, analysis_of
from commtrace.analysis.clocks.align import Alignment, apply
from commtrace.analysis.communication.table import CommunicationSums, Detail, communication_sums
from commtrace.analysis.judged_run import judge_run, measure_job
from commtrace.analysis.matched import Matched, match_run
from commtrace.analysis.matching.roles import find_roles
from commtrace.analysis.pipeline.observed import Pipeline, find_pipeline
from commtrace.analysis.step_totals import TimeTotals, time_totals
from commtrace.analysis.steps.choice import ChosenSteps, load_window
from commtrace.analysis.stragglers.baseline import HealthyRun
from commtrace.analysis.stragglers.search import measure_work
from commtrace.analysis.summary import Summary, summarise_steps
from commtrace.analysis.windows.run import MeasuredRun, OpenedRun, Result, survey_large_run
from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.findings.finding import Finding
from commtrace.python import tables as made
from commtrace.python.plots.run_plots import RunPlots
from commtrace.trace.files.locate import NEWEST_RUN
from commtrace.trace.files.reader import find_files, load_files
from commtrace.trace.run import Run

if TYPE_CHECKING:
    import pandas
    import polars

Frame = TypeVar("Frame")
Tables = Literal["arrow", "pandas", "polars"]

_DETAIL: Final = {"operation": Detail.NONE, "size": Detail.SIZE, "group": Detail.GROUP}
_NO_STEPS: Final = "Stragglers were not looked for: no step was recorded in full, so nothing can be compared."


@overload
def open(
    path: str | os.PathLike[str] = NEWEST_RUN, *, steps: str | None = None, tables: Literal["arrow"] = "arrow"
) -> RecordedRun[pa.Table]: ...


@overload
def open(
    path: str | os.PathLike[str] = NEWEST_RUN, *, steps: str | None = None, tables: Literal["pandas"]
) -> RecordedRun[pandas.DataFrame]: ...


@overload
def open(
    path: str | os.PathLike[str] = NEWEST_RUN, *, steps: str | None = None, tables: Literal["polars"]
) -> RecordedRun[polars.DataFrame]: ...


def open(
    path: str | os.PathLike[str] = NEWEST_RUN, *, steps: str | None = None, tables: Tables = "arrow"
) -> RecordedRun[Any]:
    """Read a recorded run.

    Args:
        path: a run directory, a directory that holds exactly one, or ``DIRECTORY/latest``; by default the newest run
            below ``commtrace-runs``.
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``. By default everything is read, and all complete steps but the
            first (the warm-up) count.
        tables: type of tables: ``arrow`` (:class:`pyarrow.Table`), ``pandas`` or ``polars``.

    Raises:
        RunNotFoundError: nothing was recorded there.
        TraceFormatError: the files were written by an incompatible commtrace.
        ConfigurationError: ``steps`` cannot be parsed, none of them was recorded, or ``tables`` is unknown.
        MissingExtraError: pandas or polars is asked for and not installed.
    """
    if tables not in _CONVERSIONS:
        raise ConfigurationError(f"tables={tables!r}: write one of {', '.join(_CONVERSIONS)}")
    convert = _CONVERSIONS[tables]()
    if steps:
        return RecordedRun(load_window(Path(path), steps), steps, convert)
    files = find_files(Path(path))
    return RecordedRun(survey_large_run(files) or load_window(load_files(files)), steps, convert)


class RecordedRun(Generic[Frame]):
    """A recorded run, as :func:`commtrace.open` returns it; docs/python.md documents the tables.

    Results are kept. Of a large run, only :meth:`spans` holds all spans in memory.
    """

    def __init__(
        self, source: ChosenSteps | OpenedRun, steps: str | None, convert: Callable[[pa.Table], Frame]
    ) -> None:
        self._source = source
        self._steps = steps
        self._convert = convert

    def __repr__(self) -> str:
        return f"<commtrace.RecordedRun {self.run_id!r}: {len(self._recorded.ranks)} of {self.world_size} ranks>"

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self._recorded.path

    @property
    def run_id(self) -> str:
        """Return the name of the run."""
        return self._recorded.any_metadata.run_id

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job, recorded or not."""
        return self._recorded.world_size

    @property
    def problems(self) -> tuple[str, ...]:
        """Return sentences about faults of its files; empty without any."""
        return self._recorded.problems

    def spans(self) -> Frame:
        """Return every span, by rank and then by start, on one clock as far as :meth:`align` found one; times in ns."""
        aligned = self._aligned
        return self._convert(made.spans(aligned, find_roles(aligned)))

    def steps(self) -> Frame:
        """Return one row per rank and step: its parts, ns, which add up to ``wall_ns``, or why it does not count."""
        measured = self._time_totals
        recorded = apply(measured.recorded, measured.alignment)
        return self._convert(made.steps(recorded, measured.steps, measured.result.partition()))

    def ranks(self) -> Frame:
        """Return one row per rank: host, device and coordinates, and the mean of its steps, ns."""
        recorded, times = self._recorded, self._time_totals.result
        return self._convert(made.ranks(recorded, times.partition(), times.means(recorded)))

    def communication(self, by: Literal["operation", "size", "group"] = "operation") -> Frame:
        """Return one row per role, operation, group size and reach, the most exposed first.

        Args:
            by: ``size`` divides the rows further by the bytes of a call (powers of two), ``group`` by process group.

        Raises:
            ConfigurationError: ``by`` is none of these.
        """
        if by not in _DETAIL:
            raise ConfigurationError(f"by={by!r}: write one of {', '.join(_DETAIL)}")
        measured = self._measured(partial(_communication, detail=_DETAIL[by]))
        return self._convert(made.communication(measured.result.table(measured.recorded)))

    def partition(self) -> Frame:
        """Return one row per rank, step and state, ns; the states of a step add up to it."""
        return self._convert(made.partition(self._time_totals.result.partition()))

    def pipeline(self) -> Pipeline | None:
        """Return the pipeline with the bubble of each stage, or None if the run has none."""
        return find_pipeline(self._run)

    def findings(self, baseline: RecordedRun[Any] | None = None) -> tuple[Finding, ...]:
        """Return what stops the job, then what slows it and lost time by cost, then what could not be judged.

        Args:
            baseline: a healthy run of the same job, for causes that no comparison of ranks shows.
        """
        normal = None if baseline is None else baseline._as_baseline()
        return judge_run(self._run, self._run.measure(measure_job).result, normal).findings

    def summary(self) -> Summary:
        """Return everything that ``commtrace summary`` prints."""
        return summarise_steps(self._run, is_whole=self._steps is None)

    @property
    def plot(self) -> RunPlots:
        """Return the figures: ``run.plot.timeline(step=12)``, ``breakdown()`` and ``heat_map()``."""
        return RunPlots(self._run)

    def align(self) -> Alignment:
        """Return the alignment of the hosts' clocks, or the reason for its failure."""
        return self._source.alignment if isinstance(self._source, OpenedRun) else self._matched.alignment

    @property
    def _recorded(self) -> Run:
        """Return the run; of a large one, few of its rows."""
        return self._source.recorded

    @property
    def _run(self) -> OpenedRun:
        return self._source if isinstance(self._source, OpenedRun) else OpenedRun.of(self._analysis)

    def _measured(self, measure: Callable[[Analysis], Result]) -> MeasuredRun[Result]:
        return self._run.measure(measure)

    @cached_property
    def _time_totals(self) -> MeasuredRun[TimeTotals]:
        return self._measured(time_totals)

    @cached_property
    def _window(self) -> ChosenSteps:
        """Return every row that was asked for."""
        return load_window(self._recorded.path) if isinstance(self._source, OpenedRun) else self._source

    @cached_property
    def _matched(self) -> Matched:
        return match_run(self._window, self._steps)

    @cached_property
    def _analysis(self) -> Analysis:
        return analysis_of(self._matched)

    @property
    def _aligned(self) -> Run:
        return apply(self._window.recorded, self._matched.alignment)

    def _as_baseline(self) -> HealthyRun:
        work = self._run.measure(measure_work).result.joined()
        if work.steps is None:
            raise ConfigurationError(f"{self.path} is no baseline: {work.why_not}")
        return HealthyRun.of(self._run.aligned, work.steps)


def _communication(analysis: Analysis, detail: Detail) -> CommunicationSums:
    context = analysis.context
    return communication_sums(context.run, context.matches, analysis.partition, context.roles, context.steps, detail)


def _to_arrow() -> Callable[[pa.Table], pa.Table]:
    return lambda table: table


def _to_pandas() -> Callable[[pa.Table], pandas.DataFrame]:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("tables='pandas' needs pandas: pip install 'commtrace[pandas]'") from error

    def column_type(kind: pa.DataType) -> object:
        # With pandas' own types, whole numbers among which one is missing would become floats.
        return None if pa.types.is_dictionary(kind) else pandas.ArrowDtype(kind)

    return lambda table: table.to_pandas(types_mapper=column_type)


def _to_polars() -> Callable[[pa.Table], polars.DataFrame]:
    try:
        import polars
    except ImportError as error:
        raise MissingExtraError("tables='polars' needs polars: pip install 'commtrace[polars]'") from error
    return lambda table: polars.DataFrame(table)


_CONVERSIONS: Final[dict[str, Callable[[], Callable[[pa.Table], Any]]]] = {
    "arrow": _to_arrow,
    "pandas": _to_pandas,
    "polars": _to_polars,
}
