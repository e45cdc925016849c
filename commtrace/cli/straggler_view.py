"""Verdicts on stragglers as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.straggler_verdict import cause_in_words
from commtrace.cli.units import milliseconds


def print_stragglers(
    console: Console, stragglers: Sequence[Mapping[str, Any]], *, on_gpu: bool = False, with_next_step: bool = False
) -> None:
    """Print the verdicts, dearest first."""
    for straggler in stragglers:
        hours = f", {straggler['gpu_hours_per_day']:.3g} GPU-hours per day" if on_gpu else ""
        typical = "mean" if straggler["cause"] in ("data", "gc") else "median"
        cost = f"costs {milliseconds(straggler['cost_ms_per_step'] * 1e6)} ms per step ({typical}){hours}"
        if straggler["occurrence"]:
            cost = f"{straggler['occurrence']}, which spread over all steps {cost}"
        console.print(
            f"[bold red]Straggler: {escape(straggler['who'])}[/], {cause_in_words(straggler['cause'])}: {cost}"
        )
        for text in (straggler["evidence"], *([straggler["next_step"]] if with_next_step else [])):
            # Not rich's padding, which fills every line with blanks up to the width.
            indented = textwrap.fill(text, console.width - 2, initial_indent="  ", subsequent_indent="  ")
            console.print(escape(indented), style=None if text is straggler["evidence"] else "bold")
        console.print()


def print_awaited(console: Console, awaited: Sequence[Mapping[str, Any]]) -> None:
    """Say for whom the others waited and what it did meanwhile, if one rank stands out."""
    if awaited and awaited[0]["stands_out"]:
        console.print(escape(f"Waited for most: {awaited[0]['in_words']}. {awaited[0]['next_step']}"))
