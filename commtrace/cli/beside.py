"""``commtrace plan --against RUN``: what ranks should send beside what they sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.formatting import format_ranges, format_ranks, ranges
from commtrace.analysis.windows.run import measure_run
from commtrace.cli.output import UNKNOWN, num_bytes, wide_console
from commtrace.errors import ConfigurationError
from commtrace.planning.against import Beside, Row, expected_of, expected_of_run, put_beside
from commtrace.planning.counted import count_steps
from commtrace.planning.plan import Plan

_STYLES: Final = {"same": "", "explained": "dim", "different": "bold red"}


def print_beside(path: Path, planned: Plan | None, steps: str, *, json_output: bool) -> NoReturn:
    """Print a plan, or that of the run's own sizes, beside a run; exit with 1 if the run sent something else."""
    measured = measure_run(path, count_steps, steps or None)
    if not measured.steps.used:
        raise ConfigurationError(f"{path}: no step was marked or inferred, so that there is nothing to count in")
    expected, notes = expected_of_run(measured.recorded) if planned is None else (expected_of(planned), planned.notes)
    beside = put_beside(expected, measured.result, (*notes, *measured.recorded.problems))
    if json_output:
        run = {"run": measured.recorded.any_metadata.run_id}
        typer.echo(json.dumps({**run, **beside.to_json()}, indent=2, allow_nan=False))
    else:
        console = wide_console()
        console.print(f"Run {escape(measured.recorded.any_metadata.run_id)}", style="dim")
        _print_beside(console, beside)
    raise typer.Exit(1 if beside.differences else 0)


def _print_beside(console: Console, beside: Beside) -> None:
    console.print(beside.verdict, style="bold", markup=False)
    for note in beside.notes:
        console.print(f"! {note}", markup=False)
    console.print(f"\nCommunication of each rank in one step, as in {_steps(beside.steps)}")
    console.print(_table(beside.rows))
    for row in beside.rows:
        if row.reason:
            where = f"{format_ranks(row.ranks)}, {row.role} {row.operation}"
            console.print(f"\n{where}: {row.reason}", markup=False)


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {format_ranges(ranges(steps))}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("ranks", "role", "operation"):
        table.add_column(name, no_wrap=True)
    for name in ("planned", "sent", "bytes planned", "bytes sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        sent = UNKNOWN if row.measured_bytes is None else num_bytes(row.measured_bytes)
        table.add_row(
            format_ranges(ranges(row.ranks)),
            row.role,
            row.operation,
            f"{row.expected_count:,}",
            f"{row.measured_count:,}",
            num_bytes(row.expected_bytes),
            sent,
            row.verdict,
            style=_STYLES[row.verdict],
        )
    return table
