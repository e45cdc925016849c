"""Steps of sleeping and reducing; ranks sleep longer in some steps.

Arguments: seconds to run, then ``RANK:FIRST:LAST`` for each fault. Sleeping stands for work: it does not compete for
the cores of a small machine.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto

WORK_SECONDS = 0.08
LONGER = 1.5


def main(seconds: float, faults: list[tuple[int, ...]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    end = time.monotonic() + seconds
    number, going = 0, torch.ones(1)
    while going.item() > 0:
        is_slow = any(rank == dist.get_rank() and first <= number <= last for rank, first, last in faults)
        with commtrace.step(number):
            time.sleep(WORK_SECONDS * (LONGER if is_slow else 1.0))
            # The ranks end together: the smallest wish counts.
            going.fill_(float(time.monotonic() < end))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        number += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), [tuple(map(int, fault.split(":"))) for fault in sys.argv[2:]])
