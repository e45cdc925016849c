"""Trains and destroys its process groups while the model is still there, again and again, so that the reducer of the
model is the last one to hold the group.

The argument is how often. Gradients are kept: torch alone may hang where a thread of gloo's frees a tensor of Python's.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commtrace.auto  # noqa: F401


def life_cycle() -> list[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        work.wait()
    kept: list[object] = [(parameter, parameter.grad) for parameter in model.parameters()]
    dist.destroy_process_group()
    return kept


def main() -> None:
    torch.set_num_threads(1)
    kept = [life_cycle() for _ in range(int(sys.argv[1]))]
    print(f"lived {len(kept)} times")


if __name__ == "__main__":
    main()
