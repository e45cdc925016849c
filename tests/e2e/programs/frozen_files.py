"""Trains on while the file system of its trace does not answer, and tells its longest step and how long its end takes.

    COMMTRACE_DIR=run torchrun --nproc-per-node 2 frozen_files.py FLAG SECONDS [holds-lock]

Rank 0 makes the file FLAG, with which the file system is frozen, once all ranks have recorded; it is never thawed. With
``holds-lock`` code in C keeps Python's lock on rank 0 meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

trained_at: list[float] = []


def tell_of_the_end() -> None:
    if trained_at:
        print(f"the end took {time.monotonic() - trained_at[0]:.1f} s\n", end="", flush=True)


# Before commtrace is there, which therefore ends before.
atexit.register(tell_of_the_end)

import commtrace.auto  # noqa: E402, F401

HELD_SECONDS = 5
"""Longer than COMMTRACE_HANG_SECONDS of the test, and than the watch is given to set its timer again."""


def main(flag: Path, seconds: float, *, holds_lock: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    longest, num_steps, has_held = 0.0, 0, False
    began = last = time.monotonic()
    frozen_at = 0.0
    while True:
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if not frozen_at and last - began > 3:
            frozen_at = last
            if rank == 0:
                flag.touch()
        if holds_lock and rank == 0 and frozen_at and not has_held and last - frozen_at > 5:
            has_held = True
            ctypes.PyDLL(None).sleep(HELD_SECONDS)  # until it is over, or a signal comes
        now = time.monotonic()
        longest, last, num_steps = max(longest, now - last), now, num_steps + 1
        is_over = torch.tensor([float(bool(frozen_at) and now - frozen_at > seconds)])
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
    dist.destroy_process_group()
    trained_at.append(time.monotonic())
    print(f"rank {rank}: {num_steps} steps, the longest {longest:.1f} s\n", end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), holds_lock="holds-lock" in sys.argv[3:])
