"""Trains in several worlds, one after the other, in the same processes: ``new_worlds.py SCENARIO``.

Each world meets at a store of its own, as jobs that restart inside of their processes do. A process that joins later
waits beside the others until then.

SCENARIO: shrink, grow, permute, same, prefixes (of one store for all worlds), several, replace, alone, hang, straggle,
numbered.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commtrace.auto

STEPS = 10

# By world, the rank of each process in it; None for one that is not in it. The last item is the number of its steps.
WORLDS: dict[str, list[tuple[list[int | None], int]]] = {
    "shrink": [([0, 1, 2], STEPS), ([None, 0, 1], 15)],
    "grow": [([0, 1, None], STEPS), ([1, 2, 0], 12)],
    "permute": [([0, 1, 2], STEPS), ([2, 1, 0], 12)],
    "same": [([0, 1, 2], 6), ([0, 1, 2], 6), ([0, 1, 2], 6)],
    "prefixes": [([0, 1, 2], STEPS), ([2, 1, 0], 6), ([2, 1, 0], 6)],
    "several": [([0, 1, 2], STEPS), ([1, 0, None], 5), ([1, 0, None], 5), ([0, None, 1], 9)],
    "replace": [([0, 1, None], STEPS), ([0, None, 1], 9)],
    "alone": [([0, 1], STEPS), ([None, 0], 9)],
    "hang": [([0, 1, 2], STEPS), ([None, 0, 1], 200)],
    "straggle": [([0, 1, 2], STEPS), ([None, 0, 1], 24)],
    "numbered": [([0, 1, 2], STEPS), ([None, 0, 1], 8)],
}


def store_of(scenario: str, number: int, rank: int, world_size: int) -> dist.Store:
    """Return a store for one world: one that its rank 0 keeps, and the launcher's store tells where it is."""
    timeout = timedelta(seconds=60)
    launchers = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    if scenario == "prefixes":
        return dist.PrefixStore(f"world-{number}", launchers)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        launchers.set(f"port-{number}", str(store.port))
        return store
    port = int(launchers.get(f"port-{number}"))
    return dist.TCPStore("127.0.0.1", port, world_size, timeout=timeout)


def train(scenario: str, number: int, rank: int, steps: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if scenario == "numbered":
            # The second world goes on from the checkpoint after step 7.
            with commtrace.step(step + 7 * number):
                one_step(model, optimizer, batches)
        else:
            one_step(model, optimizer, batches)
        if number and scenario == "straggle" and rank == 1:
            time.sleep(0.03)
        if number and scenario == "hang" and rank == 1 and step == 8:
            time.sleep(600)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Generator) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=batches)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.01)


def main() -> None:
    scenario, process = sys.argv[1], int(os.environ["RANK"])
    for number, (ranks, steps) in enumerate(WORLDS[scenario]):
        rank = ranks[process]
        if rank is None:
            continue
        world_size = sum(one is not None for one in ranks)
        store = store_of(scenario, number, rank, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        train(scenario, number, rank, steps)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
