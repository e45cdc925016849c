"""Four ranks train for a while; then one does not come any more. Arguments: that rank; ``sleeps`` or ``dies``.

``sleeps`` sleeps before an all_reduce, where it reads its next input; ``dies`` is killed there. The others wait in it.
The ranks are forked from this process, which leaves the others alone when one is killed: torchrun would end them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import commtrace

STEPS, WORLD_SIZE = 100, 4


def main(lost: int, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    gc.freeze()  # else each process goes through all modules when it ends, and copies them
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(WORLD_SIZE))
    for rank in range(WORLD_SIZE):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD_SIZE))
            train(lost, how)
    for _ in range(WORLD_SIZE):
        os.wait()


def train(lost: int, how: str) -> None:
    commtrace.start()  # as the environment says
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = 0
    while True:
        with commtrace.step(number):
            time.sleep(0.05)
            if number == STEPS and dist.get_rank() == lost:
                stay_away(how)
            if number == STEPS and how == "dies":
                # gloo raises when its peer is gone; NCCL waits. Wait, as with NCCL.
                time.sleep(600)
            dist.all_reduce(torch.ones(10))
        number += 1


def stay_away(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    next(iter(DataLoader(Stalled())))


class Stalled(Dataset[torch.Tensor]):
    """Samples on a file system that does not answer."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(600)
        return torch.ones(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
