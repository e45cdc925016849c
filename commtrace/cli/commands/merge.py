"""``commtrace merge NODE_DIR… -o RUN``: a job's ranks from several nodes as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commtrace.recording.installation import own_command
from commtrace.trace.files import merge as merging


def merge(
    nodes: Annotated[
        list[Path],
        typer.Argument(metavar="NODE_DIR", help="Directories that hold ranks of one job.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The run directory to make.", show_default=False)],
    links: Annotated[
        bool, typer.Option("--links", help="Link to the ranks' folders: new files of a running job appear too.")
    ] = False,
) -> None:
    """Merge directories with ranks of one job, such as copies from nodes without a shared disk.

    Files are copied; on the same file system they are hard links and take no space. The command refuses directories of
    different jobs: world sizes that differ, a rank in two directories, jobs that did not run at the same time, process
    groups that contradict each other.
    """
    ranks = merging.merge(nodes, output, merging.link if links else merging.copy)
    typer.echo(
        f"{output}: {ranks} rank{'s' * (ranks > 1)} of {len(nodes)} director{'y' if len(nodes) == 1 else 'ies'}."
    )
    typer.echo(f"Next: {own_command()} summary {output}")
