"""Trains until one rank stops to take part: it waits for a file that nobody writes.

    torchrun --nproc-per-node 4 examples/stories/hang.py

Every 20 steps rank 0 writes a checkpoint, and rank 2 waits until it is there. In step 40 rank 0 does not write one.
``--fixed`` lets it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", action="store_true", help="write every checkpoint")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder = shared_folder()
    for step in range(options.steps):
        if step and step % EVERY == 0:
            checkpoint = folder / f"step-{step}.pt"
            if dist.get_rank() == 0 and (step < 2 * EVERY or options.fixed):
                torch.save(model.state_dict(), checkpoint)
            if dist.get_rank() == 2:
                wait_for(checkpoint)
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    dist.destroy_process_group()


def shared_folder() -> Path:
    """Return a new folder, the same one on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
