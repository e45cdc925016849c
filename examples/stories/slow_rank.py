"""Trains a small model with DistributedDataParallel; one rank may be slow.

    torchrun --nproc-per-node 4 examples/stories/slow_rank.py --slow-rank 2

The slow rank takes 1.5 times as long for every forward, as a GPU does whose clock is throttled. A sleep takes the place
of the device's work, so that a laptop will do.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FORWARD_SECONDS = 0.06
THROTTLED = 1.5


class Model(torch.nn.Module):
    """A layer whose forward takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        activations: torch.Tensor = self.layer(batch)
        return activations


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-rank", type=int, default=-1, help="the rank that is throttled (default none)")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_slow = dist.get_rank() == options.slow_rank
    model = DistributedDataParallel(Model(FORWARD_SECONDS * (THROTTLED if is_slow else 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
