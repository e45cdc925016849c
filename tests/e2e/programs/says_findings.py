"""A short job with a late rank, whose ranks end in the way that the first argument names.

The second argument is the number of steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import commtrace.auto  # noqa: F401

LATE = 1


def train(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).sum()
        if dist.get_rank() == LATE:
            time.sleep(0.03)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def end(how: str) -> None:
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if how == "sys_exit":
        sys.exit(0)
    elif how == "os_exit":
        os._exit(0)
    elif (how, is_first) in (("raises", True), ("another_fails", False)):
        raise RuntimeError("on purpose")
    elif how == "terminated" and is_first:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    elif how == "others_go_on" and not is_first:
        time.sleep(4)
    elif how == "leaves_a_child" and is_first:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    elif how == "closes_stderr":
        os.close(2)
    elif how == "replaces_stderr":
        sys.stderr = None


if __name__ == "__main__":
    train(int(sys.argv[2]))
    print("loss 1.0\n", end="", flush=True)
    end(sys.argv[1])
