"""Ends before anything was written for the first time: what it did is first heard of while Python ends."""

from __future__ import annotations

import torch
import torch.distributed as dist

import commtrace.auto  # noqa: F401

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1000))
