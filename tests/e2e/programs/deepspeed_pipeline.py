"""A DeepSpeed pipeline of two stages that is trained for a few batches and evaluated once, recorded by commtrace."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys

import commtrace.auto  # before DeepSpeed, here

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

BATCHES, MICROBATCHES, WIDTH = int(sys.argv[1]), int(sys.argv[2]), 16


def main() -> None:
    torch.set_num_threads(1)
    # Collectives of inference, which would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform",
        activation_checkpoint_interval=1,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICROBATCHES,
            "steps_per_print": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    numbers = itertools.count()
    data = ((torch.full((2, WIDTH), float(next(numbers))) / 10, torch.ones(2, WIDTH)) for _ in itertools.count())
    digest = hashlib.sha256()
    for _ in range(BATCHES):
        digest.update(engine.train_batch(data).detach().numpy().tobytes())
    digest.update(engine.eval_batch(data).detach().numpy().tobytes())
    print(f"rank {dist.get_rank()} computed {digest.hexdigest()}\n", end="")
    dist.destroy_process_group()
    commtrace.stop()
    # What follows is not under test, and not commtrace's: on a busy machine a process was seen to abort while Python
    # ended ("terminate called without an active exception"), with nothing of commtrace in it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
