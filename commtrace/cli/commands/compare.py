"""``commtrace compare A B``: the changes between two runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commtrace.analysis.breakdown.states import State
from commtrace.analysis.chain import Analysis
from commtrace.analysis.comparison.compare import (
    RANKS_RECORDED,
    ComparedLink,
    Difference,
    RunComparison,
    StepSeries,
    step_series,
)
from commtrace.analysis.comparison.compare import compare as compare_runs
from commtrace.analysis.comparison.findings import GONE, LESS, MORE, NEW, SAME, ComparedFinding, compare_findings
from commtrace.analysis.comparison.noise import FEWEST_SAMPLES, MeasuredChange
from commtrace.analysis.judged_run import JudgedRun, RunSums, judge_run, measure_job
from commtrace.analysis.windows.run import MeasuredRun, Workers, open_run
from commtrace.cli.arguments import (
    ClusterOption,
    DetailsOption,
    JsonOption,
    StepsOption,
    WorkersOption,
    chosen_workers,
    tell_of_worlds,
)
from commtrace.cli.head import print_indented
from commtrace.cli.output import UNKNOWN, bandwidth, milliseconds, wide_console
from commtrace.cli.views import clock_line
from commtrace.errors import ConfigurationError
from commtrace.trace.files.locate import find_run_directory
from commtrace.trace.inputs import printable
from commtrace.trace.json_values import JsonObject

_SLOWER, _NOT_DECIDED = 1, 3
_SIDES: Final = ("before", "after")
_SMALLEST_SHARE: Final = 0.001
"""A part that changed by less than this share of the step, and within its noise, is not listed."""


def compare(
    before: Annotated[Path, typer.Argument(help="The run directory to compare with.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The run directory that may be slower.", show_default=False)],
    steps: StepsOption = "",
    more_before: Annotated[
        list[Path] | None,
        typer.Option("--before", help="One more run like BEFORE; repeatable.", show_default=False),
    ] = None,
    more_after: Annotated[
        list[Path] | None,
        typer.Option("--after", help="One more run like AFTER; repeatable.", show_default=False),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Percent by which a step may take longer.", min=0)] = 5.0,
    details: DetailsOption = False,
    json_output: JsonOption = False,
    workers: WorkersOption = None,
    cluster: ClusterOption = "",
) -> None:
    """Print what changed between two runs: step time, each part of it, bandwidths, versions and environment.

    Two starts of the same job differ. To count that as noise, record a side several times and name the further runs
    with --before and --after.

    The exit code is for use in CI: 0 if a step is not slower, 1 if its median or its mean is slower by more than the
    threshold and by more than the noise of the steps, 3 if this cannot be judged. Errors are 2.
    """
    sides = [before, *(more_before or ())], [after, *(more_after or ())]
    _check_different([*sides[0], *sides[1]])
    with chosen_workers(workers, cluster) as chosen:
        read = [[_read(run.absolute() if cluster else run, steps, chosen) for run in side] for side in sides]
    comparison = compare_runs(*([run_read.measured for run_read in side] for side in read))
    first, last = (side[0].judged for side in read)
    compared_findings = compare_findings(first.findings, last.findings, first.title.step_ns)
    if json_output:
        bases = [[_basis(run_read.measured) for run_read in side] for side in read]
        printed = {
            "verdict": _verdict(comparison, threshold),
            "findings": [compared.to_json() for compared in compared_findings],
            **comparison.to_json(),
            "basis": {"before": bases[0], "after": bases[1]},
        }
        sys.stdout.write(json.dumps(printed) + "\n")
    else:
        console = wide_console()
        for words, runs, of_side in zip(_SIDES, sides, read, strict=True):
            for run, run_read in zip(runs, of_side, strict=True):
                name = "" if run.name == run_read.judged.title.run else f" ({printable(run.name)})"
                console.print(f"[bold]{words.capitalize()}: {escape(run_read.judged.title.words + name)}[/]")
        _print_findings(console, compared_findings, details=details)
        console.print(f"[bold]{escape(_verdict(comparison, threshold))}[/]\n")
        _print_bases(console, sides, [[run_read.measured for run_read in side] for side in read], details=details)
        _print(console, comparison, details=details)
    if not comparison.can_be_judged:
        raise typer.Exit(_NOT_DECIDED)
    if comparison.is_slower(threshold / 100):
        raise typer.Exit(_SLOWER)


def _basis(measured: MeasuredRun[StepSeries]) -> JsonObject:
    return {"alignment": measured.alignment.to_json(), "problems": measured.recorded.problems}


def _print_bases(
    console: Console,
    sides: Sequence[Sequence[Path]],
    measured: Sequence[Sequence[MeasuredRun[StepSeries]]],
    *,
    details: bool,
) -> None:
    for run, measured_run in zip(chain(*sides), chain(*measured), strict=True):
        if measured_run.alignment.refused or (details and measured_run.alignment.observations):
            console.print(f"{escape(str(run))}: {clock_line(measured_run.alignment)}", style="dim")
        for problem in measured_run.recorded.problems:
            console.print(f"[yellow]![/] {escape(str(run))}: {escape(problem)}")


def _check_different(runs: Sequence[Path]) -> None:
    """Raise :class:`ConfigurationError` if two of the runs are the same."""
    directories: dict[Path, Path] = {}
    for run in runs:
        tell_of_worlds(run)
        directory = find_run_directory(run)
        for known_run, known in directories.items():
            if known.resolve() == directory.resolve():
                raise ConfigurationError(f"{known_run} and {run} are the same run ({directory}): name another one.")
        if run in directories:
            raise ConfigurationError(f"{run} is named twice: name another one.")
        directories[run] = directory


class _Read(NamedTuple):
    measured: MeasuredRun[StepSeries]
    judged: JudgedRun


@dataclass(frozen=True, slots=True)
class _ComparedSums:
    series: StepSeries
    job: RunSums

    def __add__(self, later: _ComparedSums) -> _ComparedSums:
        return _ComparedSums(self.series + later.series, self.job + later.job)


def _measure(analysis: Analysis) -> _ComparedSums:
    return _ComparedSums(step_series(analysis), measure_job(analysis))


def _read(run: Path, steps: str, chosen: Workers) -> _Read:
    opened = open_run(run, steps or None, chosen)
    if not opened.steps.used:
        raise ConfigurationError(f"{run}: no step was recorded in full, so nothing can be compared.")
    measured = opened.measure(_measure)
    judged = judge_run(opened, measured.result.job)
    return _Read(
        MeasuredRun(measured.recorded, measured.alignment, measured.steps, measured.counts, measured.result.series),
        judged,
    )


_WORDS: Final = {NEW: "New", GONE: "Gone", MORE: "Costs more", LESS: "Costs less", SAME: "As before"}
_MOST_FINDINGS: Final = 6


def _print_findings(console: Console, findings: Sequence[ComparedFinding], *, details: bool) -> None:
    shown = [compared for compared in findings if details or compared.change != SAME]
    for compared in shown if details else shown[:_MOST_FINDINGS]:
        text = compared.finding.line()
        if compared.change in (MORE, LESS) and compared.before_ns is not None and compared.after_ns is not None:
            before, after = milliseconds(compared.before_ns), milliseconds(compared.after_ns)
            text = f"{compared.finding.words}: {before} → {after} ms per step"
        print_indented(console, f"{_WORDS[compared.change]}: {text}", "  ")
    left = len(findings) - len(shown)
    if not shown:
        console.print(f"Findings: {'the same' if findings else 'none'} on both sides.")
    elif left or len(shown) > _MOST_FINDINGS:
        more = max(0, 0 if details else len(shown) - _MOST_FINDINGS)
        parts = [f"{more} more changed"] * bool(more) + [f"{left} cost as much as before"] * bool(left)
        console.print(f"{', '.join(parts)}: --details", style="dim")


def _print(console: Console, comparison: RunComparison, *, details: bool) -> None:
    ranks = _ranks_that_differ(comparison)
    headings = [f"{side}, {of_side} ranks" for side, of_side in zip(_SIDES, ranks, strict=True)] if ranks else _SIDES
    _print_circumstances(console, comparison.circumstances)
    _print_parts(console, comparison, headings, details=details)
    _print_bandwidths(console, comparison.busbw_gbps, headings)


def _ranks_that_differ(comparison: RunComparison) -> tuple[str, str] | None:
    """Return the numbers of ranks recorded on both sides, such as ``3 of 4``; None if they are the same."""
    differences = (difference for difference in comparison.circumstances if difference.what == RANKS_RECORDED)
    return next(((difference.before, difference.after) for difference in differences), None)


def _print_circumstances(console: Console, differences: Sequence[Difference]) -> None:
    if not differences:
        console.print("Versions, environment and layout are the same.\n")
        return
    table = _table("what differs", "before", "after")
    for difference in differences:
        table.add_row(*(escape(value) for value in difference))
    console.print(table, "")


def _print_parts(console: Console, comparison: RunComparison, headings: Sequence[str], *, details: bool) -> None:
    table = _table("median, ms per step", *headings, "change", "noise ±", "%")
    _add_change(table, "step", comparison.wall_ns)
    _add_change(table, "step, mean", comparison.mean_ns)
    wall = comparison.wall_ns.before or 0
    for state, change in comparison.parts.items():
        if change.is_real or change.difference is None or abs(change.difference) > _SMALLEST_SHARE * wall:
            _add_change(table, _name(state), change)
    console.print(table)
    several = max(comparison.runs) > 1
    note = "* more than chance among these runs and their steps."
    if not several:
        note = (
            "* more than chance among the steps of these runs; differences between two starts of a job are not "
            "included: record each side again with --before and --after."
        )
    if details:
        medians = f"edians over {comparison.steps[0]} and {comparison.steps[1]} steps of the mean over ranks"
        of_runs = f"Means over {comparison.runs[0]} and {comparison.runs[1]} runs of m{medians} (the least of the runs)"
        note = f"{of_runs if several else f'M{medians}'}. {note}"
    console.print(f"{note}\n", style="dim")


def _add_change(table: Table, name: str, change: MeasuredChange) -> None:
    relative = UNKNOWN if change.relative is None else f"{100 * change.relative:+.1f}"
    sign = "+" if (change.difference or 0) > 0 else ""
    table.add_row(
        escape(name),
        milliseconds(change.before),
        milliseconds(change.after),
        f"{sign}{milliseconds(change.difference)}{'*' if change.is_real else ''}",
        milliseconds(change.noise),
        relative,
    )


def _name(state: State) -> str:
    return " ".join(filter(None, (state.kind, state.detail)))


def _print_bandwidths(console: Console, links: Mapping[ComparedLink, MeasuredChange], headings: Sequence[str]) -> None:
    if not links:
        console.print("No communication was matched on all its members in either run: no bandwidth to compare.\n")
        return
    table = _table("busbw", *headings, "noise ±", "%")
    for link, change in links.items():
        table.add_row(
            f"{escape(link.role)} {escape(link.operation)} of {link.group_size}",
            bandwidth(change.before),
            bandwidth(change.after) + ("*" if change.is_real else ""),
            bandwidth(change.noise),
            UNKNOWN if change.relative is None else f"{100 * change.relative:+.1f}",
        )
    console.print(table, "")


def _verdict(comparison: RunComparison, threshold: float) -> str:
    ranks = _ranks_that_differ(comparison)
    differ = (
        f" Ranks recorded: {ranks[0]} before, {ranks[1]} after. Parts and bandwidths are not of the same ranks."
        if ranks
        else ""
    )
    return f"{_verdict_on_steps(comparison, threshold)}{differ}"


def _verdict_on_steps(comparison: RunComparison, threshold: float) -> str:
    change = comparison.step_change
    if change.relative is None or change.noise is None:
        return (
            f"Cannot be judged: {min(comparison.steps)} steps are too few to know the noise; record at least "
            f"{FEWEST_SAMPLES} besides the warm-up."
        )
    times = f"{milliseconds(change.before)} → {milliseconds(change.after)} ms"
    moved = f"the {'mean' if change is comparison.mean_ns else 'median'} step {change.relative:+.1%} ({times})"
    noise = f"noise ±{milliseconds(change.noise)} ms"
    if not change.is_real:
        return f"No change beyond chance: {moved}, {noise}."
    if change.relative < 0:
        return f"Faster: {moved}, {noise}. {_most_of_it(comparison)}"
    limit = "over" if comparison.is_slower(threshold / 100) else "within"
    return f"Slower: {moved}, {noise}; {limit} the threshold of {threshold:g}%. {_most_of_it(comparison)}"


def _most_of_it(comparison: RunComparison) -> str:
    """Return a sentence on the part that moved furthest in the direction of the step."""
    total = comparison.step_change.difference or 0.0
    along = [
        (state, change.difference)
        for state, change in comparison.parts.items()
        if change.is_real and change.difference is not None and change.difference * total > 0
    ]
    if not along:
        return "No single part of the step changed beyond chance."
    state, difference = max(along, key=lambda item: abs(item[1]))
    return f"The largest part of it: {_name(state)}, {'+' if difference > 0 else ''}{milliseconds(difference)} ms."


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
