"""Two pipeline stages of two replicas that train until a file ``stop`` appears; while ``slow`` exists, a rank is slow.

Arguments: the directory of these files. The work is sleeping, so that ranks that share few cores do not slow each
other. The GPU is made up: MFU and device memory are exported as they would be on one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto
import commtrace.live.collector as live
from commtrace.live.summary import DeviceMemory
from commtrace.recording import session
from commtrace.trace import schema

WORK_SECONDS, SLOW_SECONDS, SLOW_RANK = 0.05, 0.1, 1
LONGEST_SECONDS = 470.0


def main(directory: Path) -> None:
    module: Any = live
    module.training_device = lambda: DeviceMemory("NVIDIA H200", 2**30, 2**29, 2**30, 2**31)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, replica = divmod(rank, 2)
    pipelines = [dist.new_group([first, first + 2], group_desc="pp") for first in (0, 1)]
    replicas = [dist.new_group([first, first + 1], group_desc="dp") for first in (0, 2)]
    assert session._current is not None
    tracer = session._current.tracer
    tracer.set_topology({"coordinates": {"tp": 0, "pp": stage, "dp": replica}, "parallel": {"tp": 1, "pp": 2, "dp": 2}})
    deadline = time.monotonic() + LONGEST_SECONDS
    goes_on = torch.ones(1)
    number = 0
    while goes_on.item():
        with commtrace.step(number):
            one_step(tracer, rank, directory, pipelines[replica], replicas[stage])
            commtrace.count(tokens=1024, samples=2, model_flops=1e12)
            ends = (directory / "stop").exists() or time.monotonic() > deadline
            goes_on = torch.zeros(1) if ends else torch.ones(1)
            dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        number += 1
    dist.destroy_process_group()


def one_step(tracer: Any, rank: int, directory: Path, pipeline: Any, replicas: Any) -> None:
    activations = torch.ones(1000)
    other = (rank + 2) % 4
    is_first = rank < 2
    if not is_first:
        dist.recv(activations, other, group=pipeline)
    work(tracer, schema.FORWARD, "forward")
    if rank == SLOW_RANK and (directory / "slow").exists():
        work(tracer, schema.FORWARD, "forward", SLOW_SECONDS)
    if is_first:
        dist.send(activations, other, group=pipeline)
        dist.recv(activations, other, group=pipeline)
    work(tracer, schema.BACKWARD, "backward")
    if not is_first:
        dist.send(activations, other, group=pipeline)
    gradients = dist.all_reduce(torch.ones(100_000), group=replicas, async_op=True)
    work(tracer, schema.OPTIMIZER, "optimizer", 0.005)
    gradients.wait()


def work(tracer: Any, kind: int, name: str, seconds: float = WORK_SECONDS) -> None:
    phase = tracer.enter(kind, name)
    time.sleep(seconds)
    tracer.leave(phase)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
