"""``commtrace summary RUN``: where the time went, in a terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from commtrace.analysis.summary import summarise
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    ClusterOption,
    RunsArgument,
    WorkersOption,
    chosen_workers,
    run_directory,
)
from commtrace.cli.console import wide_console
from commtrace.cli.verdicts import keep_summary
from commtrace.cli.views.summary import print_summary


def summary(
    runs: RunsArgument = DEFAULT_RUNS,
    steps: Annotated[
        str,
        typer.Option(
            help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A. Default: all but the first.",
            show_default=False,
        ),
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank. Default: of more than 16, the extremes.")
    ] = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print where the time of a run went, and what to look at.

    The verdict stands first: one sentence that says what to look at, and the stragglers. Without --steps, the wall time
    of the whole run follows (training steps, evaluation, checkpoints, loading, start, restarts) with the goodput. Then
    every rank's mean step is divided, exactly, into compute, exposed communication, pipeline bubble, input,
    checkpoints, garbage collection and time in no span. Then come the critical path of the job's step, lost time by
    cause, communication by role and operation, and the pipeline. The first step is left out as warm-up unless --steps
    includes it.
    """
    run = run_directory(runs)
    with chosen_workers(workers, cluster) as chosen:
        found = summarise(run.absolute() if cluster else run, steps or None, chosen)
    if json_output:
        sys.stdout.write(json.dumps(found.to_json(), allow_nan=False) + "\n")
    else:
        print_summary(wide_console(), found, all_ranks=all_ranks)
    if len(runs) == 1 and not steps:
        keep_summary(run, found, by="summary")
