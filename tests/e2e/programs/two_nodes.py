"""All ranks add up numbers. On request one of them fails half-way, in the first attempt only."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fails", type=int, default=-1)
    parser.add_argument("--import", dest="imports", action="store_true")
    options = parser.parse_args()
    if options.imports:
        import commtrace.auto  # noqa: F401
    dist.init_process_group("gloo")
    flag = f"failed-{options.fails}"
    for step in range(options.steps):
        dist.all_reduce(torch.ones(1000))
        if options.steps > 1:
            time.sleep(0.1)
        if step == options.steps // 2 and dist.get_rank() == options.fails and not os.path.exists(flag):
            open(flag, "w").close()
            raise SystemExit(3)
    dist.destroy_process_group()
