"""How commands load the run that they are told of."""

from __future__ import annotations

from pathlib import Path

from commtrace.analysis.window import Window, load_window
from commtrace.cli.memory import expect_rows


def load(run: Path, steps: str | None) -> Window:
    """The steps asked for; all without any. Errors are those of :func:`commtrace.analysis.window.load_window`."""
    window = load_window(run, steps)
    expect_rows(sum(len(block) for block in window.context.blocks))
    return window
