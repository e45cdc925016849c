"""DDP with activation checkpointing, a DataLoader, clipping and a distributed checkpoint; prints what it computed.

The argument is the folder of the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import commtrace.auto

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attention(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digest = hashlib.sha256()
    samples: Any = [torch.randn(16) for _ in range(2 * STEPS)]
    batches = iter(DataLoader(samples, batch_size=2))
    for number in range(STEPS):
        with commtrace.step(number):
            loss = model(next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number == STEPS - 1:
                dcp.save(model.state_dict(), checkpoint_id=sys.argv[1])
        digest.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} computed {digest.hexdigest()}\n", end="")
    dist.destroy_process_group()
    commtrace.stop()
    sys.stdout.flush()
    # torch 2.13 alone hung in 5 of 16 runs of this program when its model went: a thread of gloo's drops the last
    # reference to a tensor of the checkpoint's broadcasts, which needs the GIL, while the destructor of the reducer
    # joins that thread with the GIL held. What commtrace added to that,
    # capture/collectives/group_lifecycle.py takes away.
    os._exit(0)


if __name__ == "__main__":
    main()
