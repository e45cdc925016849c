"""What ``commtrace summary`` does once its words are understood; without typer, which takes a while to import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commtrace.analysis.side_by_side import beside
from commtrace.analysis.window import load_window

if TYPE_CHECKING:
    from commtrace.analysis.step_parts import StepWorkers


def tell_summary(
    run: Path, steps: str | None, workers: StepWorkers | None, *, json_output: bool, all_ranks: bool
) -> None:
    """Print it; arguments and errors are those of :func:`commtrace.analysis.summary.summarise`."""
    with beside(load_window, run, steps) as window:
        # While the files are read: what is imported here would later have the only core at work.
        from commtrace.analysis.summary import summarise

        if not json_output:
            import commtrace.cli.summary_view  # noqa: F401 - and rich with it

        told = summarise(window(), steps, workers)
    if json_output:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
        return
    from commtrace.cli.console import wide_console
    from commtrace.cli.summary_view import print_summary

    print_summary(wide_console(), told, all_ranks=all_ranks)
