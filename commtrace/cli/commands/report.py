"""``commtrace report RUN -o report.html``: a run as one page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from commtrace.analysis.chain import Analysis
from commtrace.analysis.pipeline.plan import PlanTimeline, plan_of, plan_timeline
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.summary import SummarySums, measure_summary, summarise_measured
from commtrace.analysis.timeline import Timeline, step_durations
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    ClusterOption,
    RunsArgument,
    StepsOption,
    WorkersOption,
    chosen_workers,
    run_directory,
)
from commtrace.cli.commands.history import keep_summary
from commtrace.viewer.choice import MOST_STEPS, steps_to_draw
from commtrace.viewer.maps import MapSums, map_views, measure_maps
from commtrace.viewer.network import NetworkSums, measure_network, network_views
from commtrace.viewer.overview import critical_tables, overview
from commtrace.viewer.report import render


def report(
    runs: RunsArgument = DEFAULT_RUNS,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    steps: StepsOption = "",
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Write the timeline and the breakdown of a run as one HTML file.

    It opens offline. The timeline holds up to ten steps, the typical and the slowest one among them, or all steps
    that --steps asks for.
    """
    path = run_directory(runs)
    with Console(stderr=True).status(f"Writing {output}"), chosen_workers(workers, cluster) as chosen:
        run = open_run(path.absolute() if cluster else path, steps or None, chosen)
        measured = run.measure(_measure)
        sums = measured.result.summary.joined()
        summary = summarise_measured(run, replace(measured, result=sums), is_whole=not steps)
        most_steps = None if steps else MOST_STEPS
        durations = step_durations(run.aligned, run.steps.used)
        drawn = sorted(steps_to_draw(durations, most_steps))
        analysis = run.read_steps(drawn)
        timeline = Timeline.of_analysis(analysis)
        page = render(
            summary,
            timeline,
            durations=durations or None,
            plan=_plan(analysis, drawn) if summary.pipeline else None,
            most_steps=most_steps,
            views={
                **overview(summary),
                **dict(critical_tables(analysis, timeline, drawn)),
                **map_views(measured.result.maps.times, sums.work.steps),
                **network_views(run.aligned, measured.result.network),
            },
        )
        output.write_text(page.html, encoding="utf-8")
    if len(runs) == 1 and not steps:
        keep_summary(run.recorded, summary, by="report")
    typer.echo(summary.verdict)
    typer.echo(f"{output}: {len(page.html.encode()) / 1e6:.1f} MB. {page.note}".rstrip())
    typer.echo(f"Next: open it in a browser, or see every event: commtrace export {shlex.join(map(str, runs))}")


@dataclass(frozen=True, slots=True)
class _ReportSums:
    """All that a report needs of some steps, measured together: each window of a large run is read once for it."""

    summary: SummarySums
    maps: MapSums
    network: NetworkSums

    def __add__(self, later: _ReportSums) -> _ReportSums:
        return _ReportSums(self.summary + later.summary, self.maps + later.maps, self.network + later.network)


def _measure(analysis: Analysis) -> _ReportSums:
    return _ReportSums(measure_summary(analysis), measure_maps(analysis), measure_network(analysis))


def _plan(analysis: Analysis, drawn: Sequence[int]) -> PlanTimeline | None:
    """Return the schedule with the mean forwards and backwards of these steps; None if there is none."""
    rows = analysis.replayed
    try:
        plan = plan_of(rows.run, build_program(rows.run, rows.matches, np.array(drawn, np.int64)))
    except ReplayError:
        return None  # the summary met the same error, and reports it
    return plan_timeline(rows.run, plan) if plan else None
