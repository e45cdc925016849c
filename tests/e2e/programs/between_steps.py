"""A loop that marks its steps and spends 30 % of its time between them: with input, evaluations, and unknown work.

Rank 0 writes its metrics into a file before it ends.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import commtrace
import commtrace.auto

STEPS = int(sys.argv[1])
WORK_SECONDS, BETWEEN_SECONDS = 0.07, 0.03


class SlowSamples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((8,), float(number))


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    batches = iter(DataLoader(SlowSamples(), batch_size=4))
    for step in range(STEPS):
        with commtrace.step(step):
            with commtrace.span("work"):
                time.sleep(WORK_SECONDS)
            model(torch.ones(4, 8)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        begin = time.monotonic()
        next(batches)
        if step % 4 == 3:
            model.eval()
            time.sleep(BETWEEN_SECONDS / 3)
            model.train()
        time.sleep(max(BETWEEN_SECONDS - (time.monotonic() - begin), 0.0))
    if dist.get_rank() == 0:
        write_metrics(Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()


def write_metrics(path: Path) -> None:
    """Write the metrics once all steps are in them."""
    for _ in range(100):
        time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['COMMTRACE_PROMETHEUS_PORT']}/metrics") as answer:
            text = answer.read().decode()
        if f"commtrace_step_duration_seconds_count {STEPS}.0" in text:
            path.write_text(text)
            return


main()
