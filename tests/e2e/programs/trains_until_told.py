"""A DDP model in a loop that nobody marks, until a file appears: what is asked of it while it runs is switched there.

torchrun --nproc-per-node 2 tests/e2e/programs/trains_until_told.py STOP_FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commtrace.auto  # noqa: F401

MOST_STEPS = 6_000


class Block(nn.Module):
    """A layer with something inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.inner(values).relu()


def main() -> None:
    stop_file = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(MOST_STEPS):
        model(torch.ones(2, 8)).sum().backward()
        told = torch.tensor([float(dist.get_rank() == 0 and stop_file.exists())])
        dist.all_reduce(told)
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
        if told.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
