"""Steps that end with an all_reduce over all ranks. Argument: how many."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number in range(steps):
        with commtrace.step(number):
            with commtrace.span("work"):
                time.sleep(0.02)
            dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
