"""``commtrace import KIND FILES… -o RUN``: a run from what another program recorded."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from commtrace.importers.kineto import KinetoOptions, import_kineto


class Kind(str, Enum):
    """What the files are."""

    KINETO = "kineto"


class Steps(str, Enum):
    """What a step of a trace is."""

    WHOLE = "whole"
    PROFILER = "profiler"


def import_(
    kind: Annotated[Kind, typer.Argument(help="kineto: traces of torch.profiler.", show_default=False)],
    files: Annotated[list[Path], typer.Argument(help="One file per rank.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory of the new run.", show_default=False)],
    steps: Annotated[
        Steps, typer.Option(help="kineto: whole (a file is one step) or profiler (its ProfilerSteps are the steps).")
    ] = Steps.WHOLE,
    communication_pattern: Annotated[
        str,
        typer.Option(
            metavar="REGEX",
            help="kineto: names of communication kernels, besides those named nccl.",
            show_default=False,
        ),
    ] = "",
    ranks_per_host: Annotated[
        int,
        typer.Option(
            help="kineto: how many ranks share a host, and so a clock. Default: as many as it has devices.",
            show_default=False,
        ),
    ] = 0,
) -> None:
    """Make a run from what another program recorded; every reading command takes it.

    kineto: the JSON that torch.profiler writes, plain or gzip, one file per rank.
    """
    options = KinetoOptions(communication_pattern or None, steps is Steps.PROFILER, ranks_per_host)
    console = Console(stderr=True, highlight=False)
    with console.status("Importing") as status:
        imported = import_kineto(files, output, options, on_file=lambda path: status.update(f"Reading {path}"))
    typer.echo(
        f"{output}: {imported.ranks} rank{'s' * (imported.ranks != 1)}, {imported.num_spans} spans. "
        f"Next: commtrace summary {output}"
    )
