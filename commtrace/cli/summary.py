"""``commtrace summary RUN``: where the time went, in a terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from commtrace.analysis.side_by_side import beside
from commtrace.analysis.window import load_window
from commtrace.cli.arguments import NEWEST_RUN, RunArgument
from commtrace.cli.workers import ExecutorOption, step_workers


def summary(
    run: RunArgument = NEWEST_RUN,
    steps: Annotated[
        str,
        typer.Option(
            help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A. Default: all but the first.",
            show_default=False,
        ),
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Show every rank; without, the extremes of more than 16.")
    ] = False,
    executor: ExecutorOption = "",
) -> None:
    """Print where the time of a run went, and what to look at.

    Every rank's mean step is divided, exactly, into compute, time exposed to communication, pipeline bubble, input,
    checkpoints, garbage collection and what is in no span; then come communication by role and operation, the
    pipeline, stragglers, and one sentence that says what to look at. The first step is left out as warm-up unless
    --steps says which steps to use.
    """
    with step_workers(executor) as workers, beside(load_window, run, steps or None) as window:
        from commtrace.analysis.summary import summarise  # while the files are read

        told = summarise(window(), steps or None, workers)
    if json_output:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
        return
    from commtrace.cli.console import wide_console  # rich, which takes a while to import: only for tables
    from commtrace.cli.summary_view import print_summary

    print_summary(wide_console(), told, all_ranks=all_ranks)
