"""Train a small model with schedules of torch.distributed.pipelining, each recorded as a run of its own.

Schedules of one stage per rank checkpoint their activations. Beside each run lies the schedule's own plan.

Arguments: a folder, and for each run CLASS:OPTIMIZER, the schedule's class and "sgd" or "none" (no optimizer).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

import commtrace

WIDTH, MICROBATCHES, ITERATIONS = 8, 8, 3
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Recomputed(torch.nn.Sequential):
    """Keeps no activations: its backward runs its forward again."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        recomputed: torch.Tensor = checkpoint(super().forward, values, use_reentrant=False)
        return recomputed


def main(folder: Path, runs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run in runs:
        commtrace.start(commtrace.Config(dir=str(folder / run)))
        train(folder, *run.split(":"))
        commtrace.stop()
    dist.destroy_process_group()


def train(folder: Path, name: str, optimizer_name: str) -> None:
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)).get_group("pp")
    schedule_class = getattr(schedules, name)
    is_single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    indices = [rank] if is_single else [rank, 2 * size - 1 - rank] if name in V_SHAPED else [rank, rank + size]
    count = size * len(indices)
    stages = [
        PipelineStage(
            (Recomputed if is_single else torch.nn.Sequential)(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()), index,
            count, torch.device("cpu"), group=group,
        )
        for index in indices
    ]  # fmt: skip
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=MICROBATCHES, loss_fn=torch.nn.functional.mse_loss
    )
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01) if optimizer_name == "sgd" else None
    batch, target = torch.randn(MICROBATCHES, WIDTH), torch.randn(MICROBATCHES, WIDTH)
    inputs = (batch,) if 0 in indices else ()
    wanted = {"target": target} if count - 1 in indices else {}
    for _ in range(ITERATIONS):
        schedule.step(*inputs, **wanted)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if name not in V_SHAPED:  # which torch 2.13 cannot evaluate
        schedule.eval(*inputs, **wanted)
    (folder / f"{name}-plan-{rank}.json").write_text(json.dumps(plan(schedule, rank)))


def plan(schedule: Any, rank: int) -> list[str]:
    """The computations of one rank, as torch writes them: ``2F0``, ``2I0``, ``2W0``, ``2B0``."""
    actions = []
    for action in (schedule.pipeline_order or {}).get(rank, []):
        if action is not None:
            parts = action.sub_actions or (action,)
            actions += [str(part) for part in parts if part.is_compute_op]
    return actions


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
