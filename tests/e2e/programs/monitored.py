"""Steps of sleeping and reducing. While the file SLOW exists, the rank that it names sleeps longer, by a share.

Arguments: the file; most seconds to run. A file ``stop`` beside the first one ends the job earlier. Sleeping stands for
work: it does not compete for the cores of a small machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto

WORK_SECONDS = 0.08


def main(slow: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    end = time.monotonic() + seconds
    number, going = 0, torch.ones(1)
    while going.item() > 0:
        with commtrace.step(number):
            time.sleep(WORK_SECONDS * (1 + _extra(slow)))
            # The ranks end together: the smallest wish counts.
            going.fill_(float(time.monotonic() < end and not slow.with_name("stop").exists()))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        number += 1
    print(f"rank {dist.get_rank()} trained {number} steps\n", end="", flush=True)
    dist.destroy_process_group()


def _extra(slow: Path) -> float:
    try:
        rank, share = slow.read_text().split()
    except (OSError, ValueError):  # it is not there, or half written
        return 0.0
    return float(share) if int(rank) == dist.get_rank() else 0.0


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
