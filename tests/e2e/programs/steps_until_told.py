"""Short steps of communication until a file appears, for tests of what can be switched while a job runs.

torchrun --nproc-per-node 4 tests/e2e/programs/steps_until_told.py STOP_FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto

MOST_STEPS = 6_000


def main() -> None:
    stop_file = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for number in range(MOST_STEPS):
        with commtrace.step(number):
            told = torch.tensor([float(dist.get_rank() == 0 and stop_file.exists())])
            dist.all_reduce(told)
            time.sleep(0.02)
            dist.all_reduce(torch.ones(64))
        if told.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
