"""``commtrace plot timeline RUN -o step.svg``: figures of a run for papers and tickets."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from commtrace.analysis.windows.run import open_run
from commtrace.cli.arguments import (
    DEFAULT_RUNS,
    AttemptOption,
    RunsArgument,
    StepsOption,
    check_output,
    run_directory,
)
from commtrace.cli.output import PlainConsole
from commtrace.errors import ConfigurationError
from commtrace.python.plots.heat_map import SLOWNESS, VALUES
from commtrace.python.plots.run_plots import RunPlots
from commtrace.python.plots.style import Plot
from commtrace.trace.selection import StepRange


class Figure(str, Enum):
    """What is drawn."""

    TIMELINE = "timeline"
    BREAKDOWN = "breakdown"
    HEAT_MAP = "heat-map"


class ColourBy(str, Enum):
    """Meaning of the colours of forwards and backwards."""

    KIND = "kind"
    MICROBATCH = "microbatch"


class BarSubject(str, Enum):
    """What a bar stands for."""

    RANK = "rank"
    STAGE = "stage"
    HOST = "host"
    REPLICA = "replica"


def plot(
    figure: Annotated[Figure, typer.Argument(metavar="timeline|breakdown|heat-map", help="What to draw.")],
    runs: RunsArgument = DEFAULT_RUNS,
    attempt: AttemptOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write: .svg, .png or .pdf. Default: FIGURE.svg.", show_default=False
        ),
    ] = None,
    steps: StepsOption = "",
    step: Annotated[
        int | None, typer.Option(help="timeline: this step. Default: the one of median duration.", show_default=False)
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="A:B,C",
            help="timeline: these ranks (B exclusive). Default: all, or of more than 24 the median and the slowest of "
            "each stage.",
            show_default=False,
        ),
    ] = "",
    colour_by: Annotated[ColourBy, typer.Option(help="timeline: colours of forwards and backwards.")] = ColourBy.KIND,
    by: Annotated[
        BarSubject | None,
        typer.Option(help="breakdown: a bar for each. Default: rank, or stage if there are many.", show_default=False),
    ] = None,
    value: Annotated[str, typer.Option(help=f"heat-map: {', '.join(VALUES)}.")] = SLOWNESS,
    rows: Annotated[
        str,
        typer.Option(
            metavar="DIMENSION", help="heat-map: rank, host, dp, pp, … Default: dp, or rank.", show_default=False
        ),
    ] = "",
    columns: Annotated[
        str,
        typer.Option(
            metavar="DIMENSION", help="heat-map: the same, or step. Default: pp, or step.", show_default=False
        ),
    ] = "",
) -> None:
    """Draw a run as SVG, PNG or PDF.

    The timeline of one step, the parts of the mean step as bars, or a value of every rank as a heat map, in the colours
    of the report. Needs the extra "plot": pip install 'commtrace[plot]'.
    """
    target = output or Path(f"{figure.value}.svg")
    check_output(target)
    path = run_directory(runs, attempt)
    if step is not None and not steps:
        steps = str(step)  # also the warm-up can be drawn, and no other step is read
    with PlainConsole(stderr=True).status(f"Drawing {target}"):
        run = open_run(path, steps or None)
        plots = RunPlots(run)
        drawn: Plot
        match figure:
            case Figure.TIMELINE:
                drawn = plots.timeline(step, _ranks(ranks, run.recorded.ranks) if ranks else None, colour_by.value)
            case Figure.BREAKDOWN:
                drawn = plots.breakdown(by.value if by else None)
            case Figure.HEAT_MAP:
                drawn = plots.heat_map(value, rows or None, columns or None)
        drawn.save(target)
    for problem in run.recorded.problems:
        typer.echo(f"! {problem}", err=True)
    typer.echo(target)


def _ranks(text: str, recorded: Iterable[int]) -> frozenset[int]:
    """Return the recorded ranks among ``0:4,8``."""
    try:
        chosen = [StepRange.parse(part) for part in text.split(",")]
    except ConfigurationError as error:
        raise ConfigurationError(f"--ranks {text}: write A:B (B exclusive) and numbers, such as 0:4,8") from error
    found = frozenset(rank for rank in recorded if any(rank in part for part in chosen))
    if not found:
        raise ConfigurationError(f"--ranks {text}: none of these ranks was recorded")
    return found
