"""``commtrace straggler RUN``: the ranks that slow the job, with causes and costs."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from commtrace.analysis.replay.whatif import SLOWEST_PERCENT, WhatIf
from commtrace.analysis.straggler_report import StragglerReport, baseline_of, report_of_steps
from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    AttemptOption,
    ClusterOption,
    DetailsOption,
    JsonOption,
    KeepOption,
    RunsArgument,
    StepsOption,
    WorkersOption,
    check_keeps_whole_run,
    chosen_workers,
    run_directory,
)
from commtrace.cli.commands.history import keep_analysis
from commtrace.cli.head import is_stopped, print_head
from commtrace.cli.output import wide_console
from commtrace.cli.views import print_awaited, print_basis, print_evidence, step_attempts_lines, together_line
from commtrace.findings.finding import advised, verdict, worth_naming
from commtrace.findings.formatting import format_ranges, format_ranks, format_time, ranges
from commtrace.interchange.whatif_study.analysis import slowdown_of_study

_MOST_PARTS: Final = 8
_WORTH_SHOWING: Final = 1.005
"""Least S of a part that is shown by name."""

_WORTH_EXPLAINING: Final = 1.01
"""Least S of the job for which the note names what would recover it."""

_NO_STRAGGLER: Final = "No rank was found to slow the others down."
_MISSED: Final = 0.005
"""Least error of the replay that is printed, as a share."""

_RECOVERS_SOMETHING: Final = 0.005
_MORE_THAN_ALL: Final = " More than 100%: the others keep what they have below the mean."
_IDEAL_BESIDE_COSTS: Final = (
    "Ideal is the mean of the same work, slow ranks included; a cost compares with the other ranks only."
)
_INDENT: Final = 13
_LEGEND: Final = (
    "S: the mean step with measured durations over that with ideal ones (the mean of the same work); of a part, if "
    "only that part keeps its measured durations. Below 1: the mean is longer than the work that steps waited for, for "
    "example if it is long on ranks that no rank waits for."
)


def straggler(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    steps: StepsOption = "",
    baseline: Annotated[
        str,
        typer.Option(help="A healthy run of the same job, as the reference for normal durations."),
    ] = "",
    keep: KeepOption = False,
    details: DetailsOption = False,
    json_output: JsonOption = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print which ranks slow the job, why, what that costs, and what the job would gain without it.

    The steps are replayed with ideal durations: those of peers that do the same work. With --details, S is the slowdown
    of the measured job against the ideal one; S of an operation, stage, data-parallel rank or worker is the slowdown if
    only that one keeps its measured durations. M_W is the share of the slowdown that disappears if the slowest 3 % of
    workers (at least one) are ideal, M_S likewise for the last stage.
    """
    check_keeps_whole_run(keep, runs, steps, baseline, attempt is not None)
    run = run_directory(runs, attempt)
    with chosen_workers(workers, cluster) as chosen:
        path, reference = (Path(one).absolute() if cluster else one for one in (run, baseline))
        normal = baseline_of(reference, chosen) if baseline else None
        opened = open_run(path, steps or None, chosen)
        report = report_of_steps(opened, normal, slowdown_of_study(opened.recorded))
    if json_output:
        sys.stdout.write(json.dumps({"verdict": _verdict(report), **report.to_json()}, allow_nan=False) + "\n")
    else:
        _print(wide_console(), report, details=details)
    if keep:
        keep_analysis(
            opened.recorded,
            report.findings,
            by="straggler",
            attempt=report.attempt,
            used_steps=report.slowdown.by_step,
        )


def _verdict(report: StragglerReport) -> str:
    """Return what stops the job, else the costliest straggler, else the first thing that could not be judged."""
    slow, listed = len(report.judgement.slow), report.findings
    if is_stopped(listed):
        return verdict(listed)
    if slow:
        more = f" {slow - 1} more cost less." if slow > 1 else ""
        return f"Straggler: {report.judgement.slow[0].line()}.{more}"
    not_judged = report.judgement.not_judged
    return not_judged[0].line() if not_judged else _NO_STRAGGLER


def _print(console: Console, report: StragglerReport, *, details: bool) -> None:
    judgement = report.judgement
    print_head(console, report.judged.title, report.findings, details=details)
    if not judgement.findings:
        console.print(_NO_STRAGGLER)
    told = advised(worth_naming(report.findings))
    print_evidence(console, judgement.slow, on_gpu=report.on_gpu, nodes=report.nodes, told=told)
    if len(judgement.slow) > 1:
        console.print(together_line(judgement.slow, judgement.together_ns))
    if judgement.waited_for:
        console.print(escape(judgement.waited_for))
    else:
        print_awaited(console, report.judged.awaited)
    for line in step_attempts_lines(report.repeated_steps, report.attempt):
        console.print(escape(line))
    print_basis(console, report.alignment, report.problems, details=details)
    if details:
        _print_slowdown(console, report.slowdown, beside_costs=bool(judgement.slow))
    else:
        _print_gain(console, report)


def _print_gain(console: Console, report: StragglerReport) -> None:
    step_ns, slowdown = report.judged.title.step_ns, report.slowdown.slowdown
    if step_ns is None or not math.isfinite(slowdown) or slowdown < _WORTH_EXPLAINING:
        return
    console.print(
        f"If the same work always took its mean, a step would take {format_time(step_ns / slowdown)} instead of "
        f"{format_time(step_ns)}. By operation, stage and rank: --details",
        style="dim",
    )


def _print_slowdown(console: Console, what_if: WhatIf, *, beside_costs: bool) -> None:
    console.print(
        f"[bold]Slowdown against ideal durations: S = {what_if.slowdown:.3f}[/], mean of {_steps(len(what_if.by_step))}"
    )
    if beside_costs:
        console.print(_IDEAL_BESIDE_COSTS)
    of_workers, of_stage = what_if.slowest_workers_share, what_if.last_stage_share
    if what_if.slowdown >= _WORTH_EXPLAINING and not math.isnan(of_workers) and not math.isnan(of_stage):
        stage = f", on the last stage {_recovered(of_stage)} (M_S)" if len(what_if.by_stage) > 1 else ""
        console.print(
            f"Ideal durations on {_slowest(what_if)} would recover {_recovered(of_workers)} of it (M_W){stage}."
            f"{_MORE_THAN_ALL if max(of_workers, of_stage) >= 1 + _RECOVERS_SOMETHING else ''}"
        )
    if abs(what_if.launch_slowdown - 1) >= _MISSED:
        console.print(f"The measured steps take {what_if.launch_slowdown:.3f} times as long as the replayed ones.")
    slices = {
        "operation": list(what_if.by_operation.items()),
        "stage": _named(what_if.by_stage),
        "dp rank": _named(what_if.by_dp_rank),
        "ranks": _by_range(what_if.by_worker),
    }
    for title, named in slices.items():
        if len(named) > 1:
            # Not a table of rich: it fills every line with blanks.
            lines = textwrap.fill(_text(named), console.width - _INDENT, break_long_words=False)
            console.print(escape(textwrap.indent(lines, " " * _INDENT).replace(" " * _INDENT, f"  {title:11}", 1)))
    console.print(_LEGEND, style="dim")


def _named(slowdowns: Mapping[int, float]) -> list[tuple[str, float]]:
    return [(str(number), slowdown) for number, slowdown in slowdowns.items()]


def _slowest(what_if: WhatIf) -> str:
    # In percent only where the job is large enough for that.
    is_large = len(what_if.by_worker) * SLOWEST_PERCENT >= 100
    share = f"the slowest {SLOWEST_PERCENT}% of workers, " if is_large else "the slowest, "
    return f"{share}{format_ranks(what_if.slowest_workers)},"


def _recovered(share: float) -> str:
    return f"{share:.0%}" if share >= _RECOVERS_SOMETHING else "nothing"


def _text(parts: Sequence[tuple[str, float]]) -> str:
    """Return ``forward: 1.098, backward: 1.083; 7 more below 1.005``."""
    largest_first = sorted(parts, key=lambda part: -part[1])
    shown = [part for part in largest_first if part[1] >= _WORTH_SHOWING][:_MOST_PARTS]
    if not shown:
        return f"all below {_WORTH_SHOWING}"
    listed = ", ".join(f"{name}: {slowdown:.3f}" for name, slowdown in shown)
    left = largest_first[len(shown) :]
    if not left:
        return listed
    below = f"below {_WORTH_SHOWING}" if left[0][1] < _WORTH_SHOWING else f"up to {left[0][1]:.3f} (--json)"
    return f"{listed}; {len(left)} more {below}"


def _by_range(by_rank: Mapping[int, float]) -> list[tuple[str, float]]:
    # Ranks of equal S together.
    ranks: dict[float, list[int]] = {}
    for rank, slowdown in by_rank.items():
        ranks.setdefault(slowdown, []).append(rank)
    return [(format_ranges(ranges(own)), slowdown) for slowdown, own in ranks.items()]


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"
