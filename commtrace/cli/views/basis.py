"""The basis of a run's numbers: the alignment of its clocks, and the problems of its files."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.clocks.align import Alignment
from commtrace.cli.units import duration


def print_basis(console: Console, alignment: Alignment, problems: Iterable[str]) -> None:
    """Print both above the numbers.

    Args:
        console: where to.
        alignment: of the hosts' clocks.
        problems: of the run's files, in sentences.
    """
    console.print(clock_line(alignment), style="dim")
    if alignment.refused:
        console.print(f"[yellow]! Clocks are not aligned:[/] {escape(alignment.refused)}")
    for problem in problems:
        console.print(f"[yellow]![/] {escape(problem)}")


def clock_line(alignment: Alignment) -> str:
    """Return how the clocks were brought together, with what is left between them."""
    residual = alignment.residual_ns
    if alignment.refused is not None:
        return f"Clocks: [yellow]{escape(alignment.method)}[/]"
    if not alignment.observations:
        return f"Clocks: {escape(alignment.method)}"
    return (
        f"Clocks: {escape(alignment.method)}, {alignment.observations} observations, residual "
        f"{duration(residual['p50'])} (p50), {duration(residual['p99'])} (p99), {duration(residual['max'])} (max)"
    )
