"""The console on which commands print their tables."""

from __future__ import annotations

from typing import Final

from rich.console import Console

_READABLE_WIDTH: Final = 100


def wide_console() -> Console:
    """A console wide enough for every number, also when the output goes into a file or a pager."""
    console = Console(highlight=False)
    if console.width < _READABLE_WIDTH:
        console.width = _READABLE_WIDTH
    return console
