"""Meshes of several dimensions: hybrid sharding, FSDP2 with tensor parallelism, and the roles of their groups.

Four ranks. Some meshes are older than commtrace, some are younger.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.e2e.programs.watched import watch

dist.init_process_group("gloo")
RANK = dist.get_rank()
EARLY = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
PAIRS = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
EARLY_FROM_GROUP = DeviceMesh.from_group(PAIRS[RANK // 2], "cpu", mesh_dim_names=("experts",))

import commtrace.auto  # noqa: E402, F401

LATE = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
ACROSS = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
FROM_GROUP = DeviceMesh.from_group(ACROSS[RANK in (1, 2)], "cpu", mesh_dim_names=("cp",))
WHOLE = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def each_dimension() -> None:
    """All-reduces of 1, 2, … elements, in this order, for the test to know the groups by."""
    groups = [
        EARLY.get_group("replicate"), EARLY.get_group("shard"), EARLY_FROM_GROUP.get_group(), LATE.get_group("pp"),
        LATE.get_group("dp"), LATE["tp"].get_group(), FROM_GROUP.get_group(0), WHOLE.get_group(),
        LATE["dp", "tp"]._flatten("dp_tp").get_group(),
    ]  # fmt: skip
    for size, group in enumerate(groups, start=1):
        dist.all_reduce(tensor(size), group=group)


def hybrid_fsdp1() -> None:
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        wrapped = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)),
            sharding_strategy=strategy,
            device_mesh=EARLY,
            device_id=torch.device("cpu"),
        )
        wrapped(tensor(4, 8)).sum().backward()


def hybrid_fsdp2() -> None:
    wrapped = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for layer in (*wrapped, wrapped):
        fully_shard(layer, mesh=EARLY)
    wrapped(tensor(4, 8)).sum().backward()


def fsdp2_with_tensor_parallelism() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, LATE["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=LATE["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(tensor(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def two_dimensional_redistribution() -> None:
    value = distribute_tensor(tensor(8, 8), LATE["dp", "tp"], [Shard(0), Shard(1)])
    value.redistribute(placements=[Replicate(), Shard(0)]).full_tensor()


def pipelines_of_sharded_stages() -> None:
    """Two stages, each of two ranks: FSDP2 inside them, then DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inside"))
    stage = mesh.get_local_rank("stage")
    for wrap in (
        lambda layer: fully_shard(layer, mesh=mesh["inside"]),
        lambda layer: DistributedDataParallel(layer, process_group=mesh.get_group("inside")),
    ):
        wrapped: Any = wrap(nn.Linear(8, 8))
        part = PipelineStage(wrapped, stage, 2, torch.device("cpu"), group=mesh.get_group("stage"))
        schedule = Schedule1F1B(part, 4, loss_fn=lambda output, target: (output - target).pow(2).mean())
        for _ in range(2):
            schedule.step(tensor(8, 8)) if stage == 0 else schedule.step(target=tensor(8, 8))


def groups_in_odd_orders() -> None:
    pair, _ = dist.new_subgroups(2)
    dist.all_reduce(tensor(3), group=pair)
    dist.barrier(group=pair)
    three = dist.new_group([3, 1, 0])
    if RANK != 2:
        dist.broadcast(tensor(4), src=3, group=three)
        dist.all_to_all_single(tensor(3), tensor(3), group=three)
    if RANK in (1, 3):
        late = dist.new_group([1, 3], use_local_synchronization=True)
        dist.all_reduce(tensor(5), group=late)
        dist.send(tensor(2), 3, group=late) if RANK == 1 else dist.recv(tensor(2), group=late)


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch(
        [
            each_dimension, hybrid_fsdp1, hybrid_fsdp2, fsdp2_with_tensor_parallelism, two_dimensional_redistribution,
            pipelines_of_sharded_stages, groups_in_odd_orders,
        ]
    )  # fmt: skip
