"""All kinds of NCCL operations, on as many ranks as there are processes, all of them on one GPU.

    torchrun --nproc-per-node 2 tests/gpu/programs/nccl_operations.py OUTPUT [--backend nccl2]

Writes ``OUTPUT/rank-N.json`` (a checksum, and the memory that was needed) and the profiler's ``OUTPUT/trace-N.json``.
Without a GPU the same runs under gloo, to try the program itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto
from tests.gpu.programs.one_gpu import WARM_UP_STEPS, profiler, start_distributed

STEPS = 10
NUMEL = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--backend", default="nccl")
    options = parser.parse_args()
    device = start_distributed(options.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    width = 2048 if device.type == "cuda" else 64
    weight = torch.full((width, width), 1e-4, device=device)
    total = torch.zeros((), device=device)
    for step in range(WARM_UP_STEPS):
        total += train(step, weight, rank, world_size)
    with profiler(device) as profile:
        for step in range(WARM_UP_STEPS, WARM_UP_STEPS + STEPS):
            with commtrace.step(step):
                total += train(step, weight, rank, world_size)
        if device.type == "cuda":
            torch.cuda.synchronize()
            time.sleep(
                2.0
            )  # nccl2 looks once a second what has ended, and its flight recorder learns no more afterwards
    options.output.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(options.output / f"trace-{rank}.json"))
    figures: dict[str, Any] = {"checksum": float(total).hex(), "allocated": 0, "reserved": 0}
    figures["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        figures["allocated"] = torch.cuda.max_memory_allocated()
        figures["reserved"] = torch.cuda.max_memory_reserved()
    (options.output / f"rank-{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def train(step: int, weight: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """One step: synchronous, asynchronous (waited for early and late), batched and single P2P, and a barrier."""
    device = weight.device
    tensor = torch.full((NUMEL,), float(step + rank), device=device)
    gathered = torch.empty(NUMEL * world_size, device=device)
    scattered = torch.empty(NUMEL // world_size, device=device)
    received = torch.empty_like(tensor)

    activations = weight @ weight
    dist.all_reduce(tensor)
    dist.distributed_c10d.reduce_scatter_tensor(scattered, tensor[: scattered.numel() * world_size].contiguous())
    finish(dist.all_reduce(tensor, async_op=True))
    work = dist.distributed_c10d.all_gather_into_tensor(gathered, tensor, async_op=True)
    activations = activations @ weight
    finish(work)
    first, second = dist.all_reduce(tensor, async_op=True), dist.all_reduce(received.zero_(), async_op=True)
    finish(first)
    finish(second)
    copies = [scattered.clone() for _ in range(3)]  # of their own: gloo reduces them at the same time
    hidden = [dist.all_reduce(copy, async_op=True) for copy in copies]
    for _ in range(60):
        activations = activations @ weight
    for work in hidden:
        finish(work)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    operations = [dist.P2POp(dist.isend, tensor, following), dist.P2POp(dist.irecv, received, previous)]
    for work in dist.batch_isend_irecv(operations):
        finish(work)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(received, 0)
    dist.broadcast(tensor, 0)
    dist.barrier()
    reduced = sum(copy.sum() for copy in copies)
    return tensor.sum() + gathered.sum() + scattered.sum() + reduced + received.sum() + activations.sum()


def finish(work: Any) -> None:
    assert work is not None
    work.wait()


if __name__ == "__main__":
    main()
