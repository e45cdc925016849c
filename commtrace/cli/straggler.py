"""``commtrace straggler RUN``: who slows the job, why, and what it costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.operations import is_kernel_trace
from commtrace.analysis.replay import ReplayError
from commtrace.analysis.replay_parts import build_program
from commtrace.analysis.replay_program import Program
from commtrace.analysis.step_parts import StepWorkers
from commtrace.analysis.straggler import find_stragglers
from commtrace.analysis.summary import ONLY_KERNELS
from commtrace.analysis.whatif import WhatIf, what_if
from commtrace.analysis.whatif_run import is_whatif_run, whatif_trace_of
from commtrace.analysis.whatif_trace_analysis import analyse_whatif_trace
from commtrace.cli.arguments import NEWEST_RUN, RunArgument
from commtrace.cli.console import wide_console
from commtrace.cli.summary_view import print_stragglers
from commtrace.cli.workers import ExecutorOption, step_workers
from commtrace.errors import CommtraceError
from commtrace.trace.locate import find_run_directory

_SLICES: Final = {
    "operation": "S_by_operation",
    "stage": "S_by_stage",
    "dp rank": "S_by_dp_rank",
    "rank": "S_by_worker",
}
_MOST_ROWS: Final = 16
_LEGEND: Final = (
    "S: measured durations over ideal ones, those of peers that do the same work. Below: S if only that operation, "
    "stage, … keeps its own. M_W, M_S: the share of the slowdown that goes if the slowest 3 % of workers, or the last "
    "stage, are ideal.\n"
)


def straggler(
    run: RunArgument = NEWEST_RUN,
    steps: Annotated[
        str,
        typer.Option(help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A.", show_default=False),
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    executor: ExecutorOption = "",
) -> None:
    """Print who slows the job, why, what it costs, and what the job would gain without.

    The steps are replayed with some durations exchanged for those of peers that do the same work. S is the slowdown of
    the job against ideal durations, of one operation, stage, data-parallel rank or worker if only that one keeps its
    measured durations. M_W is the share of the slowdown that goes when the slowest 3 % of workers are ideal, M_S when
    the last stage is.
    """
    with step_workers(executor) as workers:
        told = _told(run, steps, workers)
    if json_output:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    else:
        console = wide_console()
        console.print(f"Run {escape(find_run_directory(run).name)}", style="dim")
        _print(console, told)


def _told(run: Path, steps: str, workers: StepWorkers | None) -> dict[str, Any]:
    analysis = analyse(run, steps or None)
    if not analysis.steps.used:
        raise CommtraceError(f"{run}: no step was recorded in full, so nothing can be compared.")
    if any(is_kernel_trace(trace.spans) for trace in analysis.run.ranks.values()):
        raise CommtraceError(f"{run}: {ONLY_KERNELS}")
    try:
        program = build_program(analysis.run, analysis.matches, workers)
    except ReplayError as error:
        raise CommtraceError(f"{run}: the steps cannot be replayed: {error}") from error
    findings = find_stragglers(analysis.run, analysis.matches, program=program)
    return {
        **_what_if(analysis, program).to_json(),
        "verdicts": [verdict.to_json() for verdict in findings.verdicts],
        "abstentions": list(findings.abstentions),
    }


def _what_if(analysis: Analysis, program: Program) -> WhatIf:
    """An imported trace of the what-if study is analysed by the rules of its authors, over all of its steps."""
    if is_whatif_run(analysis.recorded):
        return analyse_whatif_trace(whatif_trace_of(analysis.recorded))
    return what_if(analysis.run, analysis.matches, program)


def _print(console: Console, told: Mapping[str, Any]) -> None:
    console.print(
        f"[bold]Slowdown against ideal durations: S = {told['S']:.3f}[/]   M_W {_share(told['M_W'])}   "
        f"M_S {_share(told['M_S'])}   measured over replayed {told['launch_slowdown']:.3f}\n"
    )
    console.print(_LEGEND, style="dim")
    for title, key in _SLICES.items():
        _print_slices(console, title, told[key])
    print_stragglers(console, told["verdicts"])
    for next_step in dict.fromkeys(verdict["next_step"] for verdict in told["verdicts"]):
        console.print(f"[bold]{escape(next_step)}[/]")
    for abstention in told["abstentions"]:
        console.print(f"[yellow]Not judged:[/] {escape(abstention)}")
    if not told["verdicts"] and not told["abstentions"]:
        console.print("No rank was found to slow the others down.")


def _print_slices(console: Console, title: str, slices: Mapping[str, float]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    table.add_column("S", justify="right", no_wrap=True)
    largest_first = sorted(slices.items(), key=lambda item: -item[1])
    for name, slowdown in largest_first[:_MOST_ROWS]:
        table.add_row(escape(name), f"{slowdown:.3f}")
    console.print(table)
    hidden = len(largest_first) - _MOST_ROWS
    console.print(f"({hidden} more with a smaller S: --json)\n" if hidden > 0 else "")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
