"""Peaks of torch's allocator as the script sees them, in steps that hold more and less, and what a reading takes.

    python tests/gpu/programs/peak_memory.py OUTPUT

The script resets its own peak before the third step. Writes ``OUTPUT/figures.json``. Without a GPU nothing is held.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import commtrace

MIB: Final = 1 << 20
HELD: Final = (64, 256, 32, 512, 128)
"""MiB of each step."""
RESET_BEFORE: Final = 2
READINGS: Final = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if has_gpu else None
    )
    commtrace.start(commtrace.Config(dir=str(output / "run")))
    peaks = []
    for step, held in enumerate(HELD):
        if has_gpu and step == RESET_BEFORE:
            torch.cuda.reset_peak_memory_stats()
        with commtrace.step(step):
            tensor = torch.ones(held * MIB // 4 if has_gpu else 4, device=device)
            dist.all_reduce(tensor)
            del tensor
        peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if has_gpu else [0, 0])
    commtrace.stop()
    reading_ns = 0
    if has_gpu:
        begin = time.perf_counter_ns()
        for _ in range(READINGS):
            torch.cuda.memory_stats_as_nested_dict(0)
        reading_ns = (time.perf_counter_ns() - begin) // READINGS
    (output / "figures.json").write_text(json.dumps({"peaks": peaks, "reading_ns": reading_ns}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
