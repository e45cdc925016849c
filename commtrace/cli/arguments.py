"""What several commands ask for in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from commtrace.trace.locate import LATEST, RUNS

NEWEST_RUN: Final = RUNS / LATEST
"""What a command reads that is told of no run."""

RunArgument = Annotated[
    Path, typer.Argument(help=f"The run directory. Default: the newest run below {RUNS}.", show_default=False)
]
