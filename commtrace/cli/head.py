"""What every command prints first of a run: its state, and what it loses time to, the costliest first.

>>> print_head(console, judged.title, judged.findings)              # doctest: +SKIP
Run gpt · ended · 16 ranks on 2 hosts · 39 steps of 156 ms
1. exposed communication: 37.6 ms per step (24.1% of it)
   By role: tp 48%, pp 18%, dp 18%, embedding 17% (of the stalls on transfers).
→ Overlap it with compute, or send less.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from commtrace.analysis.clocks.time_of_day import date_and_time
from commtrace.analysis.hangs.job_end import CUT_OFF, FAILED, end_words
from commtrace.analysis.judged_run import RunTitle
from commtrace.findings.finding import (
    LOST,
    NOT_JUDGED,
    NOTHING_COSTS,
    SLOW,
    STOPS,
    Finding,
    Stretch,
    advised,
    format_since_step,
    worth_naming,
)

_MOST_FINDINGS: Final = 5
_MOST_NOT_JUDGED: Final = 2
_MOST_STRETCHES: Final = 3
_ENDED_BADLY: Final = (end_words(CUT_OFF, ""), FAILED, "hung")
_COMMAND: Final = ": commtrace "
"""Before a command at the end of an advice, which is to be copied whole."""


def print_head(console: Console, title: RunTitle, findings: Sequence[Finding], *, details: bool = False) -> None:
    """Print the state of the job, its findings, and what to do about the first one and the costliest fault.

    Args:
        findings: ranked.
        details: print all of them.
    """
    console.print(f"[bold]{escape(title.words)}[/]")
    print_findings(console, findings, details=details)
    if not is_stopped(findings) and title.state.startswith(_ENDED_BADLY):
        print_advice(console, f"See how it ended{_COMMAND}doctor {title.path}")
    _print_not_judged(console, findings, details=details)
    console.print()


def print_findings(console: Console, findings: Sequence[Finding], *, details: bool = False) -> None:
    """Print ranked findings, the costliest few or all, and what to do about the first one and the costliest fault."""
    named = worth_naming(findings)
    if is_stopped(findings) and not details:  # what else it loses is no matter now
        named = tuple(finding for finding in named if finding.kind != LOST)
    shown = len(named) if details else _MOST_FINDINGS
    for number, finding in enumerate(named[:shown], 1):
        _print_finding(console, number if len(named) > 1 else 0, finding)
    if len(named) > shown:
        console.print(f"   {len(named) - shown} more: --details", style="dim")
    if not named and all(finding.kind != NOT_JUDGED for finding in findings):
        console.print(f"[bold green]{NOTHING_COSTS}[/]")
    told = advised(named[:shown])
    for finding in told:
        print_advice(console, finding.advice, named.index(finding) + 1 if len(told) > 1 else 0)


def _print_not_judged(console: Console, findings: Sequence[Finding], *, details: bool) -> None:
    not_judged = [finding for finding in findings if finding.kind == NOT_JUDGED]
    most = len(not_judged) if details else _MOST_NOT_JUDGED
    for finding in not_judged[:most]:
        console.print(f"[yellow]Not judged:[/] {escape(finding.evidence)}")
    if len(not_judged) > most:
        console.print(f"{len(not_judged) - most} more that could not be judged: --details", style="dim")


def print_advice(console: Console, advice: str, number: int = 0) -> None:
    """Print what to do about the finding of a number, if there are several.

    A command at the end of it stands on a line of its own, which is not broken.
    """
    first = f"→ {number}. " if number else "→ "
    words, found, command = advice.partition(_COMMAND)
    print_indented(console, f"{words}{':' if found else ''}", " " * len(first), first)
    if found:
        console.print(f"{' ' * len(first)}commtrace {escape(command)}", soft_wrap=True)


def print_indented(console: Console, text: str, indent: str, first: str = "", style: str | None = None) -> None:
    """Print a text with ``indent`` before all lines but the first, which begins with ``first``."""
    # Not rich's padding, which fills every line with blanks up to the width.
    filled = textwrap.fill(
        text, console.width, initial_indent=first, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    console.print(escape(filled), style=style)


def _print_finding(console: Console, number: int, finding: Finding) -> None:
    first = f"{number}. " if number else ""
    style = "bold" if finding.kind == LOST else "bold red"
    print_indented(console, finding.line(), " " * len(first), first, style)
    for text in filter(None, (_where_and_when(finding),)):
        print_indented(console, text, " " * len(first), " " * len(first))


def _where_and_when(finding: Finding) -> str:
    """Return in which steps it is, or of lost time where it is lost; empty if the line says it, or it is not known."""
    if finding.kind == LOST:
        return finding.evidence
    if finding.kind != SLOW:
        return ""
    return when(finding)


def when(finding: Finding) -> str:
    """Return the first step with its time of day, or the stretches of what is not in all steps."""
    since = None if finding.since_ns is None else date_and_time(finding.since_ns)
    if finding.occurrence:
        return f"First in step {finding.since_step}, which began at {since}." if since else ""
    if finding.stretches:
        return _stretches(finding)
    if finding.since_first_compared:
        return "Since the first step that was compared."
    step = format_since_step(finding.since_step, finding.since_within_steps)
    return f"Since {step}{f', {since}' if since else ''}." if step else ""


def _stretches(finding: Finding) -> str:
    """Return ``In steps 30–49, 2026-11-23 14:03:22–14:05:09 UTC (49.3 ms of each).``; of many, the costliest."""
    costliest = sorted(finding.stretches, key=lambda stretch: -stretch.cost_ns)[:_MOST_STRETCHES]
    listed = [
        f"{stretch.first}–{stretch.last}{_at(stretch)} ({stretch.cost_ns / 1e6:.3g} ms of each)"
        for stretch in sorted(costliest, key=lambda stretch: stretch.first)
    ]
    more = len(finding.stretches) - len(costliest)
    return f"In steps {', '.join(listed)}" + (f" and {more} more stretches" if more else "") + "."


def _at(stretch: Stretch) -> str:
    if stretch.since_ns is None or stretch.until_ns is None:
        return ""
    return f", {date_and_time(stretch.since_ns, stretch.until_ns)}"


def is_stopped(findings: Sequence[Finding]) -> bool:
    """Return whether the job makes no progress: then what its steps lose is not what to look at."""
    return bool(findings) and findings[0].kind in STOPS
