"""``commtrace pipeline RUN``: the schedule and its bubble, stage by stage."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.markup import escape

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline.observed import reconstruct_pipeline
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, run_directory
from commtrace.cli.console import wide_console
from commtrace.cli.views.basis import print_basis
from commtrace.cli.views.summary import print_pipeline


def pipeline(
    runs: RunsArgument = DEFAULT_RUNS,
    steps: Annotated[
        str,
        typer.Option(help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A.", show_default=False),
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
) -> None:
    """Print the pipeline schedule of a run, and why each stage waits.

    The schedule, stages, chunks and microbatches are reconstructed from the spans. The bubble of every stage is divided
    by phase (warm-up, steady, cool-down) and by cause: the ideal schedule, differences between stages, differences
    between microbatches and ranks, and transfers.
    """
    run = run_directory(runs)
    analysis = analyse(run, steps or None)
    found = reconstruct_pipeline(analysis.run, analysis.matches, analysis.roles) if analysis.steps.used else None
    alignment, problems = analysis.alignment, analysis.recorded.problems
    if json_output:
        printed = {**found.to_json(), "alignment": alignment.to_json(), "problems": problems} if found else None
        sys.stdout.write(json.dumps(printed, allow_nan=False) + "\n")
    elif found is None:
        typer.echo("This run has no pipeline: no step of it holds forwards and backwards on several stages.")
    else:
        console = wide_console()
        console.print(f"Run {escape(analysis.recorded.any_metadata.run_id)}", style="dim")
        print_basis(console, alignment, problems)
        print_pipeline(console, found)
        console.print(f"Whether one slow rank is behind it: commtrace straggler {escape(str(run))}", style="dim")
