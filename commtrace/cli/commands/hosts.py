"""``commtrace hosts [DIR]``: the hosts that were named, over all runs of a directory."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from commtrace.cli.arguments import RunsDirectoryArgument
from commtrace.cli.console import wide_console
from commtrace.cli.views.history import print_hosts
from commtrace.history.hosts import tally_hosts
from commtrace.history.runs import list_runs
from commtrace.trace.files.locate import RUNS
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.processes import process_state


def hosts(
    directory: RunsDirectoryArgument = RUNS,
    all_hosts: Annotated[bool, typer.Option("--all", help="Print also the hosts that were never named.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print which hosts were named in how many runs, why, and what they cost, because a bad node comes back.

    The rate is the share of the judged runs in which a host was named. A run is judged when summary, straggler or
    report has read all of it, or when the monitor watched it; a host that both name counts once. Runs that were
    deleted still count if they had been listed or judged before.
    """
    runs = list_runs(directory, now_ns=time.time_ns(), ask=process_state)
    report = tally_hosts(runs.entries)
    if json_output:
        printed = {"path": str(runs.path), **fields_to_json(report), "problems": runs.problems}
        sys.stdout.write(json.dumps(printed, allow_nan=False) + "\n")
    else:
        print_hosts(wide_console(), report, runs.problems, all_hosts=all_hosts)
