"""Steps with a message between the halves of the world and an all-reduce of a loss.

Arguments: steps, seconds of each, seconds that the job is idle after the last one.

torchrun --nproc-per-node 4 tests/e2e/programs/pairs.py 10 0.01 2
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto


def main(steps: int, seconds: float, idle_seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    pairs = [dist.new_group([first, first + half], group_desc="pp") for first in range(half)]
    model = torch.nn.Linear(16, 1)
    activations = torch.ones(16)
    for number in range(steps):
        with commtrace.step(number):
            if rank < half:
                dist.send(activations * (number + 1), rank + half, group=pairs[rank])
            else:
                dist.recv(activations, rank - half, group=pairs[rank - half])
            time.sleep(seconds)
            loss = model(activations).detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"loss {number:03d} {loss.item():.9f}\n", end="", flush=True)
    time.sleep(idle_seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
