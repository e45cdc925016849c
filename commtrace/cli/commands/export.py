"""``commtrace export RUN --format perfetto``: a run for another program to open."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from commtrace.analysis.steps.choice import load_window
from commtrace.analysis.timeline import Timeline
from commtrace.cli.arguments import DEFAULT_RUNS, RunsArgument, StepsOption, run_directory
from commtrace.cli.output import PlainConsole, duration
from commtrace.cli.table_files import write_csv, write_parquet
from commtrace.errors import ConfigurationError
from commtrace.exporters import chrome_trace, perfetto

_MANY_SLICES = 2_000_000


class Format(str, Enum):
    """The format of the file, or of the files."""

    PERFETTO = "perfetto"
    CHROME = "chrome"
    CSV = "csv"
    PARQUET = "parquet"
    AICB = "aicb"
    SIMAI = "simai"


def export(
    runs: RunsArgument = DEFAULT_RUNS,
    format: Annotated[
        Format,
        typer.Option(
            help="perfetto (for ui.perfetto.dev) or chrome (JSON); csv or parquet for all tables; aicb or simai for "
            "these simulators."
        ),
    ] = Format.PERFETTO,
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
    run = run_directory(runs)
    if rank is not None and format not in (Format.AICB, Format.SIMAI):
        raise ConfigurationError("--rank belongs to --format aicb and simai; the other formats have all ranks")
    if format in (Format.AICB, Format.SIMAI):
        # imported here: a trace for Perfetto needs none of it
        from commtrace.cli import simulator_files

        write = simulator_files.write_aicb if format is Format.AICB else simulator_files.write_simai
        write(run, steps or None, rank, output or Path(format.value))
        return
    if format in (Format.CSV, Format.PARQUET):
        _write_tables(run, steps, format, output or Path("tables"))
        return
    console = PlainConsole(stderr=True)
    window = load_window(run, steps or None)
    timeline = Timeline.of_recording(window.context, window.wanted)
    native = format is Format.PERFETTO and perfetto.is_available()
    target = output or Path("trace.pftrace" if native else "trace.json")
    with console.status(f"Writing {target}"):
        num_slices = (perfetto if native else chrome_trace).write(
            timeline.outline(), map(timeline.step, timeline.steps), target
        )
    for note in (*_clocks(timeline), *window.recorded.problems):
        console.print(f"note: {note}", markup=False)
    if format is Format.PERFETTO and not native:
        console.print(
            f"The perfetto package is not installed ({perfetto.INSTALL}), so this is Chrome JSON.", markup=False
        )
    if num_slices > _MANY_SLICES:
        console.print("That is more than a browser draws smoothly: choose steps with --steps A:B.")
    num_steps = f"{len(timeline.steps)} step{'s' * (len(timeline.steps) != 1)}"
    typer.echo(f"{target}: {num_steps}, {num_slices} slices. Next: open it at https://ui.perfetto.dev")


def _write_tables(run: Path, steps: str, format: Format, directory: Path) -> None:
    from commtrace.recorded_run import open as open_run
    from commtrace.sql import TABLES

    recorded = open_run(run, steps=steps or None)
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in TABLES.items():
        if name == "files":  # rows as they were recorded, which other programs read from the run itself
            continue
        rows = make(recorded)
        path = directory / f"{name}.{format.value}"
        if format is Format.PARQUET:
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
