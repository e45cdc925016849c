"""Keeps the library of linear algebra to one thread while a run is analysed.

The clocks of a hundred hosts are a few hundred unknowns: too few for threads to pay, and enough for OpenBLAS to start
them, which then wait for one another in circles. On cores that others use as well that took a hundred times as long.
"""

from __future__ import annotations

import os
from typing import Final

_VARIABLE: Final = "OPENBLAS_NUM_THREADS"


def use_one_thread() -> None:
    """Must be called before numpy is imported. Who has set the variable knows better."""
    os.environ.setdefault(_VARIABLE, "1")
