"""Trains a small transformer on several NCCL ranks of one GPU, seen by torch.profiler.

    torchrun --nproc-per-node 2 tests/gpu/programs/training.py OUTPUT --layout fsdp2 [--backend nccl2]

Writes the profiler's ``OUTPUT/trace-N.json``. Without a GPU the same runs under gloo, to try the program itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

import torch.distributed as dist

import commtrace.auto  # noqa: F401
from tests.gpu.programs.one_gpu import WARM_UP_STEPS, profiler, start_distributed
from tests.gpu.programs.step_times import Size, build, synchronize, train

STEPS: Final = 6
SIZE: Final = Size(width=512, layers=4, tokens=256, batch=4)
TINY: Final = Size(width=32, layers=2, tokens=16, batch=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--backend", default="nccl")
    options = parser.parse_args()
    device = start_distributed(options.backend)
    model, optimizer, batch = build(device, SIZE if device.type == "cuda" else TINY, options.layout)
    for _ in range(WARM_UP_STEPS):
        train(model, optimizer, batch)
    synchronize(device)
    with profiler(device) as profile:
        for _ in range(STEPS):
            train(model, optimizer, batch)
        synchronize(device)
        time.sleep(2.0 if device.type == "cuda" else 0.0)  # nccl2 looks once a second what has ended
    options.output.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(options.output / f"trace-{dist.get_rank()}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
