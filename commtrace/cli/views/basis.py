"""The basis of a run's numbers: the alignment of its clocks, and problems of its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.clocks.align import Alignment
from commtrace.cli.units import duration
from commtrace.trace.run import Run


def basis_of(recorded: Run, alignment: Alignment) -> dict[str, Any]:
    """``alignment`` (residual in ns) and ``problems`` (sentences), as JSON has them beside the numbers."""
    return {"alignment": alignment.to_json(), "problems": list(recorded.problems)}


def print_basis(console: Console, told: Mapping[str, Any]) -> None:
    """Print the result of :func:`basis_of` above the numbers."""
    console.print(clock_line(told["alignment"]), style="dim")
    if told["alignment"]["refused"]:
        console.print(f"[yellow]! Clocks are not aligned:[/] {escape(told['alignment']['refused'])}")
    for problem in told["problems"]:
        console.print(f"[yellow]![/] {escape(problem)}")


def clock_line(alignment: Mapping[str, Any]) -> str:
    """Return how the clocks were brought together, with what is left between them."""
    residual = alignment["residual_ns"]
    if residual is None:
        return f"Clocks: [yellow]{escape(alignment['method'])}[/]"
    if not alignment["observations"]:
        return f"Clocks: {escape(alignment['method'])}"
    return (
        f"Clocks: {escape(alignment['method'])}, {alignment['observations']} observations, residual "
        f"{duration(residual['p50'])} (p50), {duration(residual['p99'])} (p99), {duration(residual['max'])} (max)"
    )
