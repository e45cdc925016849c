"""Step times of a small transformer with and without commtrace, in turns in one process.

    python tests/gpu/programs/step_times.py OUTPUT --layout ddp --size wide [--backend nccl2]

Each turn builds the model anew, so that it is wrapped as in a job that has commtrace from the start. Between its first
and its last step nothing waits for the device. Writes ``OUTPUT/figures.json``. Without a GPU it runs under gloo.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import commtrace

SYNCHRONISING: Final = frozenset({"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"})
WARM_UP_STEPS: Final = 3
PROFILED_STEPS: Final = 3


class Size(NamedTuple):
    """Of a model: ``wide`` keeps an H100 busy; of ``narrow`` the launches take longer than the kernels."""

    width: int
    layers: int
    tokens: int
    batch: int


SIZES: Final = {"wide": Size(2048, 8, 1024, 16), "narrow": Size(256, 12, 128, 2), "tiny": Size(32, 2, 16, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    backend = options.backend if has_gpu else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if has_gpu else None
    )
    size = SIZES[options.size]
    one_turn(device, size, options.layout, options.steps)  # loads kernels, fills caches
    step_ns: dict[str, list[int]] = {"with": [], "without": []}
    synchronisations: dict[str, list[int]] = {"with": [], "without": []}
    for turn in range(options.turns):
        # Each side goes first as often as the other: a machine that gets slower must not tell for one of them.
        for side in ("with", "without") if turn % 2 else ("without", "with"):
            if side == "with":
                commtrace.start(commtrace.Config(dir=str(options.output / f"turn-{turn}")))
            taken, waits = one_turn(device, size, options.layout, options.steps, profiled=turn == 0)
            if side == "with":
                commtrace.stop()
            if turn == 0:
                synchronisations[side].append(waits)
            else:
                step_ns[side].append(taken)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "figures.json").write_text(json.dumps({"step_ns": step_ns, "synchronisations": synchronisations}))
    dist.destroy_process_group()


def one_turn(device: torch.device, size: Size, layout: str, steps: int, *, profiled: bool = False) -> tuple[int, int]:
    """Train a new model; returns ns per step, and how often the process waited for the device meanwhile."""
    model, optimizer, batch = build(device, size, layout)
    for _ in range(WARM_UP_STEPS):
        train(model, optimizer, batch)
    synchronize(device)
    waits = 0
    if profiled:
        activity = (
            torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
        )
        with torch.profiler.profile(activities=[activity]) as profile:
            for _ in range(PROFILED_STEPS):
                train(model, optimizer, batch)
        waits = sum(event.count for event in profile.key_averages() if event.key in SYNCHRONISING)
        return 0, waits
    begin = time.perf_counter_ns()
    for _ in range(steps):
        train(model, optimizer, batch)
    synchronize(device)
    return (time.perf_counter_ns() - begin) // steps, waits


def build(device: torch.device, size: Size, layout: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = [
        nn.TransformerEncoderLayer(
            size.width, max(1, size.width // 64), 4 * size.width, dropout=0.0, batch_first=True, norm_first=True,
            device=device, dtype=dtype,
        )
        for _ in range(size.layers)
    ]  # fmt: skip
    model: Any = nn.Sequential(*layers)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    batch = torch.randn(size.batch, size.tokens, size.width, device=device, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = model(batch).float().pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
