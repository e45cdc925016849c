"""Small trainings of models of one rank that is alone: the wrappers of torch, module spans, detail on request."""

from __future__ import annotations

import signal
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commtrace
from commtrace.recording import session
from commtrace.trace.selection import make_request, write_request
from tests.factory import metadata as rank_metadata
from tests.safety.jobs import digest, seed, values

WIDTH = 4

alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models, where commtrace looks for them."""


class Block(nn.Module):
    """Two layers; the second is repeated in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x).relu()
        x = checkpoint(self.second, x, use_reentrant=False)
        return x if scale is None else x * scale


class Net(nn.Module):
    """Blocks that get one tensor, or several by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x), scale=x)


def batch() -> torch.Tensor:
    return values().reshape(2, WIDTH)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def found_steps() -> str:
    """A loop in which nobody marks steps: accumulation, an evaluation, two optimizers, a clipped norm."""
    seed()
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    losses = []
    for number in range(4):
        loss = model(batch()).square().mean()
        loss.backward()
        losses.append(loss)
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses.append(model(batch()).mean())
            model.train()
    return digest(*losses, *model.parameters())


def steps_in_the_backward() -> str:
    """An optimizer for each parameter, which steps as soon as its gradient is there; one that never steps."""
    seed()
    model = nn.Linear(WIDTH, WIDTH)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
    never = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for _ in range(20):
        model(batch()).square().mean().backward()
    never.zero_grad()
    return digest(*model.parameters())


def _step(optimizer: torch.optim.Optimizer, _parameter: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def fully_sharded() -> str:
    """The second generation; a forward raises, and the loop goes on."""
    seed()
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _train(model)


def fully_sharded_by_a_wrapper() -> str:
    """The first generation."""
    seed()
    sharding = ShardingStrategy.NO_SHARD  # alone, it is never anything else
    return _train(FullyShardedDataParallel(Net(), sharding_strategy=sharding, device_id=torch.device("cpu")))


def _train(model: nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    refused = 0
    for number in range(2):
        if number:
            try:
                model(torch.ones(2, WIDTH + 1))
            except RuntimeError:
                refused += 1
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return digest(*losses, *map(local, model.parameters()), torch.tensor(refused))


def pipelined() -> str:
    """Every stage is of this rank: one of them, and two in chunks; an evaluation."""
    seed()
    device = torch.device("cpu")
    losses: list[torch.Tensor] = []
    alone = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, device)
    schedule: Any = Schedule1F1B(alone, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    for run in (schedule.step, getattr(schedule, "eval", schedule.step)):
        run(batch(), target=batch(), losses=losses)
    chunks: list[Any] = [PipelineStage(nn.Linear(WIDTH, WIDTH), number, 2, device) for number in range(2)]
    interleaved: Any = ScheduleInterleaved1F1B(chunks, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    interleaved.step(batch(), target=batch(), losses=losses)
    return digest(*losses, *(parameter.grad for stage in (alone, *chunks) for parameter in stage.submod.parameters()))


def module_spans() -> str:
    """Every module down to a depth; a model that is made late, one that goes, one behind a wrapper."""
    seed()
    wrapped = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    models: list[nn.Module] = [Net(), wrapped]
    alive.clear()
    alive.update(models)
    losses = []
    for number in range(3):
        with commtrace.step(number):
            if number == 1:
                models.append(Block())
                alive.add(models[-1])
            for model in models:
                loss = model(batch()).square().mean()
                loss.backward()
                losses.append(loss)
            if number:
                optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
                models.pop()
    return digest(*losses, *(parameter for model in models for parameter in model.parameters()))


def requested_modules() -> str:
    """Detail is asked for by a signal and by a file, and begins and ends at steps."""
    seed()
    model = Net()
    alive.clear()
    alive.add(model)
    losses = []
    current: Any = session._current
    with tempfile.TemporaryDirectory() as folder:
        if current is not None:
            _open_requests(current, Path(folder))
        for number in range(5):
            with commtrace.step(number):
                if number == 1 and callable(signal.getsignal(signal.SIGUSR2)):
                    signal.raise_signal(signal.SIGUSR2)
                if number == 2 and current is not None:
                    harvest_requests(current)
                loss = model(batch()).square().mean()
                loss.backward()
                losses.append(loss)
    return digest(*losses)


def _open_requests(current: Any, directory: Path) -> None:
    """As when the rank is known: see ``Instrumentation._open_sinks``."""
    metadata = rank_metadata(0)
    write_request(directory, make_request(metadata.run_id, metadata.attempt, 3, 1, by="test", modules="depth=1"))
    if current._triggers is not None:
        current._triggers.open(directory, metadata)


def harvest_requests(current: Any) -> None:
    """What the harvester's thread does in every pass."""
    thread = threading.Thread(target=current._marks._requests)
    thread.start()
    thread.join()


def watched_for_hangs() -> str:
    """The watch looks, sees a hang, and sees it end."""
    value = values()
    current: Any = session._current
    if current is not None:
        looks = iter([False, False, False, True])
        watch = current._hang_watch
        watch._least_ns = 0
        watch._stop.wait = lambda _seconds: next(looks)
        watch._open_stack_timer = lambda: None  # it has no files here, and is tested by itself
        watch._metadata = rank_metadata(1)  # rank 0 would warn of the hang
        thread = threading.Thread(target=watch._run)
        thread.start()
        thread.join()
        del watch._stop.wait, watch._open_stack_timer
    dist.all_reduce(value)
    return digest(value)


def futures() -> str:
    """Waits for futures of Works, for some twice, for others never."""
    value = values()
    for _ in range(2):
        work: Any = dist.all_reduce(value, async_op=True)
        future = work.get_future()
        future.wait()
        future.wait()
        work.wait()
    other: Any = dist.all_reduce(value, async_op=True)
    kept = [other.get_future()]
    other.wait()
    del kept
    torch.futures.Future[int]().set_result(3)
    done = torch.futures.Future[int]()
    done.set_result(7)
    return digest(value, torch.tensor(done.wait()))


def distributed_checkpoint() -> str:
    """A checkpoint of torch.distributed, written and read."""
    kept = {"value": values()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(kept, checkpoint_id=folder)
        kept["value"].zero_()
        dcp.load(kept, checkpoint_id=folder)
    return digest(kept["value"])


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "module_spans": {"modules": "depth=2"},
    "requested_modules": {"trigger_signal": "SIGUSR2"},
}
"""Of the configuration, by job."""

ALONE: Final[dict[str, Callable[[], str]]] = {
    job.__name__: job
    for job in (
        found_steps, steps_in_the_backward, fully_sharded, fully_sharded_by_a_wrapper, pipelined, module_spans,
        requested_modules, watched_for_hangs, futures, distributed_checkpoint,
    )
}  # fmt: skip
