"""Verdicts on stragglers as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.clocks.time_of_day import date_and_time
from commtrace.analysis.stragglers.verdict import HOST, LINK, cause_in_words
from commtrace.cli.units import milliseconds

_MOST_STRETCHES = 4
_MOST_MEMBERS = 4
_OF_A_NODE = frozenset({"compute", "throttled_device", "communication"})
"""Causes that may go away with the node; a program's own do not, unless a whole host has them."""


def print_stragglers(
    console: Console, stragglers: Sequence[Mapping[str, Any]], *, on_gpu: bool = False, with_next_step: bool = False
) -> None:
    """Print the verdicts, dearest first."""
    for straggler in stragglers:
        hours = f", {straggler['gpu_hours_per_day']:.3g} GPU-hours per day" if on_gpu else ""
        rare = straggler["cause"] in ("data", "gc", "checkpoint", "evaluation") or straggler["persistence"] < 0.5
        typical = "mean" if rare or straggler["stretches"] else "median"
        cost = f"costs {milliseconds(straggler['cost_ms_per_step'] * 1e6)} ms per step ({typical}){hours}"
        if straggler["occurrence"]:
            cost = f"{straggler['occurrence']}; spread over all steps, it {cost}"
        console.print(
            f"[bold red]Straggler: {escape(straggler['who'])}[/], {cause_in_words(straggler['cause'])}: {cost}"
        )
        told = [_when(straggler), straggler["evidence"], _members(straggler) if with_next_step else ""]
        if with_next_step and (straggler["cause"] in _OF_A_NODE or straggler["place"] == HOST):
            end = "one of its ends" if straggler["place"] == LINK else "it"
            told += [", ".join(straggler["devices"]), f"To keep the next job off {end}: {straggler['keep_out']}"]
        for text in (*filter(None, told), *([straggler["next_step"]] if with_next_step else [])):
            # Not rich's padding, which fills every line with blanks up to the width.
            indented = textwrap.fill(text, console.width - 2, initial_indent="  ", subsequent_indent="  ")
            console.print(escape(indented), style="bold" if text is straggler["next_step"] else None)
        console.print()


def _when(straggler: Mapping[str, Any]) -> str:
    """Since which step, and since when in time of day; where it comes and goes, in which stretches."""
    if straggler["stretches"]:
        return _stretches(straggler)
    since = straggler["since_utc"]
    if straggler["occurrence"]:
        return f"First in step {straggler['since_step']}, which began at {date_and_time(since)}." if since else ""
    return f"Since step {straggler['since_step']}, the first one compared" + (
        f": {date_and_time(since)}." if since else "."
    )


def _stretches(straggler: Mapping[str, Any]) -> str:
    """``Slow in steps 30–49, 2026-11-23 14:03:22–14:05:09 UTC (49.3 ms per step).``; of many, the dearest."""
    dearest = sorted(straggler["stretches"], key=lambda one: -one["cost_ms_per_step"])[:_MOST_STRETCHES]
    told = [
        f"{one['first']}–{one['last']}{_at(one)} ({milliseconds(one['cost_ms_per_step'] * 1e6)} ms per step)"
        for one in sorted(dearest, key=lambda one: one["first"])
    ]
    more = len(straggler["stretches"]) - len(dearest)
    return f"Slow in steps {', '.join(told)}" + (f" and {more} more stretches" if more else "") + "."


def _at(stretch: Mapping[str, Any]) -> str:
    since, until = stretch["since_utc"], stretch["until_utc"]
    return f", {date_and_time(since, until)}" if since and until else ""


def _members(straggler: Mapping[str, Any]) -> str:
    """Return what each of several slow ranks costs; of many, ``--json`` tells."""
    members = straggler["members"]
    if not 2 <= len(members) <= _MOST_MEMBERS or members[0]["share_ms_per_step"] is None:
        return ""
    shares = (
        f"rank {one['rank']} {milliseconds(one['share_ms_per_step'] * 1e6)} "
        f"({milliseconds(one['alone_ms_per_step'] * 1e6)})"
        for one in members
    )
    return f"Cost of each rank in ms per step if the others are fixed (saved if only it is): {', '.join(shares)}."


def print_awaited(
    console: Console, awaited: Sequence[Mapping[str, Any]], stragglers: Sequence[Mapping[str, Any]]
) -> None:
    """Say for whom the others waited, if one rank stands out, and what it did meanwhile, if no verdict tells that.

    What to do about it is said by the verdicts alone, so that there is one advice.
    """
    if not awaited or not awaited[0]["stands_out"]:
        return
    first = awaited[0]
    is_named = any(first["rank"] in ranks_of(straggler) for straggler in stragglers)
    told = f"rank {first['rank']} ({first['share']:.0%} of all waiting), named above" if is_named else first["in_words"]
    console.print(escape(f"Waited for most: {told}."))


def ranks_of(straggler: Mapping[str, Any]) -> set[int]:
    """Return the ranks that a verdict names."""
    return {straggler["rank"], *(member["rank"] for member in straggler["members"])}
