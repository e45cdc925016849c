"""Ends without stopping commtrace: with nothing left to do, with work on the device, or after a child was forked.

python tests/gpu/programs/exits.py WAY

Prints the time at its last line. Without a GPU there is no work to be busy with.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Final

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto

WAYS: Final = ("idle", "busy", "forked")


def main(way: str) -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if has_gpu else None
    )
    tensor = torch.ones(1024, device=device)
    for step in range(3):
        with commtrace.step(step):
            dist.all_reduce(tensor)
    if way == "forked":
        child = multiprocessing.get_context("fork").Process(target=time.monotonic)
        child.start()
        child.join()
        assert child.exitcode == 0
    if way == "busy" and has_gpu:
        torch.cuda._sleep(600_000_000)  # about 0.3 s
        with commtrace.step(3):
            dist.all_reduce(tensor)
    elif has_gpu:
        torch.cuda.synchronize()
    dist.destroy_process_group()
    print(f"ends at {time.time()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
