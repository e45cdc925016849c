"""Step times of a small transformer with and without commtrace, in turns in one process.

    python tests/gpu/programs/step_times.py OUTPUT --layout ddp --size wide [--backend nccl2] [--variants off,native]

Each turn builds the model anew, so that it is wrapped as in a job that has commtrace from the start. Between its first
and its last step nothing waits for the device. Writes ``OUTPUT/figures.json``, anew after each turn. Without a GPU it
runs under gloo.

bench/engines.py says what the variants are.
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

from bench.engines import PROFILER, recording

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
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["off", "auto"])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no turn begins that would end later")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    backend = options.backend if has_gpu else "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if has_gpu else None
    )
    size = SIZES[options.size]
    one_turn(device, size, options.layout, 2)  # loads kernels, fills caches
    step_ns: dict[str, list[int]] = {variant: [] for variant in options.variants}
    synchronisations: dict[str, int] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for turn in range(options.turns):
        if turn > 1 and (time.monotonic() - begin) * (turn + 1) / turn > options.seconds:
            break
        # Each variant goes first as often as the others: a machine that gets slower must not tell for one of them.
        first = turn % len(options.variants)
        for variant in options.variants[first:] + options.variants[:first]:
            if turn == 0 and variant == PROFILER:
                continue  # in the first turn waits are counted, by torch.profiler
            with recording(variant, options.output / f"{variant}-{turn}"):
                if turn == 0:
                    synchronisations[variant] = waits_for_device(device, size, options.layout)
                else:
                    step_ns[variant].append(one_turn(device, size, options.layout, options.steps))
        figures = {"step_ns": step_ns, "synchronisations": synchronisations}
        (options.output / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def one_turn(device: torch.device, size: Size, layout: str, steps: int) -> int:
    """Train a new model; return ns per step."""
    model, optimizer, batch = warmed_up(device, size, layout)
    begin = time.perf_counter_ns()
    for _ in range(steps):
        train(model, optimizer, batch)
    synchronize(device)
    return (time.perf_counter_ns() - begin) // steps


def waits_for_device(device: torch.device, size: Size, layout: str) -> int:
    """Train a new model; return how often the process waited for the device meanwhile."""
    model, optimizer, batch = warmed_up(device, size, layout)
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(PROFILED_STEPS):
            train(model, optimizer, batch)
    return sum(event.count for event in profile.key_averages() if event.key in SYNCHRONISING)


def warmed_up(device: torch.device, size: Size, layout: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a new model that has made some steps, with nothing left for the device to do."""
    model, optimizer, batch = build(device, size, layout)
    for _ in range(WARM_UP_STEPS):
        train(model, optimizer, batch)
    synchronize(device)
    return model, optimizer, batch


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
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
