"""``commtrace pipeline RUN``: the schedule and its bubble, stage by stage."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.markup import escape

from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    ClusterOption,
    RunsArgument,
    WorkersOption,
    chosen_workers,
    run_directory,
)
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
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print the pipeline schedule of a run, and why each stage waits.

    The schedule, stages, chunks and microbatches are reconstructed from the spans. The bubble of every stage is divided
    by phase (warm-up, steady, cool-down) and by cause: the ideal schedule, differences between stages, differences
    between microbatches and ranks, and transfers.
    """
    run = run_directory(runs)
    with chosen_workers(workers, cluster) as chosen:
        opened = open_run(run.absolute() if cluster else run, steps or None, chosen)
        found = find_pipeline(opened)
    alignment, problems = opened.alignment, opened.recorded.problems
    if json_output:
        printed = {**found.to_json(), "alignment": alignment.to_json(), "problems": problems} if found else None
        sys.stdout.write(json.dumps(printed, allow_nan=False) + "\n")
    elif found is None:
        typer.echo("This run has no pipeline: no step of it holds forwards and backwards on several stages.")
    else:
        console = wide_console()
        console.print(f"Run {escape(opened.recorded.any_metadata.run_id)}", style="dim")
        print_basis(console, alignment, problems)
        print_pipeline(console, found)
        console.print(f"Whether one slow rank is behind it: commtrace straggler {escape(str(run))}", style="dim")
