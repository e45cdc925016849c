"""``commtrace export RUN --format perfetto``: a run for another program to open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from commtrace.analysis.breakdown.states import BUBBLE
from commtrace.analysis.chain import analyse
from commtrace.analysis.step_totals import step_totals
from commtrace.analysis.steps.choice import load_window
from commtrace.analysis.timeline import Timeline
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    AttemptOption,
    RunsArgument,
    StepsOption,
    check_output,
    run_directory,
)
from commtrace.cli.output import PlainConsole, duration, share, write_csv, write_parquet
from commtrace.errors import ConfigurationError
from commtrace.exporters import chrome_trace, perfetto
from commtrace.interchange.simulators import aicb_log, aiob, simai_result
from commtrace.interchange.simulators.simai_of_run import roles_of_groups, workload_of_rank

_MANY_SLICES = 2_000_000


class ExportFormat(str, Enum):
    """The format of the file, or of the files."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    CSV = "csv"
    PARQUET = "parquet"
    AICB = "aicb"
    SIMAI = "simai"


def export(
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="perfetto (for ui.perfetto.dev) or chrome (JSON); csv or parquet for all tables; aicb or simai for "
            "these simulators."
        ),
    ] = ExportFormat.PERFETTO,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file to write, or the directory of several. Default: trace.pftrace, trace.json, tables, aicb or "
            "simai.",
            show_default=False,
        ),
    ] = None,
    steps: StepsOption = "",
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="aicb, simai: the rank to write. Default: the lowest.", show_default=False),
    ] = None,
) -> None:
    """Write a run for the Perfetto UI, or its tables as files.

    A process per rank; in it the schedule, the stalls and a track for every process group; arrows from sends to their
    receives. The perfetto format is Perfetto's own and needs the perfetto package; without it the Chrome JSON is
    written, which the Perfetto UI opens as well.

    With csv or parquet, a file for each of the tables that `commtrace sql` has: spans, steps, ranks and so on. Existing
    ones are replaced.

    With aicb, the communication log of one rank as AICB writes it, and AICB's tables. With simai, a measured step of
    one rank as a SimAI workload, the overlap ratios and the row of results of SimAI-Analytical, and compute files.
    """
    run = run_directory(runs, attempt)
    if rank is not None and format not in (ExportFormat.AICB, ExportFormat.SIMAI):
        raise ConfigurationError("--rank belongs to --format aicb and simai; the other formats have all ranks")
    if format in (ExportFormat.AICB, ExportFormat.SIMAI):
        write = _write_aicb if format is ExportFormat.AICB else _write_simai
        write(run, steps or None, rank, output or Path(format.value))
        return
    if format in (ExportFormat.CSV, ExportFormat.PARQUET):
        _write_tables(run, steps, format, output or Path("tables"))
        return
    native = format is ExportFormat.PERFETTO and perfetto.is_available()
    target = output or Path("trace.pftrace" if native else "trace.json")
    check_output(target)
    console = PlainConsole(stderr=True)
    window = load_window(run, steps or None)
    timeline = Timeline.of_recording(window.context, window.wanted)
    with console.status(f"Writing {target}"):
        num_slices = (perfetto if native else chrome_trace).write(
            timeline.outline(), map(timeline.step, timeline.steps), target
        )
    for note in (*_clocks(timeline), *window.recorded.problems):
        console.print(f"note: {note}", markup=False)
    if format is ExportFormat.PERFETTO and not native:
        console.print(
            f"The perfetto package is not installed ({perfetto.INSTALL}), so this is Chrome JSON.", markup=False
        )
    if num_slices > _MANY_SLICES:
        console.print("That is more than a browser draws smoothly: choose steps with --steps A:B.")
    num_steps = f"{len(timeline.steps)} step{'s' * (len(timeline.steps) != 1)}"
    typer.echo(f"{target}: {num_steps}, {num_slices} slices. Next: open it at https://ui.perfetto.dev")


def _write_tables(run: Path, steps: str, format: ExportFormat, directory: Path) -> None:
    from commtrace.python.recorded_run import open as open_run
    from commtrace.python.sql import TABLES

    recorded = open_run(run, steps=steps or None)
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in TABLES.items():
        if name == "files":  # rows as they were recorded, which other programs read from the run itself
            continue
        rows = make(recorded)
        path = directory / f"{name}.{format.value}"
        if format is ExportFormat.PARQUET:
            write_parquet(rows, path)
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                write_csv(rows, file)
        typer.echo(f"{path}: {len(rows)} rows")
    for problem in recorded.problems:
        typer.echo(f"! {problem}", err=True)


def _clocks(timeline: Timeline) -> Iterator[str]:
    outline = timeline.outline()
    residual = outline["residual_ns"]
    if residual is None:
        yield "the hosts' clocks could not be aligned: the order of events on different hosts is unknown."
    elif len({rank["host"] for rank in outline["ranks"]}) > 1:
        yield f"the hosts' clocks agree to {duration(residual['p99'])} (p99)."


def _write_aicb(run_directory: Path, steps: str | None, rank: int | None, directory: Path) -> None:
    """Write the log of a rank and its tables.

    Raises:
        ConfigurationError: the rank was not recorded, or has no step.
    """
    run = load_window(run_directory, steps).recorded
    log = aicb_log.log_of_rank(run, min(run.ranks) if rank is None else rank)
    directory.mkdir(parents=True, exist_ok=True)
    lines = aicb_log.write_log(log, directory / "log.csv")
    by_size = aicb_log.calls_by_size(log)
    aicb_log.write_calls(by_size, directory / "communication.csv")
    times = aicb_log.IterationTimes.of(log)
    aicb_log.write_iterations(times, directory / "iterations.csv")
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


def _write_simai(run_directory: Path, steps: str | None, rank: int | None, directory: Path) -> None:
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
