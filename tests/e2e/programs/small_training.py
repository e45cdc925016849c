"""A few dozen small steps with an optimizer and a gradient all-reduce.

torchrun --nproc-per-node 2 tests/e2e/programs/small_training.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

STEPS = 30


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        model(torch.ones(8, 64)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    # The thread of gloo lets go of the last gradient once it gets the interpreter's lock; torch 2.13 aborts a process
    # that ends before that.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
