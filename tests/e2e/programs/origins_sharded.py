"""Data parallelism of every kind that torch has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commtrace.auto  # noqa: F401
from tests.e2e.programs.watched import watch

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GROUP = dist.new_group(list(range(SIZE)))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def batch() -> torch.Tensor:
    return torch.ones(4, 8)


def train(wrapped: Any, steps: int = 3, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(steps):
        wrapped(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.0001)
    train(wrapped)
    with wrapped.no_sync():
        wrapped(batch()).sum().backward()
    train(wrapped, 1)
    wrapped.eval()(batch())


def ddp_of_every_option() -> None:
    train(DistributedDataParallel(model(), process_group=GROUP, broadcast_buffers=False, gradient_as_bucket_view=True))
    train(DistributedDataParallel(model(), static_graph=True))
    train(DistributedDataParallel(model(), init_sync=False))
    unused = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})
    unused.forward = lambda value: unused["used"](value)
    train(DistributedDataParallel(unused, find_unused_parameters=True))


def python_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def blocking_hook(state, bucket):  # type: ignore[no-untyped-def]  # the same
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def ddp_with_hooks() -> None:
    hooks: tuple[tuple[object, Callable[..., object]], ...] = (
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (GROUP, default_hooks.fp16_compress_hook),
        (None, python_hook),
        (None, blocking_hook),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    )
    for state, hook in hooks:
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(state, hook)
        train(wrapped)
    builtin = DistributedDataParallel(model())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(builtin)
    builtin = DistributedDataParallel(model())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(builtin)


def ddp_with_uneven_inputs() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(plain)
    with Join([wrapped]):
        train(wrapped, 2 + RANK)


def ddp_compiled() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    train(torch.compile(DistributedDataParallel(plain), backend="aot_eager"))


def post_local_sgd() -> None:
    wrapped = DistributedDataParallel(model())
    wrapped.register_comm_hook(PostLocalSGDState(None, GROUP, start_localSGD_iter=2), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
    )
    train(wrapped, 5, optimizer)


def zero_redundancy() -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1)
    train(wrapped, 3, optimizer)
    optimizer.consolidate_state_dict(to=0)


def fsdp1() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        inner = nn.Sequential(
            FullyShardedDataParallel(nn.Linear(8, 16), sharding_strategy=strategy, device_id=torch.device("cpu")),
            nn.Linear(16, 4),
        )
        wrapped = FullyShardedDataParallel(inner, sharding_strategy=strategy, device_id=torch.device("cpu"))
        train(wrapped)
        wrapped.clip_grad_norm_(1.0)
        with wrapped.no_sync():
            wrapped(batch()).sum().backward()
        train(wrapped, 1)
        wrapped.state_dict()


def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    for arguments in (
        {},
        {"mesh": mesh},
        {"mesh": mesh, "reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ):
        wrapped: Any = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        for layer in wrapped:
            fully_shard(layer, **arguments)
        fully_shard(wrapped, **arguments)
        train(wrapped)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        wrapped.set_requires_gradient_sync(False)
        wrapped(batch()).sum().backward()
        wrapped.set_requires_gradient_sync(True)
        wrapped(batch()).sum().backward()
        wrapped.unshard(async_op=True).wait()


def saved() -> None:
    """torch.distributed.checkpoint plans with object collectives."""
    wrapped = nn.Sequential(nn.Linear(8, 16))
    fully_shard(wrapped)
    state = {"model": wrapped.state_dict()}
    folder = Path(sys.argv[-1]) / "checkpoint"
    checkpoint.save(state, checkpoint_id=folder)
    checkpoint.load(state, checkpoint_id=folder)
    saving: Any = checkpoint.async_save(state, checkpoint_id=folder, process_group=GROUP)
    saving.result()


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch(
        [
            ddp, ddp_of_every_option, ddp_with_hooks, ddp_with_uneven_inputs, ddp_compiled, post_local_sgd,
            zero_redundancy, fsdp1, fsdp2, saved,
        ]
    )  # fmt: skip
