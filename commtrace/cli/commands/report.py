"""``commtrace report RUN -o report.html``: a run as one page."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from commtrace.analysis.pipeline.plan import plan_of_steps
from commtrace.analysis.timeline import Timeline, step_durations
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    AttemptOption,
    ClusterOption,
    JsonOption,
    KeepOption,
    RunsArgument,
    StepsOption,
    WorkersOption,
    check_keeps_whole_run,
    check_output,
    chosen_workers,
    run_directory,
)
from commtrace.cli.commands.history import keep_summary
from commtrace.cli.output import wide_console
from commtrace.recording.installation import own_command
from commtrace.trace.json_values import fields_to_json
from commtrace.viewer.choice import steps_to_draw
from commtrace.viewer.comparison import comparison_resources
from commtrace.viewer.overview import critical_tables, part_tables
from commtrace.viewer.report import render
from commtrace.viewer.whole_run import most_steps_drawn, slowdown_resources, summarise_with_views


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The file that was written."""

    verdict: str
    path: str
    bytes: int
    steps: tuple[int, ...]  # in its timeline, ascending
    left_out: tuple[int, ...]  # of its timeline, ascending; its numbers are those of all steps
    note: str  # sentences on the choice of steps and ranks


def report(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    steps: StepsOption = "",
    against: Annotated[
        Path | None,
        typer.Option(help="Another run: show what differs, and its typical step.", show_default=False),
    ] = None,
    keep: KeepOption = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
    json_output: JsonOption = False,
) -> None:
    """Write the timeline and the breakdown of a run as one HTML file.

    It opens offline. The timeline holds up to ten steps, the typical and the slowest one among them, or all steps
    that --steps asks for. With --against, it shows what differs from another run, and the typical step of that run
    under the steps of this one.
    """
    check_keeps_whole_run(keep, runs, steps, attempt is not None)
    check_output(output)
    path = run_directory(runs, attempt)
    with Console(stderr=True).status(f"Writing {output}"), chosen_workers(workers, cluster) as chosen:
        run = open_run(path.absolute() if cluster else path, steps or None, chosen)
        summary, views, work = summarise_with_views(run, is_whole=not steps)
        other = against.absolute() if against and cluster else against
        compared = comparison_resources(open_run(other, steps or None, chosen), run) if other else {}
        most_steps = None if steps else most_steps_drawn(run)
        durations = step_durations(run.aligned, run.steps.used)
        drawn = sorted(steps_to_draw(durations, most_steps, summary.slow))
        analysis = run.analyse_steps(drawn)
        timeline = Timeline.of_analysis(analysis)
        page = render(
            summary,
            timeline,
            durations=durations or None,
            plan=plan_of_steps(analysis, drawn) if summary.pipeline else None,
            most_steps=most_steps,
            views={
                **views,
                **slowdown_resources(run, work),
                **compared,
                **dict(critical_tables(analysis, timeline, drawn)),
                **dict(part_tables(analysis, timeline, drawn)),
            },
        )
        output.write_text(page.html, encoding="utf-8")
    if keep:
        keep_summary(run.recorded, summary, by="report")
    left_out = tuple(sorted(set(durations) - set(page.embedded)))
    size = output.stat().st_size
    if json_output:
        written = WrittenReport(summary.verdict, str(output), size, page.embedded, left_out, page.note)
        typer.echo(json.dumps(fields_to_json(written), allow_nan=False))
        return
    console = wide_console()
    console.print(summary.verdict, markup=False)
    console.print(f"{output}: {size / 1e6:.1f} MB.", markup=False, soft_wrap=True)
    if page.note:
        console.print(page.note, markup=False)
    following = f"{own_command()} export {shlex.join(map(str, runs))}"
    console.print("Next: open it in a browser, or see every event:", markup=False)
    console.print(f"  {following}", markup=False, soft_wrap=True)
