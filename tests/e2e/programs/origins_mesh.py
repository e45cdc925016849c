"""Meshes of several dimensions: hybrid sharding, FSDP2 with tensor parallelism, and the roles of their groups.

Four ranks. Some meshes are older than commtrace, some are younger.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch([each_dimension, hybrid_fsdp1, hybrid_fsdp2, fsdp2_with_tensor_parallelism, two_dimensional_redistribution])
