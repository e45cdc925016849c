"""Small trainings that between them go through every hook, all in this process and in no time.

Each is a function that computes the same bytes whenever it is called. What needs another process, a file or a network
is simulated: a backend that sends nothing, a GPU with exact times, the engines of DeepSpeed without their insides.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import commtrace
from tests.capture.recording import fake_backend
from tests.process_groups import world_group

WORLD = 4


def digest(*tensors: torch.Tensor | None) -> str:
    """Of the bits of all values."""
    found = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def values(count: int = 8) -> torch.Tensor:
    return torch.arange(float(count))


def seed() -> None:
    """Seed the CPU's generator alone: torch.manual_seed keeps a stack for every kind of device that is not there."""
    torch.default_generator.manual_seed(7)


def collectives() -> str:
    """What Python code hands to a process group."""
    value, gathered = values(), torch.zeros(8 * WORLD)
    dist.all_reduce(value)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    work.wait()
    dist.broadcast(value, src=2)
    dist.all_gather_into_tensor(gathered, value)
    dist.all_gather([torch.zeros(8) for _ in range(WORLD)], value)
    dist.reduce_scatter_tensor(value, gathered)
    dist.all_to_all_single(torch.zeros(8), value, [1, 2, 3, 2], [2, 2, 2, 2])
    dist.reduce(value, dst=0)
    dist.gather(value, [torch.zeros(8) for _ in range(WORLD)], dst=1)
    dist.scatter(value, [values() for _ in range(WORLD)], src=1)
    dist.barrier()
    forget_works(value)
    world_group().allreduce(tensors=[value], opts=dist.AllreduceOptions()).wait()
    return digest(value, gathered)


def forget_works(value: torch.Tensor) -> None:
    """Nobody waits, until the id of a Work that is gone is that of another one: nothing else tells that it is gone.

    The allocator mostly gives the same place at once, but not always; a job that counts on that misses lines now and
    then.
    """
    seen: set[int] = set()
    while True:
        work: Any = dist.all_reduce(value, async_op=True)
        if id(work) in seen:
            return
        seen.add(id(work))


def point_to_point() -> str:
    value, received = values(), torch.zeros(8)
    dist.send(value, 0)
    dist.recv(received, 2)
    for work in (dist.isend(value, 0, tag=3), dist.irecv(received, 2)):
        assert work is not None
        work.wait()
    pairs = [dist.P2POp(dist.isend, value, 0), dist.P2POp(dist.irecv, received, 2)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    return digest(value, received)


def groups() -> str:
    """Groups that come and go."""
    value = values()
    group = dist.new_group([0, 1])
    dist.all_reduce(value, group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect(0)
    return digest(value)


def functional_collectives() -> str:
    value = values()
    reduced = functional.wait_tensor(functional.all_reduce(value, "sum", world_group()))
    gathered = functional.wait_tensor(functional.all_gather_tensor(value, 0, world_group()))
    parts = functional.all_reduce_coalesced([value, value], "sum", world_group())
    waited = [functional.wait_tensor(part) for part in parts]
    unwaited = functional.all_reduce(value, "sum", world_group())
    del unwaited
    return digest(reduced, gathered, *waited)


def data_parallel() -> str:
    """The reducer of DistributedDataParallel, an optimizer, steps of the script."""
    seed()
    model = torch.nn.Linear(8, 4)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        with commtrace.step(step), commtrace.span("work"):
            loss = parallel(values().reshape(1, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return digest(*losses, *model.parameters())


def script() -> str:
    """What a script marks itself, also outside of the window and from a thread of its own."""
    value = values()
    for step in (0, 7, None):
        with commtrace.step(step):
            with commtrace.span("outer"), commtrace.span("inner"):
                value = value * 2
            gc.collect(0)
    heard = []

    def aside() -> None:
        with commtrace.span("aside"):
            heard.append(values())

    with commtrace.step(1):
        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
    return digest(value, *heard)


def quiet_steps() -> str:
    """Steps of which nothing but the length is recorded, between others."""
    value = values()
    for step in range(125, 130):
        with commtrace.step(step):
            commtrace.count(tokens=1)
            dist.all_reduce(value)
    return digest(value)


def refusals() -> str:
    """Errors of training's own, which it expects."""
    value = values()
    group: Any = dist.group.WORLD
    refused = 0
    refused_calls: tuple[Callable[[], object], ...] = (
        lambda: group.allreduce([value], "no options"),
        lambda: functional.all_reduce(value, "no such operation", group),
        lambda: getattr(value, "no_such_attribute"),  # noqa: B009  (what raises is the tensor)
    )
    for call in refused_calls:
        try:
            with commtrace.step(), commtrace.span("attempt"):
                call()
        except (TypeError, ValueError, AttributeError, RuntimeError):
            refused += 1
    return digest(value, torch.tensor(refused))


def meshes() -> str:
    """A mesh of devices, a loader of data, clipped gradients, a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = values()
    dist.all_reduce(value, group=mesh.get_group("dp"))
    for name in ("dp", "tp"):
        dist.destroy_process_group(mesh.get_group(name))
    parameter = torch.nn.Parameter(values())
    samples: Any = values().unsqueeze(1)
    for batch in DataLoader(samples, batch_size=4):
        parameter.grad = batch.sum() * torch.ones(8)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(parameter, f"{folder}/checkpoint")
        loaded = torch.load(f"{folder}/checkpoint", weights_only=True)
    with pytest.raises(FileNotFoundError):
        torch.load("/no/such/file")
    commtrace.count(tokens=8)
    return digest(value, parameter, parameter.grad, loaded)


OPTIONS: Final[dict[str, dict[str, Any]]] = {"script": {"steps": "0:5"}, "stamped_job": {"graphs": "stamps"}}
"""Of the configuration, by job."""

OF_FOUR: Final[dict[str, Callable[[], str]]] = {
    job.__name__: job
    for job in (collectives, point_to_point, groups, functional_collectives, script, quiet_steps, refusals, meshes)
}
"""Jobs of one rank among four whose backend sends nothing."""

ALONE: Final[dict[str, Callable[[], str]]] = {job.__name__: job for job in (data_parallel,)}
"""Jobs of a rank that is alone under gloo."""


@contextmanager
def rank_1_of_4() -> Iterator[None]:
    """torch.distributed on the backend that sends nothing."""
    with fake_backend(rank=1, world_size=WORLD):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """The only rank under gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def call_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion callbacks run on the thread that asks for them: only there can their lines be broken, whoever is
    faster. Every second question whether a Work is over finds that it goes on: both ways are gone in each job."""
    work_type: Any = torch._C._distributed_c10d.Work
    wait_for_work, over = work_type.wait, itertools.cycle((False, True))

    def is_completed(work: Any) -> bool:
        if not next(over):
            return False
        wait_for_work(work)
        return True

    monkeypatch.setattr(work_type, "is_completed", is_completed)
    future_type: Any = torch._C.Future
    wait = future_type.wait

    def add_done_callback(future: Any, completed: Callable[[Any], None]) -> None:
        wait(future)
        completed(future)

    monkeypatch.setattr(future_type, "add_done_callback", add_done_callback)
