"""What the page shows of a whole run: its summary, and the views beside it, read in one pass over a large run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.judged_run import RunSums, measure_job
from commtrace.analysis.rank_steps import QUANTITIES, UNKNOWN, RankSteps, own_and_typical_work, rank_steps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.replay.whatif import what_if
from commtrace.analysis.stragglers.search import MeasuredWork
from commtrace.analysis.summary import Summary, summarise_steps
from commtrace.analysis.windows.run import MeasuredRun, OpenedRun
from commtrace.interchange.whatif_study.analysis import slowdown_of_study
from commtrace.planning.call_counts import CallCounts
from commtrace.planning.utilization import recorded_utilization
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64
from commtrace.viewer.choice import MOST_STEPS
from commtrace.viewer.data import Resources, encode_json, encode_table
from commtrace.viewer.expected import count_planned, expected_resources
from commtrace.viewer.health import health_resources
from commtrace.viewer.network import NetworkSums, measure_network, network_resources
from commtrace.viewer.overview import overview_resources

MOST_ROWS_DRAWN: Final = 2_000_000
"""Rows of the steps that a report reads to draw them; more boxes than half of them do not fit into it."""


def most_steps_drawn(run: OpenedRun) -> int:
    """Return how many steps a report of the run draws: as many as can be read at once, and two at least."""
    if run.is_in_memory:
        return MOST_STEPS
    return min(MOST_STEPS, max(2, MOST_ROWS_DRAWN // run.typical_rows_of_step))


@dataclass(frozen=True, slots=True)
class _Sums:
    """All measurements of some steps, made together: each window of a large run is read once for them."""

    summary: RunSums
    times: RankSteps
    network: NetworkSums
    sent: CallCounts

    def __add__(self, later: _Sums) -> _Sums:
        return _Sums(
            self.summary + later.summary,
            self.times + later.times,
            self.network + later.network,
            self.sent + later.sent,
        )


def _measure(analysis: Analysis) -> _Sums:
    return _Sums(measure_job(analysis), rank_steps(analysis), measure_network(analysis), count_planned(analysis))


class SummarisedRun(NamedTuple):
    """The summary of a run, the resources of its views, and the work behind those that take replays."""

    summary: Summary
    views: Resources
    work: MeasuredWork


def summarise_with_views(run: OpenedRun, *, is_whole: bool) -> SummarisedRun:
    """Summarise a run; ``is_whole``: its steps are all that was recorded. ``slowdown_resources`` are not made yet."""
    measured = run.measure(_measure)
    recorded, result = measured.recorded, measured.result
    times, network, sent, sums = result.times, result.network, result.sent, result.summary.joined()
    of_summary = MeasuredRun(recorded, measured.alignment, measured.steps, measured.counts, sums)
    del measured, result  # the parts of the sums can go
    summary = summarise_steps(run, of_summary, is_whole=is_whole)
    views = {
        **overview_resources(summary),
        **_utilization(summary, recorded),
        **map_resources(times, sums.stragglers.work.steps, {rank for slow in summary.slow for rank in slow.ranks}),
        **network_resources(run.aligned, network),
        **health_resources(recorded),
        **expected_resources(recorded, sent),
    }
    return SummarisedRun(summary, views, sums.stragglers.work)


def _utilization(summary: Summary, recorded: Run) -> Resources:
    """Return ``utilization.json``; nothing where the FLOPs of the model or the peak of the device are not known."""
    utilization = recorded_utilization(summary, recorded)
    return {} if utilization is None else {"utilization.json": encode_json(utilization.to_json())}


def map_resources(times: RankSteps, work: StepStatistics | None, slow: Collection[int] = ()) -> Resources:
    """Return the heat maps of the page, ``map.json`` and ``map`` (docs/viewer-data.md).

    ``slow`` are the ranks that findings name: the others of their stage are typical.
    ``work`` is None where the steps could not be replayed: slowness is then not known.
    """
    steps = times.of("steps")
    columns = {"steps": steps}
    columns |= {name: _per_step(times.of(name), steps) for name in QUANTITIES if name != "steps"}
    columns |= dict(zip(("work", "typical_work"), own_and_typical_work(times, work, slow), strict=True))
    described = {
        "ranks": times.ranks.tolist(),
        "blocks": [
            {"first": one, "last": last} for one, last in zip(times.first.tolist(), times.last.tolist(), strict=True)
        ],
    }
    return {
        "map.json": encode_json(described),
        "map": encode_table({name: column.reshape(-1) for name, column in columns.items()}),
    }


def _per_step(sums: Int64, steps: Int64) -> Int64:
    return np.where(steps > 0, np.rint(sums / np.maximum(steps, 1)), UNKNOWN).astype(np.int64)


def slowdown_resources(run: OpenedRun, work: MeasuredWork) -> Resources:
    """Return what the replay says of a run: ``slowdown.json``.

    Nothing where steps cannot be replayed, or would have to be read again for it.
    """
    steps = work.steps
    if not run.is_in_memory or not run.steps.used:
        return {}
    by_study = slowdown_of_study(run.recorded)
    if by_study is not None:
        slowdown = by_study(run.recorded)
    elif steps is not None and steps.measured_ns.any():
        slowdown = what_if(run.aligned, steps, run.replay(steps))
    else:
        return {}
    return {"slowdown.json": encode_json(slowdown.to_json())}
