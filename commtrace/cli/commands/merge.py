"""``commtrace merge NODE_DIR… -o RUN``: a job's ranks from several nodes as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commtrace.trace.files import merge as merging


def merge(
    nodes: Annotated[
        list[Path],
        typer.Argument(metavar="NODE_DIR...", help="Directories that hold ranks of one job.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The run directory to make.", show_default=False)],
    links: Annotated[
        bool, typer.Option("--links", help="Point to the ranks' folders: of a running job, what comes is seen too.")
    ] = False,
) -> None:
    """Bring the ranks of one job together that lie in several directories, as copied from nodes without a shared disk.

    Files are copied; on the same file system they take no room, as they are hard links. What is not of one job is
    refused: jobs of other sizes, ranks that lie in two directories, jobs that did not run at the same time, process
    groups that contradict each other.
    """
    ranks = merging.merge(nodes, output, merging.link if links else merging.copy)
    typer.echo(f"{output}: {ranks} rank{'s' * (ranks > 1)} of {len(nodes)} directories.")
    typer.echo(f"Next: commtrace summary {output}")
