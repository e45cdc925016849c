"""``commtrace doctor [RUN]``: checks the recording here, or finds where a job hangs and what its recording misses."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.flight_recorder import FlightCall
from commtrace.cli.arguments import run_directory
from commtrace.cli.console import wide_console
from commtrace.cli.self_check import check_installation
from commtrace.cli.views.doctor import print_checks, print_doctor
from commtrace.errors import ConfigurationError, ImportFileError
from commtrace.importers.flight_recorder import read_flight_record
from commtrace.trace.processes import process_state

_FINDINGS: Final = 1
_ENDS_WITH_RANK: Final = re.compile(r"\d+(\.(pkl|pickle|bin|json))?$")


def doctor(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="The run directory, or several that hold ranks of one job. Default: none, check the installation.",
            show_default=False,
        ),
    ] = None,
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            help="Dumps of torch's flight recorder to merge in: files (repeat the option), the beginning of their "
            "names, or their directory.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in nanoseconds.")] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Print the last activity of every rank, not only of those concerned.")
    ] = False,
) -> None:
    """Check the installation; or, of a run, print where its job hangs and what the recording misses.

    Without RUN: checks packages and their versions, the COMMTRACE_* variables, the run directory, the addresses of
    exporters, and makes a small recording in a process of its own. Run it where the job runs, in the job's environment.
    Exit code: 1 if the job would not be recorded as configured.

    With RUN: reads the files of a job that hangs, was killed, or still runs. Names what failed or hangs first, per
    process group the communication at which it stopped, the ranks that had arrived and those that had not, what each
    was doing, and the rank at the root. Then come the coverage of every group, and communication that cannot be seen.
    Exit code: 0 if nothing was found, 1 if something was, 2 if the run cannot be read.
    """
    if not runs:
        if flight_recorder or all_ranks:
            raise ConfigurationError(
                "--flight-recorder and --all-ranks are about a run: name it, or commtrace-runs/latest"
            )
        _check_installation(as_json=json_output)
        return
    run = run_directory(runs)
    flight_calls = read_flight_calls(flight_recorder or [])
    diagnosis = examine(run, now_ns=time.time_ns(), ask=process_state, all_ranks=all_ranks, flight_calls=flight_calls)
    if json_output:
        sys.stdout.write(json.dumps(diagnosis.to_json(), allow_nan=False) + "\n")
    else:
        print_doctor(wide_console(), diagnosis, now_ns=time.time_ns())
    if not diagnosis.is_healthy:
        raise typer.Exit(_FINDINGS)


def _check_installation(*, as_json: bool) -> None:
    checks = check_installation(os.environ)
    if as_json:
        sys.stdout.write(json.dumps({"checks": [check.to_json() for check in checks]}) + "\n")
    else:
        print_checks(wide_console(), checks)
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(_FINDINGS)


def read_flight_calls(paths: Sequence[Path]) -> list[FlightCall]:
    """Return the collectives in dumps, folders or prefixes; raise :class:`ImportFileError` without readable ones."""
    return [
        FlightCall(
            record.rank,
            entry.group.ranks,
            entry.group.ordinal,
            entry.operation,
            entry.seq,
            entry.state,
            entry.frames,
        )
        for record in (read_flight_record(path) for given in paths for path in _dumps(given))
        for entry in record.entries
        if entry.group is not None and not entry.is_p2p
    ]


def _dumps(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    folder, begin = (given, "") if given.is_dir() else (given.parent, given.name)
    listing = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [
        path for path in listing if path.name.startswith(begin) and path.is_file() and _ENDS_WITH_RANK.search(path.name)
    ]
    if not found:
        raise ImportFileError(
            f"{given}: no dumps of the flight recorder. Give the files that TORCH_NCCL_DEBUG_INFO_TEMP_FILE names, "
            "what their names begin with, or their directory; the names end with the rank."
        )
    return found
