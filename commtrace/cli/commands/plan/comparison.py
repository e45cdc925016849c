"""``commtrace plan --against RUN``: what ranks should send and hold, compared with what they did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.memory import peak_memory
from commtrace.analysis.windows.run import measure_run
from commtrace.cli.output import UNKNOWN, binary_bytes, num_bytes, wide_console
from commtrace.errors import ConfigurationError
from commtrace.findings.formatting import format_ranges, format_ranks, ranges
from commtrace.planning.call_counts import count_calls
from commtrace.planning.comparison import (
    MemoryRow,
    PlanComparison,
    TrafficRow,
    compare_plan,
    expected_of,
    expected_of_run,
)
from commtrace.planning.plan import Plan
from commtrace.planning.recorded_job import job_differences

_STYLES: Final = {"same": "", "explained": "dim", "different": "bold red"}


def print_comparison(path: Path, planned: Plan | None, steps: str, *, json_output: bool) -> NoReturn:
    """Print a plan, or that of the run's own sizes, beside a run; exit with 1 if the run sent something else."""
    measured = measure_run(path, count_calls, steps or None)
    if not measured.steps.used:
        raise ConfigurationError(f"{path}: no step was marked or inferred, so that there is nothing to count in")
    expected, notes = expected_of_run(measured.recorded) if planned is None else (expected_of(planned), planned.notes)
    comparison = compare_plan(
        expected,
        measured.result,
        (*notes, *measured.recorded.problems),
        peak_memory(measured.recorded),
        () if planned is None else job_differences(measured.recorded, planned),
    )
    if json_output:
        run = {"run": measured.recorded.any_metadata.run_id}
        typer.echo(json.dumps({**run, **comparison.to_json()}, indent=2, allow_nan=False))
    else:
        console = wide_console()
        console.print(f"Run {escape(measured.recorded.any_metadata.run_id)}", style="dim")
        _print_comparison(console, comparison)
    raise typer.Exit(1 if comparison.differences else 0)


def _print_comparison(console: Console, comparison: PlanComparison) -> None:
    console.print(comparison.verdict, style="bold", markup=False)
    for note in comparison.notes:
        console.print(f"! {note}", markup=False)
    console.print(f"\nCommunication of each rank in one step, as in {_steps(comparison.steps)}")
    console.print(_table(comparison.rows))
    for row in comparison.rows:
        if row.reason:
            where = f"{format_ranks(row.ranks)}, {row.role} {row.operation}"
            console.print(f"\n{where}: {row.reason}", markup=False)
    _print_memory(console, comparison.memory)


def _print_memory(console: Console, rows: Sequence[MemoryRow]) -> None:
    if not rows:
        console.print("\nMemory: no rank recorded a peak; ranks that train on a CUDA or ROCm device do.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ranks", no_wrap=True)
    for name in ("parameters", "gradients", "optimizer", "activations", "planned", "peak", "difference", "reserved"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            format_ranges(ranges(row.ranks)),
            *_planned_parts(row),
            binary_bytes(row.measured_bytes),
            UNKNOWN if row.planned is None else _difference(row.measured_bytes - row.planned.peak_bytes),
            binary_bytes(row.reserved_bytes),
        )
    console.print("\nMemory of each rank, planned, and the peak of the fullest of them since its process began")
    console.print(table)
    for row in rows:
        if row.reason:
            console.print(f"\n{format_ranks(row.ranks)}: {row.reason}", markup=False)
    console.print(
        "\nReserved: what torch's allocator held for tensors at its own peak. What is more than the peak was free, or "
        "lost to fragmentation."
    )


def _planned_parts(row: MemoryRow) -> list[str]:
    planned = row.planned
    if planned is None:
        return [UNKNOWN] * 5
    parts = (planned.parameters_bytes, planned.gradients_bytes, planned.optimizer_bytes, planned.activations_bytes)
    return [binary_bytes(part) for part in (*parts, planned.peak_bytes)]


def _difference(num_bytes: int) -> str:
    return f"{'+' if num_bytes > 0 else '−' * (num_bytes < 0)}{binary_bytes(abs(num_bytes))}"


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {format_ranges(ranges(steps))}"


def _table(rows: Sequence[TrafficRow]) -> Table:
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
