"""``commtrace doctor RUN``: what was seen and what was not, and where a job hangs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from commtrace.analysis.hangs.diagnosis import examine
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, run_directory
from commtrace.cli.console import wide_console
from commtrace.cli.flight_records import read_flight_calls
from commtrace.cli.views.doctor import print_doctor
from commtrace.trace.processes import process_state

_FINDINGS = 1


def doctor(
    runs: RunsArgument = DEFAULT_RUNS,
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            help="Dumps of torch's flight recorder to merge in: files (repeat the option), what their names begin "
            "with, or their directory.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Say of every rank what it did last, not only of those concerned.")
    ] = False,
) -> None:
    """Print what a recording holds and misses, and where its job hangs.

    Works on the files of a job that hangs, was killed, or still runs. Names, per process group, the number of the
    communication at which it stopped, who had arrived and who had not, what each was doing, and the rank at the root.
    Then come the ranks, the coverage of every group, and paths that cannot be seen. Exit code: 0 if nothing was found,
    1 if something was, 2 if the run cannot be read.
    """
    run = run_directory(runs)
    flight_calls = read_flight_calls(flight_recorder or [])
    diagnosis = examine(run, now_ns=time.time_ns(), ask=process_state, all_ranks=all_ranks, flight_calls=flight_calls)
    if json_output:
        sys.stdout.write(json.dumps(diagnosis.to_json(), allow_nan=False) + "\n")
    else:
        print_doctor(wide_console(), diagnosis, now_ns=time.time_ns())
    if not diagnosis.is_healthy:
        raise typer.Exit(_FINDINGS)
