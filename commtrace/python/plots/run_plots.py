"""The figures of a run, for notebooks, papers and tickets.

>>> commtrace.open("commtrace-runs/my-run").plot.timeline(step=12).save("step-12.svg")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Collection

from commtrace.analysis.judged_run import judge_run, measure_job
from commtrace.analysis.rank_steps import rank_steps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.step_totals import time_totals
from commtrace.analysis.timeline import Timeline, step_durations, typical_step
from commtrace.analysis.windows.run import OpenedRun
from commtrace.errors import ConfigurationError
from commtrace.findings.finding import SLOW
from commtrace.findings.formatting import format_ranges, ranges
from commtrace.python.plots.breakdown import By, draw_breakdown
from commtrace.python.plots.heat_map import SLOWNESS, draw_heat_map
from commtrace.python.plots.style import Plot
from commtrace.python.plots.timeline import ColourBy, draw_timeline


class RunPlots:
    """Draws a run with matplotlib (``pip install 'commtrace[plot]'``), in the colours of the report.

    Every method raises MissingExtraError if matplotlib is not installed.
    """

    def __init__(self, run: OpenedRun) -> None:
        self._run = run

    def timeline(
        self, step: int | None = None, ranks: Collection[int] | None = None, colour_by: ColourBy = "kind"
    ) -> Plot:
        """Draw a step: a row per rank with its work, and its stalls hatched as long as somebody was late.

        Args:
            step: one that counts; by default that of median duration.
            ranks: global ranks; by default all, or of more than 24 the median and the slowest of each stage.
            colour_by: colours of forwards and backwards, ``kind`` or ``microbatch``.

        Raises:
            ConfigurationError: the step does not count, or none of the ranks recorded it.
        """
        durations = step_durations(self._run.aligned, self._run.steps.used)
        if step is None and durations:
            step = typical_step(durations)
        if step is not None and step not in durations:
            raise ConfigurationError(
                f"step {step} cannot be drawn: {self._run.steps.left_out.get(step, 'it was not recorded')}. "
                + (f"These can: {format_ranges(ranges(durations))}" if durations else "The run has no steps")
            )
        timeline = Timeline.of_analysis(self._run.analyse_steps([] if step is None else [step]))
        if step is None or step not in timeline.steps:
            if not timeline.steps:
                raise ConfigurationError(f"{self._run.recorded.path}: there is nothing to draw")
            step = timeline.steps[0]  # the whole recording, which has no steps
        return draw_timeline(timeline, step, self._run.recorded.any_metadata.run_id, ranks, colour_by)

    def breakdown(self, by: By | None = None) -> Plot:
        """Draw the parts of the mean step as stacked bars.

        Args:
            by: ``rank``, ``stage``, ``host`` or ``replica``; by default ``rank``, or ``stage`` of more than 64 ranks.

        Raises:
            ConfigurationError: ``by`` is none of these.
        """
        measured = self._run.measure(time_totals)
        means = measured.result.means(measured.recorded)
        return draw_breakdown(means, self._run.recorded.any_metadata.run_id, len(measured.steps.used) or 1, by)

    def heat_map(self, value: str = SLOWNESS, rows: str | None = None, columns: str | None = None) -> Plot:
        """Draw a value of every rank in two dimensions.

        Args:
            value: ``slowness``, ``compute``, ``wait``, ``exposed``, ``bubble``, ``step``, ``bandwidth`` or
                ``clock offset``.
            rows: ``rank``, ``host`` or a parallel dimension; by default ``dp``, or ``rank`` if not both
                dp and pp vary.
            columns: the same, or ``step``; by default ``pp``, or ``step``.

        Raises:
            ConfigurationError: one of them is none of these, or the value is not known of this run.
        """
        measured = self._run.measure(rank_steps)
        work, named = self._work_and_named() if value == SLOWNESS else (None, frozenset[int]())
        return draw_heat_map(measured.recorded, measured.alignment, measured.result, work, value, rows, columns, named)

    def _work_and_named(self) -> tuple[StepStatistics | None, frozenset[int]]:
        """Return the work of the steps, and the ranks that findings name."""
        sums = self._run.measure(measure_job).result
        slow = (one for one in judge_run(self._run, sums).findings if one.kind == SLOW)
        return sums.stragglers.work.joined().steps, frozenset(rank for one in slow for rank in one.ranks)
