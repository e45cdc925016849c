"""``commtrace doctor RUN``: what a recording holds and misses, and where a job hangs."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.flight_recorder import FlightCall
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, run_directory
from commtrace.cli.console import wide_console
from commtrace.cli.views.doctor import print_doctor
from commtrace.errors import ImportFileError
from commtrace.importers.flight_recorder import read_flight_record
from commtrace.trace.processes import process_state

_FINDINGS: Final = 1
_ENDS_WITH_RANK: Final = re.compile(r"\d+(\.(pkl|pickle|bin|json))?$")


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
        bool, typer.Option("--all-ranks", help="Print the last activity of every rank, not only of those concerned.")
    ] = False,
) -> None:
    """Print what a recording holds and misses, and where its job hangs.

    Reads the files of a job that hangs, was killed, or still runs. Names, per process group, the number of the
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


def read_flight_calls(paths: Sequence[Path]) -> list[FlightCall]:
    """Return the collectives in these dumps.

    Args:
        paths: dumps, directories of dumps, or what the names of dumps begin with, such as /tmp/nccl_trace_rank_.

    Raises:
        ImportFileError: there is none, or one cannot be read.
    """
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
