"""Trains small seeded models in every way that torch has, and prints a digest of each: losses, gradients, weights.

Arguments: names of the trainings; without any, all of torch's own. Dropout, activation checkpointing, functions that
work in place and a shuffled loader are there on purpose: a single random number drawn elsewhere, or a gradient added in
another order, changes the digest. Every training asks for detail by a signal, where somebody listens.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import commtrace.auto  # noqa: F401

WIDTH, STEPS = 16, 6


class Block(nn.Module):
    """Two layers, the second one repeated in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(x))
        return x + self.dropout(checkpoint(self.second, hidden, use_reentrant=False))


class Branches(nn.Module):
    """Modules with functional code between them; one that only every other call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.blocks[0](x), self.blocks[1](x.flip(-1))
        self.calls += 1
        total = left * right.sigmoid() + (self.sometimes(x) if self.calls % 2 else 0)
        return self.norm(total.view(-1, WIDTH))


class Digest:
    """Of bits."""

    def __init__(self) -> None:
        self._found = hashlib.sha256()

    def add(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                self._found.update(local.detach().float().contiguous().numpy().tobytes())

    def text(self) -> str:
        return self._found.hexdigest()


def batches() -> Iterator[torch.Tensor]:
    """Other ones on every rank, shuffled by torch's own generator."""
    values = torch.arange(4.0 * STEPS * WIDTH).reshape(-1, WIDTH) / 100 + dist.get_rank()
    for (batch,) in DataLoader(TensorDataset(values), batch_size=4, shuffle=True):
        yield batch


def train(model: Any, accumulate: bool = False) -> str:
    digest = Digest()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for number, batch in enumerate(batches()):
        if number == 2:
            ask_for_detail()
        loss = model(batch).square().mean()
        loss.backward()
        digest.add(loss, *(parameter.grad for parameter in parameters))
        if accumulate and number % 2 == 0:
            continue
        digest.add(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    digest.add(*parameters, torch.get_rng_state())
    return digest.text()


def ask_for_detail() -> None:
    if callable(signal.getsignal(signal.SIGUSR2)):
        signal.raise_signal(signal.SIGUSR2)


def ddp_find_unused() -> str:
    return train(DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.001))


def ddp_static_graph() -> str:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    return train(DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.001))


def ddp_accumulates() -> str:
    return train(DistributedDataParallel(nn.Sequential(Block(), Block()), bucket_cap_mb=0.001), accumulate=True)


def fsdp2() -> str:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    for block in (model[0], model[1]):
        fully_shard(block)
    return train(fully_shard(model))


def fsdp1() -> str:
    on_cpu = torch.device("cpu")
    blocks = (FullyShardedDataParallel(Block(), device_id=on_cpu) for _ in range(2))
    return train(FullyShardedDataParallel(nn.Sequential(*blocks, nn.Linear(WIDTH, 4)), device_id=on_cpu))


def pipelining() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    parameters = list(stage.submod.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    digest = Digest()
    for batch in batches():
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=torch.ones(4, WIDTH), losses=losses)
        digest.add(*losses, *(parameter.grad for parameter in parameters))
        optimizer.step()
        optimizer.zero_grad()
    digest.add(*parameters)
    return digest.text()


def zero(stage: int) -> Callable[[], str]:
    """DeepSpeed's optimizer that is sharded in this stage."""

    def training() -> str:
        import deepspeed

        from tests.e2e.programs.deepspeed_counts import TOKENS, VOCABULARY, Model, configuration

        # Collectives of inference, which would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(str(stage)))
        digest = Digest()
        for _ in range(2 * STEPS):
            loss: Any = engine(torch.randint(VOCABULARY, (1, TOKENS)))
            engine.backward(loss)
            engine.step()
            digest.add(loss, torch.tensor(float(engine.get_global_grad_norm() or 0)))
        digest.add(*(getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()))
        return digest.text()

    return training


OF_TORCH: dict[str, Callable[[], str]] = {
    training.__name__: training
    for training in (ddp_find_unused, ddp_static_graph, ddp_accumulates, fsdp2, fsdp1, pipelining)
}
TRAININGS = {**OF_TORCH, "zero_1": zero(1), "zero_3": zero(3)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:] or OF_TORCH:
        torch.manual_seed(5 + dist.get_rank())
        print(f"rank {dist.get_rank()} {name} computed {TRAININGS[name]()}\n", end="", flush=True)
    live_until_the_monitor_has_spoken()
    dist.destroy_process_group()


def live_until_the_monitor_has_spoken() -> None:
    """It joins a window of all ranks after its end; these trainings may be over sooner than that."""
    if "monitor" not in os.environ.get("COMMTRACE_EXPORT", ""):
        return
    status = Path(os.environ["COMMTRACE_DIR"], "monitor.json")
    deadline = time.monotonic() + 60
    while not status.exists() or json.loads(status.read_text())["ranks_heard"] < dist.get_world_size():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{status} has not told of all ranks for a minute")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
