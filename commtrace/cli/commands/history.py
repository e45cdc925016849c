"""``commtrace list [DIR]`` and ``commtrace hosts [DIR]``: runs, and the hosts named in them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from commtrace.analysis.hangs.job_end import end_words
from commtrace.analysis.summary import Summary
from commtrace.cli.arguments import JsonOption, RunsDirectoryArgument
from commtrace.cli.head import print_indented
from commtrace.cli.output import UNKNOWN, duration, share, text_table, wide_console
from commtrace.cli.views import attempt_lines
from commtrace.errors import CommtraceError
from commtrace.findings.causes import format_cause
from commtrace.findings.finding import Finding
from commtrace.findings.formatting import format_duration
from commtrace.history.facts import RunFacts
from commtrace.history.hosts import HostReport, HostTally, tally_hosts
from commtrace.history.runs import ListedRun, RunList, list_runs, remember
from commtrace.history.verdicts import RunVerdict, verdict_of_analysis
from commtrace.trace.files.locate import RUNS
from commtrace.trace.inputs import printable_lines
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.processes import process_state
from commtrace.trace.run import Run


def list_(
    directory: RunsDirectoryArgument = RUNS,
    json_output: JsonOption = False,
) -> None:
    """List the runs of a directory: when, how long, ranks (on how many hosts), steps, step time, end, and the verdict.

    The newest run is the last one. The verdict below it is what summary, straggler or report kept with --keep, else
    what the monitor named; nothing if neither judged it. Folders that hold no readable run are listed with
    the reason. Verdicts are kept in commtrace-history.sqlite beside the runs.
    """
    runs = list_runs(directory, now_ns=time.time_ns(), ask=process_state)
    if json_output:
        sys.stdout.write(json.dumps({"verdict": runs_verdict(runs), **runs.to_json()}, allow_nan=False) + "\n")
    else:
        print_runs(wide_console(), runs)


def hosts(
    directory: RunsDirectoryArgument = RUNS,
    all_hosts: Annotated[bool, typer.Option("--all", help="Print also the hosts that were never named.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Print which hosts were named in how many runs, why, and what they cost, because a bad node comes back.

    The rate is the share of the judged runs in which a host was named. A run is judged if summary, straggler or report
    kept its verdict with --keep, or the monitor watched it, and either named a rank or could compare all of them. A
    host that both name counts once. Runs that were deleted still count if they had been listed or judged before.
    """
    runs = list_runs(directory, now_ns=time.time_ns(), ask=process_state)
    report = tally_hosts(runs.entries)
    if json_output:
        printed = {
            "verdict": hosts_verdict(report),
            "path": str(runs.path),
            **fields_to_json(report),
            "problems": runs.problems,
        }
        sys.stdout.write(json.dumps(printed, allow_nan=False) + "\n")
    else:
        print_hosts(wide_console(), report, runs.problems, all_hosts=all_hosts)


def keep_analysis(
    run: Run,
    findings: Iterable[Finding],
    *,
    by: str,
    attempt: int,
    used_steps: Iterable[int],
) -> None:
    """Keep the findings in all steps of a run, for ``commtrace list`` and ``commtrace hosts``."""
    last_step = max(used_steps, default=None)
    keep(
        run,
        verdict_of_analysis(findings, by=by, attempt=attempt, judged_ns=time.time_ns(), last_step=last_step),
    )


def keep_summary(run: Run, summary: Summary, *, by: str) -> None:
    """Keep the findings of a summary of a whole run."""
    keep_analysis(
        run,
        summary.findings,
        by=by,
        attempt=summary.run.attempt,
        used_steps=summary.run.steps.used,
    )


def keep(run: Path | Run, verdict: RunVerdict | None) -> None:
    """Keep a verdict, None for that of the monitor's files in the run; warn on stderr if that fails."""
    try:
        remember(run, verdict, now_ns=time.time_ns(), ask=process_state)
    except (CommtraceError, OSError) as error:
        typer.echo(printable_lines(f"commtrace: the verdict was not kept for `commtrace list`: {error}"), err=True)


def print_runs(console: Console, runs: RunList) -> None:
    """Print the verdict, one row per run with its verdict below it, then the problems of folders and runs."""
    console.print(f"[bold]{escape(runs_verdict(runs))}[/]\n")
    readable = [(run, run.facts) for run in runs.runs if run.facts is not None]
    cells = [_HEADINGS, *(_row(run, facts) for run, facts in readable)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
    console.print(escape(_line(_HEADINGS, widths)))
    for (run, facts), row in zip(readable, cells[1:], strict=True):
        console.print(escape(_line(row, widths)), soft_wrap=True)
        if facts.ending or facts.attempt:
            print_indented(console, _ended(facts), "  ", "  ")
        if run.verdict is not None:
            print_indented(console, _verdict(run.verdict, facts), "  ", "  ", "bold" if run.verdict.named else None)
    if any(run.verdict is None for run, _ in readable):
        console.print("Runs without a line below them are not judged yet: commtrace summary RUN --keep", style="dim")
    for run, facts in readable:
        for line in attempt_lines(facts.earlier_attempts):
            print_indented(console, f"{run.directory}: {line}", "  ")
    for run in runs.runs:
        for problem in run.problems:
            print_indented(console, f"{run.directory}: {problem}", "  ", "! ")
    _print_problems(console, runs.problems)


_HEADINGS: Final = ("run", "started (UTC)", "lasted", "ranks", "steps", "step", "ended")
_NUMBERS: Final = ("lasted", "ranks", "steps", "step")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)
        for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True)
    ]
    gaps = ["", *(" " if heading in _NUMBERS else "  " for heading in _HEADINGS[1:])]
    return "".join(f"{gap}{cell}" for gap, cell in zip(gaps, aligned, strict=True)).rstrip()


def print_hosts(console: Console, report: HostReport, problems: Sequence[str], *, all_hosts: bool) -> None:
    """Print the verdict, and one row per host that was named."""
    console.print(f"[bold]{escape(hosts_verdict(report))}[/]\n")
    shown = [one for one in report.hosts if one.named or all_hosts]
    runs, hosts = f"{report.runs} run{'s' * (report.runs != 1)}", len(report.hosts)
    known = f"Known: {runs}, {report.judged} of them judged, {hosts} host{'s' * (hosts != 1)}."
    if shown:
        table = text_table(["host"], ["named", "judged", "rate", "runs", "cost per step"])
        for heading in ("causes (runs)", "last (UTC)"):
            table.add_column(heading, overflow="fold")
        for one in shown:
            table.add_row(*map(escape, _host_row(one)))
        console.print(table)
        console.print(f"{known} rate: share of the judged runs in which the host was named.", style="dim")
    else:
        console.print(known)
    if report.judged < report.runs:
        console.print(
            "Judged: commtrace summary RUN --keep or the monitor named a rank, or could compare all of them.",
            style="dim",
        )
    _print_problems(console, problems)


def runs_verdict(runs: RunList) -> str:
    """Return the number of runs with and without stragglers, and the verdict on the newest."""
    readable = [(run, run.facts) for run in runs.runs if run.facts is not None]
    if not readable:
        return "No run can be read here."
    named = sum(run.verdict is not None and bool(run.verdict.named) for run, _ in readable)
    not_judged = sum(run.verdict is None for run, _ in readable)
    newest, facts = readable[-1]
    state = "not judged yet" if newest.verdict is None else _verdict(newest.verdict, facts)
    return (
        f"{len(readable)} run{'s' * (len(readable) != 1)}: {named} with stragglers, "
        f"{len(readable) - named - not_judged} without, {not_judged} not judged. "
        f"The newest, {newest.directory}: {state}."
    )


def hosts_verdict(report: HostReport) -> str:
    """Return the host that was named most often."""
    named = [host for host in report.hosts if host.named]
    if named:
        first = named[0]
        more = f" {len(named) - 1} more host{'s were' if len(named) > 2 else ' was'} named." if len(named) > 1 else ""
        return f"{first.host} was named most often: in {first.named} of its {first.judged} judged runs.{more}"
    if not report.judged:
        return "No run has been judged yet, so no host was named."
    return f"No host was named in {report.judged} judged run{'s' * (report.judged != 1)}."


def _print_problems(console: Console, problems: Sequence[str]) -> None:
    for problem in problems:
        console.print(f"[yellow]![/] Verdicts were not kept or not read: {escape(problem)}")


def _row(run: ListedRun, facts: RunFacts) -> list[str]:
    ranks = str(facts.world_size)
    if facts.ranks_recorded != facts.world_size:
        ranks = f"{facts.ranks_recorded} of {facts.world_size}"
    if len(facts.hosts) > 1:
        ranks += f" on {len(facts.hosts)}"
    return [
        run.directory,
        _date(facts.started_ns),
        UNKNOWN if facts.duration_ns is None else format_duration(facts.duration_ns),
        ranks,
        UNKNOWN if facts.steps is None else str(facts.steps),
        duration(facts.step_ns),
        end_words(facts.state, ""),
    ]


def _ended(facts: RunFacts) -> str:
    text = end_words(facts.state, facts.ending)
    return f"{text} (attempt {facts.attempt + 1})" if facts.attempt else text


def _verdict(verdict: RunVerdict, facts: RunFacts) -> str:
    is_of_part = verdict.last_step is not None and facts.last_step is not None and verdict.last_step < facts.last_step
    return verdict.text + (f" (up to step {verdict.last_step})" if is_of_part else "")


def _host_row(one: HostTally) -> list[str]:
    cost = one.largest_cost_ms_per_step
    last = one.namings[0] if one.namings else None
    return [
        one.host,
        str(one.named),
        str(one.judged),
        share(one.rate),
        str(one.runs),
        duration(None if cost is None else cost * 1e6),
        ", ".join(f"{format_cause(cause)} ({count})" for cause, count in one.causes.items()) or UNKNOWN,
        UNKNOWN if last is None else f"{_date(last.ended_ns)}, {last.directory}",
    ]


def _date(epoch_ns: int | None) -> str:
    if epoch_ns is None:
        return UNKNOWN
    return f"{datetime.fromtimestamp(epoch_ns // 10**9, timezone.utc):%Y-%m-%d %H:%M}"
