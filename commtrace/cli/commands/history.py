"""``commtrace list [DIR]``: the runs of a directory, with their verdicts."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from commtrace.cli.arguments import RunsDirectoryArgument
from commtrace.cli.console import wide_console
from commtrace.cli.views.history import print_runs
from commtrace.history.runs import list_runs
from commtrace.trace.files.locate import RUNS
from commtrace.trace.processes import process_state


def list_(
    directory: RunsDirectoryArgument = RUNS,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
) -> None:
    """List the runs of a directory: when, how long, ranks, hosts, steps, step time, how it ended, and the verdict.

    The newest run is the last line. The verdict is what summary, straggler or report found when one of them read the
    whole run, else what the monitor named; "–" if neither judged it. Folders that hold no readable run are listed with
    the reason. Verdicts are kept in commtrace-history.sqlite beside the runs.
    """
    runs = list_runs(directory, now_ns=time.time_ns(), ask=process_state)
    if json_output:
        sys.stdout.write(json.dumps(runs.to_json(), allow_nan=False) + "\n")
    else:
        print_runs(wide_console(), runs)
