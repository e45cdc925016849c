"""``commtrace report RUN -o report.html``: a run as one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.pipeline.plan import plan_of, plan_timeline
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import build_program
from commtrace.analysis.summary import summarise_analysis
from commtrace.analysis.timeline import Timeline
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, run_directory
from commtrace.cli.verdicts import keep_analysis
from commtrace.viewer.report import MOST_STEPS, render


def report(
    runs: RunsArgument = DEFAULT_RUNS,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    steps: Annotated[
        str, typer.Option(help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A.", show_default=False)
    ] = "",
) -> None:
    """Write the timeline and the breakdown of a run as one HTML file.

    It opens offline. The timeline holds up to ten steps, the typical and the slowest one among them, or all steps
    that --steps asks for.
    """
    run = run_directory(runs)
    with Console(stderr=True).status(f"Writing {output}"):
        analysis = analyse(run, steps or None)
        summary = summarise_analysis(analysis, is_whole=not steps)
        page = render(
            summary,
            Timeline.of_analysis(analysis),
            plan=_plan(analysis) if summary.pipeline else None,
            most_steps=None if steps else MOST_STEPS,
        )
        output.write_text(page.html, encoding="utf-8")
    if len(runs) == 1 and not steps:
        keep_analysis(
            analysis.recorded,
            summary.stragglers,
            summary.abstentions,
            by="report",
            attempt=summary.run.attempt,
            used_steps=summary.run.steps.used,
        )
    typer.echo(summary.verdict)
    typer.echo(f"{output}: {len(page.html.encode()) / 1e6:.1f} MB. {page.note}".rstrip())
    typer.echo(f"Next: open it in a browser, or see every event: commtrace export {shlex.join(map(str, runs))}")


def _plan(analysis: Analysis) -> dict[str, Any] | None:
    """Return the schedule with mean forwards and backwards, to be drawn beside the real one; None where it cannot be
    had.
    """
    try:
        plan = plan_of(analysis.run, build_program(analysis.run, analysis.matches))
    except ReplayError:
        return None  # the summary met the same error, and tells it
    return plan_timeline(analysis.run, plan) if plan else None
