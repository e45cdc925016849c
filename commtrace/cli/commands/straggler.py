"""``commtrace straggler RUN``: who slows the job, why, and what it costs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from commtrace.analysis.matched import Matched, match_run
from commtrace.analysis.matching.operations import ONLY_KERNELS, is_kernel_trace
from commtrace.analysis.rank_words import ranges, ranges_in_words, ranks_in_words
from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.replay.whatif import SLOWEST_PERCENT, WhatIf, what_if
from commtrace.analysis.steps.attempts import LaunchSteps, RepeatedStep, repeated_steps
from commtrace.analysis.steps.window import recorded_steps
from commtrace.analysis.stragglers.awaited import awaited_ranks
from commtrace.analysis.stragglers.baseline import Baseline
from commtrace.analysis.stragglers.exclusion import keep_out
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.stragglers.verdict import on_gpu
from commtrace.analysis.whatif_traces.analysis import analyse_whatif_trace
from commtrace.analysis.whatif_traces.run import is_whatif_run, whatif_trace_of
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, run_directory
from commtrace.cli.console import wide_console
from commtrace.cli.units import milliseconds
from commtrace.cli.views.basis import basis_of, print_basis
from commtrace.cli.views.step_attempts import step_attempts_lines
from commtrace.cli.views.straggler import print_awaited, print_stragglers
from commtrace.errors import CommtraceError
from commtrace.trace.files.reader import load_earlier_attempts
from commtrace.trace.run import Run

_SLICES: Final = {
    "operation": "S_by_operation",
    "stage": "S_by_stage",
    "dp rank": "S_by_dp_rank",
    "ranks": "S_by_worker",
}
_MOST_PARTS: Final = 8
_WORTH_SHOWING: Final = 1.005
"""From this S on a part is shown by name."""

_WORTH_EXPLAINING: Final = 1.01
"""From this S of the job on it is told what would recover it."""

_MISSED: Final = 0.005
"""From this share on it is told by how much the replay misses the measured step."""

_RECOVERS_SOMETHING: Final = 0.005
_INDENT: Final = 13
_LEGEND: Final = (
    "S: the mean step with measured durations over that with ideal ones (what the same work takes in the mean); of a "
    "part, if only that part keeps its own."
)


def straggler(
    runs: RunsArgument = DEFAULT_RUNS,
    steps: Annotated[
        str,
        typer.Option(help="Only these steps: A:B (B exclusive), A:B:k (one in k) or A.", show_default=False),
    ] = "",
    baseline: Annotated[
        str,
        typer.Option(help="A run of the same job in which it was well: tells what is normal where ranks cannot."),
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print who slows the job, why, what it costs, and what the job would gain without.

    The steps are replayed with some durations exchanged for those of peers that do the same work. S is the slowdown of
    the job against ideal durations, of one operation, stage, data-parallel rank or worker if only that one keeps its
    measured durations. M_W is the share of the slowdown that goes when the slowest 3 % of workers (at least one) are
    ideal, M_S when the last stage is.
    """
    run = run_directory(runs)
    told = _told(run, steps, _baseline(baseline))
    if json_output:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    else:
        console = wide_console()
        console.print(f"Run {escape(told['run'])}", style="dim")
        print_basis(console, told)
        _print(console, told)


def _baseline(run: str) -> Baseline | None:
    if not run:
        return None
    matched = match_run(run)
    program = _program(matched)
    if program is None:
        raise CommtraceError(f"{run}: traces of the what-if study are no baseline.")
    return Baseline.of(matched.run, program)


def _told(run: Path, steps: str, baseline: Baseline | None) -> dict[str, Any]:
    matched = match_run(run, steps or None)
    if not matched.steps.used:
        raise CommtraceError(f"{run}: no step was recorded in full, so nothing can be compared.")
    if any(is_kernel_trace(trace.spans) for trace in matched.run.ranks.values()):
        raise CommtraceError(f"{run}: {ONLY_KERNELS}")
    program = _program(matched)
    findings = find_stragglers(matched.run, matched.matches, program=program, baseline=baseline)
    slowdown = _what_if(matched, program)
    return {
        "run": matched.recorded.any_metadata.run_id,
        "attempt": matched.recorded.any_metadata.attempt,
        **basis_of(matched.recorded, matched.alignment),
        **slowdown.to_json(),
        "steps": len(slowdown.by_step),
        "on_gpu": on_gpu(matched.run),
        "verdicts": [{**verdict.to_json(), **_where(matched.recorded, verdict.ranks)} for verdict in findings.verdicts],
        "together_ms_per_step": findings.together_ms_per_step,
        "waited_for": findings.waited_for,
        "repeated_steps": [one.to_json() for one in _repeated(matched.recorded)],
        "awaited": [one.to_json() for one in awaited_ranks(matched.context)],
        "abstentions": list(findings.abstentions),
    }


def _repeated(recorded: Run) -> list[RepeatedStep]:
    launches = [LaunchSteps.of(launch) for launch in (*load_earlier_attempts(recorded), recorded)]
    own = set(recorded_steps(recorded))
    return [step for step in repeated_steps(launches) if step.step in own]


def _where(run: Run, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the devices of ranks, where they are known, and what keeps their nodes out of the next job."""
    known = [run.ranks[rank].metadata for rank in ranks if rank in run.ranks]
    return {
        "devices": [f"rank {one.rank}: {one.device_uuid}" for one in known if one.device_uuid],
        "keep_out": keep_out(known, (trace.metadata for trace in run.ranks.values())),
    }


def _program(matched: Matched) -> Program | None:
    """Return the steps for a replay; None of a trace of the study that only the study's rules can replay."""
    try:
        return build_program(matched.run, matched.matches)
    except ReplayError as error:
        if is_whatif_run(matched.recorded):
            return None  # The search for stragglers meets the same error and tells the user.
        raise CommtraceError(f"{matched.recorded.path}: the steps cannot be replayed: {error}") from error


def _what_if(matched: Matched, program: Program | None) -> WhatIf:
    """Return an imported trace of the what-if study is analysed by the rules of its authors, over all of its steps."""
    if is_whatif_run(matched.recorded):
        return analyse_whatif_trace(whatif_trace_of(matched.recorded))
    return what_if(matched.run, matched.matches, program)


def _print(console: Console, told: Mapping[str, Any]) -> None:
    """The verdict first; the numbers behind it below."""
    if not told["verdicts"] and not told["abstentions"]:
        console.print("[bold]No rank was found to slow the others down.[/]")
    for line in step_attempts_lines(told["repeated_steps"], told["attempt"]):
        console.print(escape(line))
    print_stragglers(console, told["verdicts"], on_gpu=told["on_gpu"], with_next_step=True)
    if len(told["verdicts"]) > 1:
        console.print(f"Together they cost {milliseconds(told['together_ms_per_step'] * 1e6)} ms per step.\n")
    for abstention in told["abstentions"]:
        console.print(f"[yellow]Not judged:[/] {escape(abstention)}")
    if told["waited_for"]:
        console.print(escape(told["waited_for"]))
    print_awaited(console, told["awaited"], told["verdicts"])
    if not told["verdicts"]:
        console.print()
    _print_slowdown(console, told)


def _print_slowdown(console: Console, told: Mapping[str, Any]) -> None:
    slowdown = told["S"]
    console.print(f"[bold]Slowdown against ideal durations: S = {slowdown:.3f}[/], mean of {_steps(told['steps'])}")
    if slowdown >= _WORTH_EXPLAINING and told["M_W"] is not None and told["M_S"] is not None:
        stage = f", on the last stage {_recovered(told['M_S'])} (M_S)" if len(told["S_by_stage"]) > 1 else ""
        console.print(
            f"Ideal durations on {_slowest(told)} would recover {_recovered(told['M_W'])} of it (M_W){stage}."
        )
    if abs(told["launch_slowdown"] - 1) >= _MISSED:
        console.print(f"The measured steps take {told['launch_slowdown']:.3f} times as long as the replayed ones.")
    for title, key in _SLICES.items():
        named = _by_range(told[key]) if key == "S_by_worker" else list(told[key].items())
        if len(named) > 1:
            # Not a table of rich: it fills every line with blanks.
            lines = textwrap.fill(_in_words(named), console.width - _INDENT, break_long_words=False)
            console.print(escape(textwrap.indent(lines, " " * _INDENT).replace(" " * _INDENT, f"  {title:11}", 1)))
    console.print(_LEGEND, style="dim")


def _slowest(told: Mapping[str, Any]) -> str:
    """In percent only where the job is large enough for that."""
    workers, slowest = len(told["S_by_worker"]), told["slowest_workers"]
    share = f"the slowest {SLOWEST_PERCENT} % of workers, " if workers * SLOWEST_PERCENT >= 100 else "the slowest, "
    return f"{share}{ranks_in_words(slowest)},"


def _recovered(share: float) -> str:
    return f"{share:.0%}" if share >= _RECOVERS_SOMETHING else "nothing"


def _in_words(parts: Sequence[tuple[str, float]]) -> str:
    """``forward 1.098, backward 1.083; 7 more below 1.005``."""
    largest_first = sorted(parts, key=lambda part: -part[1])
    shown = [part for part in largest_first if part[1] >= _WORTH_SHOWING][:_MOST_PARTS]
    if not shown:
        return f"all below {_WORTH_SHOWING}"
    told = ", ".join(f"{name}: {slowdown:.3f}" for name, slowdown in shown)
    left = largest_first[len(shown) :]
    if not left:
        return told
    below = f"below {_WORTH_SHOWING}" if left[0][1] < _WORTH_SHOWING else f"up to {left[0][1]:.3f} (--json)"
    return f"{told}; {len(left)} more {below}"


def _by_range(by_rank: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return ranks of equal S together."""
    ranks: dict[float, list[int]] = {}
    for rank, slowdown in by_rank.items():
        ranks.setdefault(slowdown, []).append(int(rank))
    return [(ranges_in_words(ranges(own)), slowdown) for slowdown, own in ranks.items()]


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"
