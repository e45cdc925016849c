"""Gives up its NCCL group while a collective waits for a rank that does not come; then works without a group.

    torchrun --nproc-per-node 2 tests/gpu/programs/aborts_nccl.py OUTPUT BACKEND

Rank 1 comes to five all_reduces and then stays away until rank 0 has aborted. Rank 0 launches a sixth, lets go of the
group, and writes to ``OUTPUT/rank-0.json`` what its wait for it raised, if anything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import commtrace
import commtrace.auto
from tests.gpu.programs.one_gpu import start_distributed

STEPS = 5


def main() -> None:
    output = Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    # As torch asks of jobs that abort their groups themselves: else its watchdog may end the process first.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    device = start_distributed(sys.argv[2])
    tensor = torch.ones(1024, device=device)
    for step in range(STEPS):
        with commtrace.step(step):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
    torch.cuda.synchronize()
    aborted = output / "aborted"
    if dist.get_rank() == 0:
        outcome = abort_while_one_is_outstanding(tensor)
        (output / "rank-0.json").write_text(json.dumps(outcome))
        aborted.touch()
    else:
        while not aborted.exists():
            time.sleep(0.05)
        dist.distributed_c10d._abort_process_group()
    with commtrace.step(STEPS), commtrace.span("alone"):
        torch.ones(8, device=device).sum().item()


def abort_while_one_is_outstanding(tensor: torch.Tensor) -> dict[str, str]:
    """What training sees of it."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    time.sleep(1.0)  # its kernel waits on the device by now, and the harvester has asked for it
    dist.distributed_c10d._abort_process_group()
    try:
        work.wait()
    except Exception as error:
        return {"raised": type(error).__name__}
    return {"raised": ""}


if __name__ == "__main__":
    main()
