"""A seeded loop on two ranks that averages its gradients itself; its data come from workers.

Every rank prints a digest of its losses and its final weights. The first argument is the number of steps. The second
one is how three loaders start their workers (``fork,spawn,forkserver``), which changes nothing in the data. A third one
makes rank 1 of the first attempt kill itself in that step. Every rank says that it is a node of its own.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

os.environ.setdefault("COMMTRACE_NODE_ID", f"node-{os.environ['RANK']}")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import commtrace.auto

STEPS = int(sys.argv[1])
FATAL_STEP = int(sys.argv[3]) if len(sys.argv) > 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else -1


BATCHES = (STEPS // 2, STEPS // 4, STEPS - STEPS // 2 - STEPS // 4)
"""Of each loader."""


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 4 * self._batches

    def __getitem__(self, index: int) -> torch.Tensor:
        with commtrace.span("augment"):
            return torch.full((8,), float(index))


def main() -> None:
    torch.set_num_threads(1)
    initialise(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    digest = hashlib.sha256()
    number = 0
    for start, count in zip(sys.argv[2].split(","), BATCHES, strict=True):
        for batch in DataLoader(Numbers(count), batch_size=4, num_workers=1, multiprocessing_context=start):
            if number == FATAL_STEP and dist.get_rank() == 1:
                time.sleep(2.0)  # long enough for what came before to be written
                os.kill(os.getpid(), signal.SIGKILL)
            with commtrace.step(number):
                digest.update(one_step(model, optimizer, batch / 10 + dist.get_rank()))
            dist.barrier()
            number += 1
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} computed {digest.hexdigest()}\n", end="")
    dist.destroy_process_group()


def initialise(prefix: str) -> None:
    """Like torch's own rendezvous, which after a restart finds the addresses of the processes that have died."""
    launchers_store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(prefix, launchers_store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> bytes:
    optimizer.zero_grad()
    loss = (model(batch) - batch.mean()).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients[2:]]
    for gradient in gradients[:2]:
        dist.all_reduce(gradient)
    for work in works:
        work.wait()
    for gradient in gradients:
        gradient /= dist.get_world_size()
    optimizer.step()
    dist.all_reduce(loss.detach())
    return loss.detach().numpy().tobytes()


if __name__ == "__main__":
    main()
