"""Sync, async, point-to-point and barrier in many orders, from process groups that come and go: whatever deadlocks if
something holds the GIL where a backend's thread wants it.

Arguments: number of process-group life cycles, number of rounds in each.
"""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist

import commtrace.auto  # noqa: F401


def main(life_cycles: int, rounds: int) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torch's own rendezvous finds the keys of the previous groups in the launcher's store, and hangs on them.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for life_cycle in range(life_cycles):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"life cycle {life_cycle}", store), rank=rank, world_size=size
        )
        pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
        for number in range(rounds):
            one_round(number, pairs[dist.get_rank() // 2])
        dist.destroy_process_group()


def one_round(number: int, pair: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(number)
    async_works = [dist.all_reduce(torch.ones(draw.choice([1, 1000, 100_000])), async_op=True) for _ in range(4)]
    works = [
        dist.isend(torch.full((100,), float(rank)), (rank + 1) % size),
        dist.irecv(torch.empty(100), (rank - 1) % size),
        dist.all_gather_single(torch.empty(64), torch.ones(32), group=pair, async_op=True),
        *async_works[: draw.randrange(5)],
    ]
    dist.all_reduce(torch.ones(10), group=pair)
    draw.shuffle(works)
    for work in works:
        work.wait()
    if number % 3 == 0:
        dist.barrier()
    batch = [
        dist.P2POp(dist.isend, torch.ones(500), (rank + 1) % size),
        dist.P2POp(dist.irecv, torch.empty(500), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == size * (size - 1) / 2
    dist.broadcast(total, src=number % size)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
