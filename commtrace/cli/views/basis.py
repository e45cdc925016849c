"""The basis of a run's numbers: the alignment of its clocks, the problems of its files, the steps in detail."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.steps.detail import RecordedDetail, TriggeredSteps
from commtrace.cli.units import duration, milliseconds, num_bytes


def print_basis(console: Console, alignment: Alignment, problems: Iterable[str]) -> None:
    """Print the alignment of the hosts' clocks, and the problems of the run's files."""
    console.print(clock_line(alignment), style="dim")
    if alignment.refused:
        console.print(f"[yellow]! Clocks are not aligned:[/] {escape(alignment.refused)}")
    for problem in problems:
        console.print(f"[yellow]![/] {escape(problem)}")


def clock_line(alignment: Alignment) -> str:
    """Return the method of the alignment, with its residual."""
    residual = alignment.residual_ns
    if alignment.refused is not None:
        return f"Clocks: [yellow]{escape(alignment.method)}[/]"
    if not alignment.observations:
        return f"Clocks: {escape(alignment.method)}"
    return (
        f"Clocks: {escape(alignment.method)}, {alignment.observations} observations, residual "
        f"{duration(residual['p50'])} (p50), {duration(residual['p99'])} (p99), {duration(residual['max'])} (max)"
    )


_MOST_SUMS: Final = 12


def detail_lines(detail: RecordedDetail) -> Iterable[str]:
    """Yield the detail and triggers of a run; nothing for a run that is in detail as a whole."""
    times = detail.step_time_ns
    if times and (detail.steps_in_detail < detail.steps or detail.every != 1):
        every = detail.every
        rule = f"1 step in {every}" if every else "only steps that were asked for"
        yield (
            f"Detail: {rule} ({detail.steps_in_detail} of {detail.steps} steps). Step times of all steps: "
            f"{duration(times.p50)} (p50), {duration(times.p99)} (p99), {duration(times.max)} (max)"
        )
    for trigger in detail.triggers:
        yield _trigger_line(trigger)
    discarded = detail.discarded
    if discarded:
        at = datetime.fromtimestamp(discarded.at_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        upto = f"up to step {discarded.last_step}, " if discarded.last_step >= 0 else ""
        yield (
            f"Discarded to keep to the budget: {upto}{discarded.segments} files, {num_bytes(discarded.num_bytes)} "
            f"on {discarded.ranks} rank{'s' * (discarded.ranks != 1)}, last at {at}"
        )


def _trigger_line(trigger: TriggeredSteps) -> str:
    line = f"Triggered: steps {trigger.first}–{trigger.end - 1} in detail"
    if not trigger.late:
        return line
    late = ", ".join(f"rank {rank} (at step {step})" for rank, step in trigger.late.items())
    return f"{line}; [yellow]seen too late by {escape(late)}[/]: these begin later"


def print_sums(console: Console, detail: RecordedDetail) -> None:
    """Print the means of the steps that are not in detail."""
    sums = detail.sums
    if not sums:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("span", "role", "operation"):
        table.add_column(heading, overflow="fold")
    for heading in ("count", "time", "bytes", "longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in sums[:_MOST_SUMS]:
        table.add_row(
            one.kind,
            escape(one.role),
            escape(one.name),
            f"{one.count:.4g}",
            milliseconds(one.time_ns),
            num_bytes(one.num_bytes) if one.num_bytes else "",
            milliseconds(one.longest_ns),
        )
    console.print("[bold]Steps not in detail, mean per rank and step, ms[/]")
    console.print(table)
    if len(sums) > _MOST_SUMS:
        console.print(f"{len(sums) - _MOST_SUMS} more with --json.", style="dim")
    console.print()
