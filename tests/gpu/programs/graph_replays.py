"""Steps whose communication is captured into a CUDA graph and replayed, on several ranks that share one GPU.

    torchrun --nproc-per-node 2 tests/gpu/programs/graph_replays.py OUTPUT BACKEND

The first steps run without a graph, one captures, and the rest replay, as torchtitan's trainer does. Writes
``OUTPUT/rank-N.json`` (the result of each step), ``OUTPUT/steps-N.json`` (how long each took, s) and
``OUTPUT/trace-N.json`` (torch.profiler's trace of the last ones).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto
from tests.gpu.programs.one_gpu import profiler, start_distributed
from tests.gpu.replays import EAGER_STEPS, NUMEL, PROFILED_FROM, STEPS


def main() -> None:
    output = Path(sys.argv[1])
    device = start_distributed(sys.argv[2])
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    weight = torch.randn(1024, 1024, device=device) / 32
    value = torch.randn(NUMEL, device=device).view(1024, 1024)
    gathered = torch.empty(NUMEL * size, device=device)
    scattered = torch.empty(NUMEL // size, device=device)

    def forward_and_backward() -> torch.Tensor:
        hidden = value @ weight
        dist.all_reduce(hidden)
        work = dist.all_gather_into_tensor(gathered, hidden.view(-1), async_op=True)
        product = hidden @ weight
        work.wait()
        dist.reduce_scatter_tensor(scattered, (product + gathered[:NUMEL].view_as(product)).view(-1))
        value.copy_(torch.tanh(product) + value / 2)
        return scattered.square().mean()

    stream, graph, results = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    seconds: list[float] = []
    loss = torch.zeros((), device=device)

    def train(step: int) -> None:
        nonlocal loss
        begin = time.perf_counter()
        with commtrace.step(step):
            if step < EAGER_STEPS:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss = forward_and_backward()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                if step == EAGER_STEPS:
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        loss = forward_and_backward()
                graph.replay()
            norm = loss.clone()
            dist.all_reduce(norm)
            results.append(float(norm).hex())
        seconds.append(time.perf_counter() - begin)

    for step in range(PROFILED_FROM):
        train(step)
    with profiler(device) as profile:
        for step in range(PROFILED_FROM, STEPS):
            train(step)
        torch.cuda.synchronize()
        time.sleep(1.0)
    output.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(output / f"trace-{rank}.json"))
    (output / f"rank-{rank}.json").write_text(json.dumps(results))
    (output / f"steps-{rank}.json").write_text(json.dumps(seconds))
    graph.reset()  # before the communicators that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
