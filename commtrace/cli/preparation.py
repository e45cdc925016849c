"""Prepares the process of a command that works through a run: its libraries, its interpreter."""

from __future__ import annotations

from collections.abc import Callable

from commtrace.cli.interpreter import run_for_analysis
from commtrace.cli.linear_algebra import use_one_thread


def prepare_for_analysis(at_end: Callable[[Callable[[], None]], object]) -> None:
    """Must be called before numpy and pyarrow are imported; ``at_end`` as of :func:`.interpreter.run_for_analysis`."""
    use_one_thread()
    run_for_analysis(at_end)
