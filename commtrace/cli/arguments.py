"""What several commands ask for in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commtrace.trace.locate import NEWEST_RUN, RUNS

__all__ = ["NEWEST_RUN", "RunArgument"]

RunArgument = Annotated[
    Path, typer.Argument(help=f"The run directory. Default: the newest run below {RUNS}.", show_default=False)
]
