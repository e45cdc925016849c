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
from commtrace.exporters import chrome_trace, perfetto

_MANY_SLICES = 2_000_000


class Format(str, Enum):
    """The format of the file."""

    PERFETTO = "perfetto"
    CHROME = "chrome"


def export(
    runs: RunsArgument = DEFAULT_RUNS,
    format: Annotated[Format, typer.Option(help="perfetto (for ui.perfetto.dev) or chrome (JSON).")] = Format.PERFETTO,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write. Default: trace.pftrace or trace.json.", show_default=False
        ),
    ] = None,
    steps: StepsOption = "",
) -> None:
    """Write a run for the Perfetto UI or another viewer.

    A process per rank; in it the schedule, the stalls and a track for every process group; arrows from sends to their
    receives. The perfetto format is Perfetto's own and needs the perfetto package; without it the Chrome JSON is
    written, which the Perfetto UI opens as well.
    """
    run = run_directory(runs)
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


def _clocks(timeline: Timeline) -> Iterator[str]:
    outline = timeline.outline()
    residual = outline["residual_ns"]
    if residual is None:
        yield "the hosts' clocks could not be aligned: the order of events on different hosts is unknown."
    elif len({rank["host"] for rank in outline["ranks"]}) > 1:
        yield f"the hosts' clocks agree to {duration(residual['p99'])} (p99)."
