"""Starts the programs of this folder, on a GPU as torchrun does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from tests.e2e.launch import REPOSITORY, Completed, fork, launch, run

PROGRAMS: Final = REPOSITORY / "tests" / "gpu" / "programs"


def start_program(
    arguments: Sequence[str | Path], environment: Mapping[str, str], *, ranks: int = 0, timeout: float = 120.0
) -> Completed:
    """Run a program to its end, or until its time is up.

    Args:
        arguments: the program's name and its arguments.
        environment: added to this process's own.
        ranks: started by torchrun; 0 for one process without it. Without a GPU they are forked from one process that
            has imported torch: then only the program itself is tried.
        timeout: seconds.
    """
    command = [PROGRAMS / arguments[0], *arguments[1:]]
    environment = {"PYTHONPATH": python_path(), **environment}
    if not torch.cuda.is_available():
        return fork(command, max(ranks, 1), environment, timeout)
    if ranks:
        return launch(command, ranks, environment, timeout)
    return run([sys.executable, *map(str, command)], environment, timeout)


def python_path() -> str:
    """Return the path of modules: neither commtrace nor the tests need to be installed."""
    # What the machine lacks may have been put elsewhere.
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
