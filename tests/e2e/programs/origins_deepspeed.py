"""DeepSpeed's own ways to communicate: ZeRO that overlaps, offloads and gathers, experts, Ulysses, its functions."""

from __future__ import annotations

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

import commtrace.auto  # noqa: F401
from tests.e2e.programs.watched import watch

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
deepspeed.init_distributed(dist_backend="gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value).relu()
        return value.float().pow(2).mean()


def configuration(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 500,
            "allgather_bucket_size": 500,
            "stage3_prefetch_bucket_size": 300,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 400,
            **zero,
        },
    }


def trained(stage: int, **zero: Any) -> Any:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(stage, **zero))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
        engine.step()
    return engine


def zero_of_two_stages() -> None:
    trained(2, overlap_comm=True, contiguous_gradients=True)
    trained(2, reduce_scatter=False, round_robin_gradients=True)
    trained(2, offload_optimizer={"device": "cpu"})


def zero_of_three_stages() -> None:
    engine = trained(3, overlap_comm=True)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass
    engine._zero3_consolidated_16bit_state_dict()
    trained(3, zero_hpz_partition_size=SIZE)
    with deepspeed.zero.Init(config_dict_or_path=configuration(3)):
        Net()


def experts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=SIZE, ep_size=SIZE, k=1)

        def forward(self, value: torch.Tensor) -> Any:
            result, loss, _ = self.experts(value)
            return result.float().mean() + loss

    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {**configuration(0), "bf16": {"enabled": False}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4, WIDTH)))
        engine.step()


def ulysses() -> None:
    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    group = dist.new_group(list(range(SIZE)))
    distributed = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
    query, key, value = (torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3))
    distributed(query, key, value, 0).sum().backward()


def functions() -> None:
    tensor = torch.ones
    comm.all_reduce(tensor(3))
    comm.all_reduce(tensor(4), async_op=True).wait()
    comm.broadcast(tensor(3), 0)
    comm.all_gather_into_tensor(tensor(2 * SIZE), tensor(2))
    comm.reduce_scatter_tensor(tensor(2), tensor(2 * SIZE))
    comm.all_to_all_single(tensor(2), tensor(2))
    comm.all_reduce_coalesced([tensor(2), tensor(3)])
    comm.reduce(tensor(3), 0)
    works = [comm.isend(tensor(5), (RANK + 1) % SIZE), comm.irecv(tensor(5), (RANK - 1) % SIZE)]
    for work in works:
        work.wait()
    comm.barrier()


if __name__ == "__main__":
    watch([zero_of_two_stages, zero_of_three_stages, experts, ulysses, functions])
