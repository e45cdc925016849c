"""Rank 0 ends while its all_reduce is under way: the other rank joins in when rank 0 is on its way out."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import commtrace.auto  # noqa: F401

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1000), async_op=True)
    else:
        time.sleep(1.0)
        dist.all_reduce(torch.ones(1000))
