"""Two ranks: receives from anybody between ordinary ones, and messages whose tags are received out of order."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

# As on two nodes, which agree on the name of the run through the job's store.
os.environ.update(LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none")

import commtrace
import commtrace.auto

dist.init_process_group("gloo")
rank = dist.get_rank()
works: list[Any]
with commtrace.step(0):
    if rank == 0:
        for size in (1, 2, 3):
            dist.send(torch.zeros(size), 1)
        works = [dist.isend(torch.zeros(10 + tag), 1, tag=tag) for tag in (5, 6)]
    else:
        dist.recv(torch.zeros(1), 0)
        dist.recv(torch.zeros(2))
        dist.recv(torch.zeros(3), 0)
        works = [dist.irecv(torch.zeros(10 + tag), 0, tag=tag) for tag in (6, 5)]
    for work in works:
        work.wait()
time.sleep(1.0)  # the harvester asks the store for the name of the run while the job has one
dist.barrier()
dist.destroy_process_group()
