"""Steps that end with an all_reduce over all ranks, half of which run on another clock.

Arguments: how many steps, and the seconds by which that clock is ahead.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

CLONE_NEWTIME = 0x80  # of unshare(2)


def main(steps: int) -> None:
    import commtrace.auto  # it writes down the clock and the node of this process

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number in range(steps):
        with commtrace.step(number):
            with commtrace.span("work"):
                time.sleep(0.02)
            dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


def go_on_in_another_time(ahead_seconds: int) -> None:
    """Leave the rest to a child in a time namespace of its own, and end as it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "no time namespace")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_seconds} 0\n")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    is_ahead = int(os.environ["LOCAL_RANK"]) >= 2
    os.environ["COMMTRACE_NODE_ID"] = "ahead" if is_ahead else "reference"
    if is_ahead:
        go_on_in_another_time(int(sys.argv[2]))
    main(int(sys.argv[1]))
