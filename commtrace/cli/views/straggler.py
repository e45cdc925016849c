"""Verdicts on stragglers as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.clocks.time_of_day import date_and_time
from commtrace.analysis.stragglers.awaited import Awaited
from commtrace.analysis.stragglers.report import NodesOfVerdict
from commtrace.analysis.stragglers.verdict import HOST, LINK, Stretch, Verdict, cause_in_words
from commtrace.cli.units import milliseconds

_MOST_STRETCHES = 4
_MOST_MEMBERS = 4
_OF_A_NODE = frozenset({"compute", "throttled_device", "communication"})
"""Causes that another node may remove."""


def print_stragglers(
    console: Console,
    stragglers: Sequence[Verdict],
    *,
    on_gpu: bool = False,
    nodes: Sequence[NodesOfVerdict] | None = None,
) -> None:
    """Print the verdicts, the costliest first, with GPU-hours if ``on_gpu``.

    ``nodes`` has the devices of each verdict and how to keep them out of the next job; with it, print the next step.
    """
    for position, straggler in enumerate(stragglers):
        hours = f", {straggler.gpu_hours_per_day:.3g} GPU-hours per day" if on_gpu else ""
        rare = straggler.cause in ("data", "gc", "checkpoint", "evaluation") or straggler.persistence < 0.5
        typical = "mean" if rare or straggler.stretches else "median"
        cost = f"costs {milliseconds(straggler.cost_ms_per_step * 1e6)} ms per step ({typical}){hours}"
        if straggler.occurrence:
            cost = f"{straggler.occurrence}; spread over all steps, it {cost}"
        console.print(f"[bold red]Straggler: {escape(straggler.who)}[/], {cause_in_words(straggler.cause)}: {cost}")
        for text in filter(None, (_when(straggler), straggler.evidence)):
            _print_indented(console, text)
        if nodes is not None:
            for text in filter(None, (_members(straggler), *_nodes(straggler, nodes[position]))):
                _print_indented(console, text)
            _print_indented(console, straggler.next_step, style="bold")
        console.print()


def _print_indented(console: Console, text: str, style: str | None = None) -> None:
    # Not rich's padding, which fills every line with blanks up to the width.
    indented = textwrap.fill(text, console.width - 2, initial_indent="  ", subsequent_indent="  ")
    console.print(escape(indented), style=style)


def _nodes(straggler: Verdict, nodes: NodesOfVerdict) -> tuple[str, ...]:
    if straggler.cause not in _OF_A_NODE and straggler.place != HOST:
        return ()
    end = "one of its ends" if straggler.place == LINK else "it"
    return ", ".join(nodes.devices), f"To keep the next job off {end}: {nodes.keep_out}"


def _when(straggler: Verdict) -> str:
    """Return the first step with its time of day, or the stretches."""
    if straggler.stretches:
        return _stretches(straggler)
    step, since = straggler.since_step, None if straggler.since_ns is None else date_and_time(straggler.since_ns)
    if straggler.occurrence:
        return f"First in step {step}, which began at {since}." if since else ""
    return f"Since step {step}, the first one compared" + (f": {since}." if since else ".")


def _stretches(straggler: Verdict) -> str:
    """Return ``Slow in steps 30–49, 2026-11-23 14:03:22–14:05:09 UTC (49.3 ms per step).``; of many, the costliest."""
    costliest = sorted(straggler.stretches, key=lambda one: -one.cost_ms_per_step)[:_MOST_STRETCHES]
    listed = [
        f"{one.first}–{one.last}{_at(one)} ({milliseconds(one.cost_ms_per_step * 1e6)} ms per step)"
        for one in sorted(costliest, key=lambda one: one.first)
    ]
    more = len(straggler.stretches) - len(costliest)
    return f"Slow in steps {', '.join(listed)}" + (f" and {more} more stretches" if more else "") + "."


def _at(stretch: Stretch) -> str:
    if stretch.since_ns is None or stretch.until_ns is None:
        return ""
    return f", {date_and_time(stretch.since_ns, stretch.until_ns)}"


def _members(straggler: Verdict) -> str:
    members = straggler.members
    if not 2 <= len(members) <= _MOST_MEMBERS or members[0].share_ms_per_step is None:
        return ""
    shares = (f"rank {one.rank} {_ms(one.share_ms_per_step)} ({_ms(one.alone_ms_per_step)})" for one in members)
    return f"Cost of each rank in ms per step if the others are fixed (saved if only it is): {', '.join(shares)}."


def _ms(milliseconds_per_step: float | None) -> str:
    return milliseconds(None if milliseconds_per_step is None else milliseconds_per_step * 1e6)


def print_awaited(console: Console, awaited: Sequence[Awaited], stragglers: Sequence[Verdict]) -> None:
    """Print the rank that the others waited for most, if one stands out, and its activity unless a verdict names it."""
    if not awaited or not awaited[0].stands_out:
        return
    first = awaited[0]
    is_named = any(first.rank in (one.rank, *one.ranks) for one in stragglers)
    who = f"rank {first.rank} ({first.share:.0%} of all waiting), named above" if is_named else first.in_words()
    console.print(escape(f"Waited for most: {who}."))
