"""The cost of recording as a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.cli.units import UNKNOWN, duration, num_bytes


def print_overhead(console: Console, told: Mapping[str, Any]) -> None:
    """Print what :func:`commtrace.analysis.comparison.overhead.summarise_overhead` found."""
    console.print(f"[bold]Overhead of recording[/] {escape(shlex.join(told['command']))}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("without", "with", "ratio", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_steps = told["clock"] == "optimizer"
    rows = {"step time" if by_steps else "wall time": told["step_time"], "CPU time of the job": told["job_cpu"]}
    if told["step_cpu"]:
        rows["CPU time per step and rank"] = told["step_cpu"]
    for name, one in rows.items():
        table.add_row(name, duration(one["without"]), duration(one["with"]), *_ratio(one["ratio"]))
    if told["noise"]:
        table.add_row("noise: without / without", "", "", *_ratio(told["noise"]))
    console.print(table)
    memory, recorded = told["memory_bytes"], told["recorded"]
    if memory:
        console.print(
            f"Memory: {_signed(memory['median'])} per rank at its peak (median; most {_signed(memory['max'])})"
        )
    if recorded["steps"]:
        console.print(
            f"Files: {num_bytes(round(recorded['bytes_per_step']))} per step and rank, "
            f"{recorded['bytes_per_span']:.1f} bytes per span, {recorded['spans_per_step']:.0f} spans per step"
        )
    dropped = ", ".join(f"{count} {kind}" for kind, count in recorded["dropped"].items())
    console.print(f"Dropped: {dropped or 'nothing'}")
    console.print(
        f"Medians over {told['pairs']} pairs of runs that took turns. "
        + ("" if by_steps else "No process stepped a torch optimizer and ended in order: whole runs were timed. ")
        + "The job's CPU time includes the start of its processes.",
        style="dim",
    )


def _ratio(ratio: Mapping[str, float] | None) -> tuple[str, str]:
    if ratio is None:
        return UNKNOWN, UNKNOWN
    return f"{ratio['median']:.3f}", f"{ratio['low']:.3f}–{ratio['high']:.3f}"


def _signed(count: int) -> str:
    return f"{'−' if count < 0 else '+'}{num_bytes(abs(count))}"
