"""What the page shows of a whole run: its summary, and the views beside it, read in one pass over a large run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.rank_steps import RankSteps, rank_steps
from commtrace.analysis.stragglers.search import MeasuredWork
from commtrace.analysis.summary import Summary, SummarySums, measure_summary, summarise_measured
from commtrace.analysis.windows.run import LargeRun, MeasuredRun, WholeRun
from commtrace.planning.counted import CountedSteps
from commtrace.viewer.choice import MOST_STEPS
from commtrace.viewer.data import Resources
from commtrace.viewer.expected import count_planned, expected_resources
from commtrace.viewer.health import health_resources
from commtrace.viewer.maps import map_resources
from commtrace.viewer.network import NetworkSums, measure_network, network_resources
from commtrace.viewer.overview import overview_resources

MOST_ROWS_DRAWN: Final = 2_000_000
"""Rows of the steps that a report reads to draw them; more boxes than half of them do not fit into it."""


def most_steps_drawn(run: WholeRun | LargeRun) -> int:
    """Return how many steps a report of the run draws: as many as can be read at once, and two at least."""
    if isinstance(run, WholeRun):
        return MOST_STEPS
    return min(MOST_STEPS, max(2, MOST_ROWS_DRAWN // int(np.median(run.survey.rows_of_step.num_rows))))


@dataclass(frozen=True, slots=True)
class _Sums:
    """All measurements of some steps, made together: each window of a large run is read once for them."""

    summary: SummarySums
    times: RankSteps
    network: NetworkSums
    counted: CountedSteps

    def __add__(self, later: _Sums) -> _Sums:
        return _Sums(
            self.summary + later.summary,
            self.times + later.times,
            self.network + later.network,
            self.counted + later.counted,
        )


def _measure(analysis: Analysis) -> _Sums:
    return _Sums(measure_summary(analysis), rank_steps(analysis), measure_network(analysis), count_planned(analysis))


class SummarisedRun(NamedTuple):
    """The summary of a run, the resources of its views, and the work behind those that take replays."""

    summary: Summary
    views: Resources
    work: MeasuredWork


def summarise_with_views(run: WholeRun | LargeRun, *, is_whole: bool) -> SummarisedRun:
    """Summarise a run; ``is_whole``: its steps are all that was recorded. ``slowdown_resources`` are not made yet."""
    measured = run.measure(_measure)
    recorded, result = measured.recorded, measured.result
    times, network, counted, sums = result.times, result.network, result.counted, result.summary.joined()
    of_summary = MeasuredRun(recorded, measured.alignment, measured.steps, measured.counts, sums)
    del measured, result  # the parts of the sums can go
    summary = summarise_measured(run, of_summary, is_whole=is_whole)
    views = {
        **overview_resources(summary),
        **map_resources(times, sums.work.steps),
        **network_resources(run.aligned, network),
        **health_resources(recorded),
        **expected_resources(recorded, counted),
    }
    return SummarisedRun(summary, views, sums.work)
