"""Messages between all pairs of ranks, and large collectives over all of them, in a few steps.

torchrun --nproc-per-node 2 tests/e2e/launchers/programs/large_messages.py 4194304
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist

import commtrace.auto

STEPS = 4
BARRIERS = 50


def main(num_bytes: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    tensor = torch.zeros(num_bytes // 4)
    larger = torch.zeros(num_bytes)  # a wait for a core of this machine, which all members feel, counts for a quarter
    for number in range(STEPS):
        with commtrace.step(number):
            for source, target in itertools.permutations(ranks, 2):
                dist.barrier()  # one message at a time: they would share a link
                if rank == source:
                    dist.send(tensor, target)
                elif rank == target:
                    dist.recv(tensor, source)
            for _ in range(BARRIERS):
                dist.barrier()  # each one tells how the clocks of the nodes lie to each other
            dist.all_reduce(larger)
            dist.broadcast(tensor, number % len(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
