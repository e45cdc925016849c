"""What ``commtrace search`` prints of the layouts of a run and of a profile alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

_REASONS_SHOWN: Final = 3


def fastest(fitting: str, memory_gib: float, found: str, how: str = "") -> str:
    """Return the first sentence. ``fitting`` are those that fit, ``found`` says what the fastest of them is like."""
    return f"Fastest of {fitting} that fit into {memory_gib:.4g} GiB{how}: {found}"


def none_fits(tried: str, memory_gib: float) -> str:
    """Return the first sentence if none of those that were tried fits."""
    return f"None of {tried} fits into {memory_gib:.4g} GiB."


def size_words(sizes: Mapping[str, int]) -> list[str]:
    """Return ``tp 2`` and the like for the sizes above 1."""
    return [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["not divided"]


def number_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_not_predicted(console: Console, reasons: Sequence[str]) -> None:
    for sentence in reasons[:_REASONS_SHOWN]:
        console.print(f"! Not predicted: {sentence}", markup=False)
    if len(reasons) > _REASONS_SHOWN:
        console.print(f"! And {len(reasons) - _REASONS_SHOWN} others; --json has all.", markup=False)
