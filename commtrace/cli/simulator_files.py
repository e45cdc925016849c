"""``commtrace export --format aicb`` and ``simai``: the files, and what to print about them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from commtrace.analysis.breakdown.states import BUBBLE
from commtrace.analysis.chain import analyse
from commtrace.analysis.step_totals import step_totals
from commtrace.analysis.steps.choice import load_window
from commtrace.cli.output import duration, share
from commtrace.exporters.simulators import aicb_tables, aiob, simai_result
from commtrace.exporters.simulators.aicb_log import log_of_rank, write_log
from commtrace.exporters.simulators.simai_of_run import roles_of_groups, workload_of_rank


def write_aicb(run_directory: Path, steps: str | None, rank: int | None, directory: Path) -> None:
    """Write the log of a rank and its tables.

    Raises:
        ConfigurationError: the rank was not recorded, or has no step.
    """
    run = load_window(run_directory, steps).recorded
    log = log_of_rank(run, min(run.ranks) if rank is None else rank)
    directory.mkdir(parents=True, exist_ok=True)
    lines = write_log(log, directory / "log.csv")
    by_size = aicb_tables.calls_by_size(log)
    aicb_tables.write_calls(by_size, directory / "communication.csv")
    times = aicb_tables.IterationTimes.of(log)
    aicb_tables.write_iterations(times, directory / "iterations.csv")
    calls = sum(map(len, log.steps))
    typer.echo(
        f"{directory / 'log.csv'}: rank {log.rank}, {len(log.init)} calls before the first step and {calls} in "
        f"{len(log.steps)} steps, {lines} lines"
    )
    typer.echo(f"{directory / 'communication.csv'}: {len(by_size)} rows by phase, operation, group and size")
    typer.echo(
        f"{directory / 'iterations.csv'}: a step takes {times.mean:.2f} ms (p90 {times.p90:.2f}, most {times.most:.2f})"
    )
    _print_notes(log.notes)
    typer.echo("Next: python -m log_analyzer.analyze_res_csv log.csv, in a checkout of AICB")


def write_simai(run_directory: Path, steps: str | None, rank: int | None, directory: Path) -> None:
    """Write a measured step as a workload, with what SimAI-Analytical assumes and answers.

    Raises:
        ConfigurationError: the rank was not recorded, or no step of it has a forward or a backward.
    """
    analysis = analyse(run_directory, steps)
    chosen = min(analysis.run.ranks) if rank is None else rank
    measured = workload_of_rank(analysis, chosen)
    totals = step_totals(analysis)
    roles = roles_of_groups(analysis.run)
    bubble_ns = int(analysis.partition.total(BUBBLE).sum())
    overlaps = simai_result.overlaps(totals.communication.table(analysis.run), roles, bubble_ns)
    result = simai_result.result_of(totals.means(analysis.run), roles)
    directory.mkdir(parents=True, exist_ok=True)
    measured.workload.write(directory / "workload.txt")
    options = simai_result.write_options(overlaps, directory / "overlap.txt")
    simai_result.write_result(result, analysis.run.any_metadata.run_id, directory / "result.csv")
    typer.echo(
        f"{directory / 'workload.txt'}: step {measured.step} of rank {measured.rank} ({duration(measured.wall_ns)}, "
        f"the median), {len(measured.workload.layers)} rows"
    )
    typer.echo(f"{directory / 'overlap.txt'}: {options or 'nothing was sent'}, measured over all ranks")
    typer.echo(
        f"{directory / 'result.csv'}: mean step of {duration(result.wall_ns)}: compute "
        f"{share(result.compute_ns, result.wall_ns)}, exposed communication "
        f"{share(result.total_exposed_ns, result.wall_ns)}, bubble {share(result.bubble_ns, result.wall_ns)}, "
        f"{share(result.rest_ns, result.wall_ns)} that SimAI has no column for"
    )
    _write_compute(aiob.compute_times(analysis, chosen), directory)
    _print_notes((*measured.notes, *analysis.recorded.problems))


def _write_compute(times: aiob.ComputeTimes, directory: Path) -> None:
    if not times.forward:
        typer.echo(
            "note: no compute file: record with COMMTRACE_MODULES=depth=4 to have the times of layers.", err=True
        )
        return
    for name, of_way in (("aiob.txt", times.forward), ("aiob_backward.txt", times.backward)):
        aiob.write_times(times.steps, of_way, directory / name)
        typer.echo(f"{directory / name}: {len(of_way)} sections")


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)
