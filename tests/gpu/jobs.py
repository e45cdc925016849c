"""Runs the programs of the GPU tests, within the time that all of them have together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist

from tests.e2e.launch import Completed
from tests.gpu.programs.start import start_program

SECONDS: Final = 450.0
"""For all tests of a session together: a lent machine may give ten minutes, and the table must be printed in these."""
_LEAST_SECONDS: Final = 20.0
_deadline = [float("inf")]

NEEDS_NCCL: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL: this build has none"),
]

BACKENDS: Final = ("nccl2", "nccl-legacy") if hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL2") else ("nccl",)
"""As given to ``init_process_group``: since torch 2.15 there are two."""


def start_clock() -> None:
    """The first of the GPU tests begins now."""
    _deadline[0] = time.monotonic() + SECONDS


def run_program(
    arguments: Sequence[str | Path], environment: dict[str, str], *, ranks: int = 0, timeout: float = 120.0
) -> Completed:
    """Run a program; skip the test if there is no time left for it.

    Args:
        arguments: the program's name and its arguments.
        environment: added to this process's own.
        ranks: started by torchrun; 0 for one process without it.
        timeout: seconds; less if less is left for all tests.
    """
    timeout = min(timeout, _deadline[0] - time.monotonic())
    if timeout < _LEAST_SECONDS:
        pytest.skip(f"time is up: all tests together have {SECONDS:.0f} s")
    completed = start_program(arguments, environment, ranks=ranks, timeout=timeout)
    assert not completed.timed_out, completed.stdout[-8_000:]
    assert completed.returncode == 0, completed.stdout[-8_000:]
    assert "switched off" not in completed.stdout, completed.stdout[-8_000:]
    return completed
