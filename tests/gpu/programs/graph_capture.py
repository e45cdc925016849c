"""Captures CUDA graphs slowly, so that the harvester passes while it does.

python tests/gpu/programs/graph_capture.py BACKEND
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    tensor = torch.ones(1024, device=device)
    for step in range(5):
        with commtrace.step(step):
            dist.all_reduce(tensor)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), commtrace.span("captured"):
                doubled = tensor * 2
                time.sleep(0.7)
            graph.replay()
            dist.all_reduce(tensor)
    torch.cuda.synchronize()
    assert doubled.tolist() == (tensor * 2).tolist()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
