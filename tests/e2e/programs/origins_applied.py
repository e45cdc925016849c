"""Communication as whole training programs issue it: parallel layers under checkpointing, mixtures of experts, compiled
FSDP2, state dicts, collectives that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import commtrace.auto  # noqa: F401
from tests.e2e.programs.watched import watch

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MESH = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
GROUP: Any = dist.group.WORLD


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(self.norm(value)).relu())
        return result


def sequence_parallel_under_checkpointing() -> None:
    """The repeated forward issues its collectives again; what its last one brings is used by nobody."""
    plan = {
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "second": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = parallelize_module(Block(), MESH, plan)
    value = torch.randn(2, 4, 8, requires_grad=True)
    for result in (
        block(value), checkpoint(block, value, use_reentrant=False), checkpoint(block, value, use_reentrant=True),
    ):  # fmt: skip
        (result.to_local() if isinstance(result, DTensor) else result).sum().backward()


def vocabulary_and_loss_parallel() -> None:
    layers = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallel = parallelize_module(layers, MESH, plan)
    with loss_parallel():
        for _ in range(2):
            nn.functional.cross_entropy(parallel(torch.arange(6)), torch.arange(6)).backward()


def mixture_of_experts() -> None:
    def dispatch(tokens: torch.Tensor) -> torch.Tensor:
        split = [tokens.shape[0] // SIZE] * SIZE
        there = functional.all_to_all_single_autograd(tokens, split, split, GROUP)
        back: torch.Tensor = functional.all_to_all_single_autograd(torch.relu(there) * 2, split, split, GROUP)
        return back

    compiled = torch.compile(dispatch, backend="aot_eager", fullgraph=True)
    tokens = torch.randn(4 * SIZE, 8, requires_grad=True)
    for function in (dispatch, compiled, compiled):
        function(tokens).sum().backward()


def fsdp2_compiled() -> None:
    sharded = model()
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module)
    compiled = torch.compile(sharded, backend="aot_eager")
    optimizer = torch.optim.AdamW(sharded.parameters(), foreach=True)
    for _ in range(3):
        compiled(torch.ones(4, 8)).sum().backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def state_dicts() -> None:
    sharded = model()
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    get_optimizer_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, full if RANK == 0 else {}, options=options)


def operations_of_dtensors() -> None:
    one: Any
    other: Any
    one, other = (distribute_tensor(torch.randn(8, 8), MESH, [Shard(0)]) for _ in range(2))
    results: list[Any] = [one @ other, one.sum(), one.norm(), torch.topk(one, 2).values, nn.functional.softmax(one, 0)]
    for result in results:
        result.full_tensor()
    (one @ one.t()).redistribute(placements=[Replicate()])
    DTensor.from_local(torch.randn(4, 8), MESH, [Shard(0)], run_check=True).redistribute(placements=[Shard(1)])
    parts: Any = DTensor.from_local(torch.randn(4, 8), MESH, [Partial()])
    parts.redistribute(placements=[Shard(0)])
    (parts + 1).full_tensor()


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def backward_in_other_threads() -> None:
    def train() -> None:
        value = torch.ones(7, requires_grad=True)
        _SumOfGradients.apply(value * 2).sum().backward()

    for _ in range(3):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()


def nobody_waits() -> None:
    for _ in range(50):
        dist.all_reduce(torch.ones(64), async_op=True)
    functional.all_reduce(torch.ones(3), "sum", GROUP)
    functional.all_gather_tensor(torch.ones(3), 0, GROUP).view(-1)[0].item()
    with torch.inference_mode():
        functional.all_reduce(torch.ones(3), "sum", GROUP).sum().item()


SECTIONS: list[Callable[[], None]] = [
    sequence_parallel_under_checkpointing,
    vocabulary_and_loss_parallel,
    mixture_of_experts,
    fsdp2_compiled,
    state_dicts,
    operations_of_dtensors,
    backward_in_other_threads,
    nobody_waits,
]

watch(SECTIONS)
