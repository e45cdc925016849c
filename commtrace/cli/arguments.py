"""Arguments that several commands share."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.trace.files.locate import NEWEST_RUN, RUNS

DEFAULT_RUNS: Final = [NEWEST_RUN]

RunArgument = Annotated[
    Path, typer.Argument(help=f"The run directory. Default: the newest run below {RUNS}.", show_default=False)
]

RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help=f"The run directory, or several that hold ranks of one job. Default: the newest run below {RUNS}.",
        show_default=False,
    ),
]


def run_directory(runs: Sequence[Path]) -> Path:
    """Return the directory that a :data:`RunsArgument` means; ranks in several are brought together until the end."""
    if len(runs) == 1:
        return runs[0]
    from commtrace.trace.files.merge import link, merge

    together = tempfile.TemporaryDirectory(prefix="commtrace-")
    atexit.register(together.cleanup)
    merge(runs, Path(together.name), link)
    return Path(together.name)
