"""Training loops without a line for commtrace. Argument: which of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

ITERATIONS = 4


def main(name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    dist.barrier()  # of the set-up
    LOOPS[name]()
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def ddp() -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for iteration in range(ITERATIONS):
        wrapped(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration == 1:
            wrapped.eval()
            with torch.no_grad():
                wrapped(torch.randn(4, 16))
            wrapped.train()


def resumed() -> None:
    """The optimizer's state is loaded before training; rank 0 alone evaluates and saves, the other one waits for it."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    set_optimizer_state_dict(wrapped, optimizer, get_optimizer_state_dict(wrapped, optimizer))
    for iteration in range(10):
        if iteration == 6 and dist.get_rank() == 0:
            wrapped.eval()
            with torch.no_grad():
                wrapped.module(torch.randn(4, 16))
                time.sleep(1.0)
            wrapped.train()
            torch.save(wrapped.state_dict(), sys.argv[2])
        wrapped(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand() -> None:
    trained = model()
    for _ in range(2 * ITERATIONS):
        trained(torch.randn(4, 16)).sum().backward()
        for parameter in trained.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.001)
            parameter.grad = None


LOOPS: dict[str, Callable[[], None]] = {"ddp": ddp, "by_hand": by_hand, "resumed": resumed}

if __name__ == "__main__":
    main(sys.argv[1])
