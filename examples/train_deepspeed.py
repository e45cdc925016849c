"""Trains a small model with DeepSpeed and ZeRO.

    deepspeed --num_gpus 4 examples/train_deepspeed.py
    torchrun --nproc-per-node 4 examples/train_deepspeed.py        # also without a GPU

It has no line of commtrace: ``commtrace run --`` in front of the command records it.
"""

from __future__ import annotations

import argparse
import os

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import deepspeed

WIDTH = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", type=int, default=2, choices=(0, 1, 2, 3), help="stage of ZeRO (default 2)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--local_rank", type=int, default=0)  # given by DeepSpeed's launcher
    options = parser.parse_args()

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first; for inference on CPUs
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Sequential(*layers),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": options.zero},
        },
    )
    for _ in range(options.steps * engine.gradient_accumulation_steps()):
        loss = engine(torch.randn(8, WIDTH, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
