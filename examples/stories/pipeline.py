"""Trains a pipeline, one stage per rank, with a schedule of torch.distributed.pipelining.

    torchrun --nproc-per-node 4 examples/stories/pipeline.py
    torchrun --nproc-per-node 4 examples/stories/pipeline.py --microbatches 16
    torchrun --nproc-per-node 4 examples/stories/pipeline.py --schedule Interleaved1F1B

The batch stays the same: with more microbatches each is smaller, with two chunks per rank a chunk has half the layers.
Sleeps take the place of the device's work, so that a laptop will do.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

BATCH = 16
FORWARD_SECONDS = 0.16
"""Of a whole batch through the layers of a rank; the backward takes twice as long."""


class Work(torch.autograd.Function):
    """Passes a tensor on after a time, and its gradient after twice that time."""

    @staticmethod
    def forward(context: Any, activations: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return activations.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradient.clone(), None


work: Any = Work.apply


class Stage(torch.nn.Module):
    """A layer whose forward and backward take a while."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 8)
        self.head = torch.nn.Linear(8, width)
        self.seconds = seconds

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        worked: torch.Tensor = work(self.head(self.layer(activations)), self.seconds)
        return worked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, default=4, help="parts of the batch, a divisor of 16 (default 4)")
    parser.add_argument("--schedule", default="1F1B", choices=("GPipe", "1F1B", "Interleaved1F1B"))
    parser.add_argument("--width", type=int, default=64, help="numbers that a sample has between two stages")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = 2 if options.schedule == "Interleaved1F1B" else 1
    seconds = FORWARD_SECONDS / options.microbatches / chunks
    stages = [
        PipelineStage(Stage(options.width, seconds), rank + chunk * ranks, ranks * chunks, torch.device("cpu"))
        for chunk in range(chunks)
    ]
    schedule = getattr(schedules, f"Schedule{options.schedule}")(
        stages if chunks > 1 else stages[0], n_microbatches=options.microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD([parameter for stage in stages for parameter in stage.submod.parameters()], lr=0.01)
    batch = (torch.randn(BATCH, options.width),) if rank == 0 else ()
    target = {"target": torch.randn(BATCH, options.width)} if rank == ranks - 1 else {}
    for _ in range(options.steps):
        losses: list[torch.Tensor] = []
        schedule.step(*batch, **target, **({"losses": losses} if target else {}))
        optimizer.step()
        optimizer.zero_grad()
        # The last stage knows the loss, the first one may print it: Megatron-LM has such collectives in each step, too.
        dist.all_reduce(torch.stack(losses).mean().detach() if losses else torch.zeros(()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
