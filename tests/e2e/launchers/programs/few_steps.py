"""A few steps of a tiny model whose gradients are averaged, started by whatever launcher.

srun python tests/e2e/launchers/programs/few_steps.py --auto

With ``--auto`` the script itself imports commtrace.auto; else ``commtrace run`` has to. ``--targets DIRECTORY`` has
rank 0 write down which Prometheus targets there are while the job runs, to ``DIRECTORY.json``. With ``--fail-once
FILE`` the last rank fails behind the first step of the job's first attempt, which makes the file.

Without DDP and torch.optim, which import torch's compiler: that takes as long as importing torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STEPS = 4

_SECONDS_FOR_TARGETS = 20.0


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--targets", type=Path)
    parser.add_argument("--fail-once", type=Path)
    parser.add_argument("--local_rank", type=int)  # from DeepSpeed's launcher
    options = parser.parse_args(arguments)
    if options.auto:
        import commtrace.auto

    import torch
    import torch.distributed as dist

    import commtrace

    torch.set_num_threads(1)
    os.environ.update(rendezvous(os.environ))
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    has_failed = options.fail_once is None or options.fail_once.exists()
    for number in range(STEPS):
        with commtrace.step(number):
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if not has_failed:
            dist.barrier()  # all have looked for the file
            has_failed = True
            if dist.get_rank() == dist.get_world_size() - 1:
                options.fail_once.touch()
                sys.exit("failed, as it was told to")
    if options.targets and dist.get_rank() == 0:
        write_targets(options.targets, dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()


def rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed wants in the environment, as scripts without torchrun get it from Slurm or Open MPI."""
    if "RANK" in environment:
        return {}
    slurm, mpi = "SLURM_PROCID" in environment, "OMPI_COMM_WORLD_RANK" in environment
    assert slurm or mpi, "started by no launcher that this script knows"
    rank, size = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if mpi else ("SLURM_PROCID", "SLURM_NTASKS")
    return {"RANK": environment[rank], "WORLD_SIZE": environment[size]}


def write_targets(directory: Path, world_size: int) -> None:
    deadline = time.monotonic() + _SECONDS_FOR_TARGETS
    while len(files := sorted(directory.glob("*.json"))) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
    targets = [target for file in files for target in json.loads(file.read_text())]
    Path(f"{directory}.json").write_text(json.dumps(targets))


if __name__ == "__main__":
    main(sys.argv[1:])
