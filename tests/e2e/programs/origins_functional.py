"""Functional collectives: called, differentiated, compiled, and issued by DTensor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import commtrace.auto  # noqa: F401
from tests.e2e.programs.watched import CannotRunError, watch

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
GROUP = dist.new_group(list(range(SIZE)))
MESH = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def functions() -> None:
    everybody = list(range(SIZE))
    for group in (GROUP, MESH, (MESH, 0), everybody, GROUP.group_name):
        funcol.wait_tensor(funcol.all_reduce(tensor(3), "sum", group))
    (funcol.all_reduce(tensor(4, dtype=torch.bfloat16), reduceOp="max", group=GROUP) + 1).sum()
    (funcol.all_gather_tensor(tensor(5, 2), gather_dim=0, group=GROUP) + 1).sum()
    (funcol.all_gather_tensor(tensor(2, 5), 1, GROUP) + 1).sum()
    (funcol.reduce_scatter_tensor(tensor(6, 2), "sum", scatter_dim=0, group=GROUP) + 1).sum()
    (funcol.reduce_scatter_tensor(tensor(2, 6), "sum", 1, GROUP) + 1).sum()
    (funcol.all_to_all_single(tensor(8), None, None, GROUP) + 1).sum()
    (funcol.all_to_all_single(tensor(SIZE * (RANK + 1)), [1, 2], [RANK + 1] * SIZE, GROUP) + 1).sum()
    (funcol.broadcast(tensor(9), 1, GROUP) + 1).sum()
    (funcol.permute_tensor(tensor(10), [1, 0], GROUP) + 1).sum()
    for result in funcol.all_reduce_coalesced([tensor(3), tensor(4)], "sum", GROUP):
        (result + 1).sum()
    for result in funcol.all_gather_into_tensor_coalesced([tensor(3), tensor(4)], GROUP):
        (result + 1).sum()
    for result in funcol.reduce_scatter_tensor_coalesced([tensor(4), tensor(6)], "sum", [0, 0], GROUP):
        (result + 1).sum()
    funcol.all_reduce(tensor(11), "sum", GROUP)  # nobody waits
    (funcol.all_reduce(tensor(0), "sum", GROUP) + 1).sum()
    (funcol.all_reduce(torch.tensor(1.0), "sum", GROUP) + 1).sum()
    (funcol.all_reduce(tensor(4, 4).t(), "sum", GROUP) + 1).sum()


def in_place() -> None:
    funcol.all_reduce_inplace(tensor(3), group=GROUP)
    funcol.all_gather_tensor_inplace(tensor(3 * SIZE), tensor(3), group=GROUP)
    funcol.reduce_scatter_tensor_inplace(tensor(3), tensor(3 * SIZE), group=GROUP)
    funcol.all_to_all_inplace(tensor(4), tensor(4), None, None, GROUP)
    funcol.all_gather_inplace([tensor(3) for _ in range(SIZE)], tensor(3), GROUP)


def point_to_point() -> None:
    if not hasattr(funcol, "batch_p2p_ops_inplace"):
        raise CannotRunError("this version of torch has no functional isend and irecv")
    if RANK == 0:
        funcol.wait_tensor(funcol.isend_inplace(tensor(3), 1, 0, GROUP))
        funcol.wait_tensor(funcol.irecv_inplace(tensor(4), 1, 0, GROUP))
    else:
        funcol.wait_tensor(funcol.irecv_inplace(tensor(3), 0, 0, GROUP))
        funcol.wait_tensor(funcol.isend_inplace(tensor(4), 0, 0, GROUP))
    names = ["isend", "irecv"] if RANK == 0 else ["irecv", "isend"]
    peers = [NEXT, PREVIOUS]
    for result in funcol.batch_p2p_ops_inplace(names, peers, [0, 0], [tensor(5), tensor(5)], GROUP.group_name):
        funcol.wait_tensor(result)


def gradients() -> None:
    value = tensor(4, 2).requires_grad_()
    funcol.all_gather_tensor_autograd(value, 0, GROUP).sum().backward()
    funcol.reduce_scatter_tensor_autograd(value, "sum", 0, GROUP).sum().backward()
    funcol.all_to_all_single_autograd(value, [2, 2], [2, 2], GROUP).sum().backward()
    funcol.all_to_all_single_autograd(tensor(3).requires_grad_(), *SPLITS, GROUP).sum().backward()
    funcol.all_reduce(value, "sum", GROUP).sum().backward()


SPLITS = ([1, 2], [1, 2]) if RANK == 0 else ([2, 1], [2, 1])
"""Rank 0 keeps 1 row and sends 2; rank 1 sends 2 and keeps 1."""


def operators() -> None:
    """torch.ops themselves, as graphs and extensions call them; with the group by name, or as it is."""
    ops = torch.ops._c10d_functional
    for group in (GROUP.group_name, GROUP):
        ops.wait_tensor(ops.all_reduce(tensor(3), "sum", group))
        ops.wait_tensor(ops.all_reduce_(tensor(3), "sum", group))
        ops.wait_tensor(ops.broadcast_(tensor(3), 0, group))
    ops.wait_tensor(ops.all_gather_into_tensor_out(tensor(3), SIZE, GROUP.group_name, out=tensor(3 * SIZE)))
    for result in ops.all_reduce_coalesced_([tensor(3), tensor(2)], "sum", GROUP.group_name):
        ops.wait_tensor(result)
    ops.wait_tensor(ops.all_reduce(input=tensor(3), reduce_op="sum", group_name=GROUP.group_name))
    old = torch.ops.c10d_functional
    old.wait_tensor(old.all_reduce(tensor(3), "sum", "", list(range(SIZE)), SIZE))


def redistribution() -> None:
    sharded: Any = distribute_tensor(torch.arange(8.0).reshape(4, 2), MESH, [Shard(0)])
    sharded.redistribute(MESH, [Replicate()]).to_local()
    sharded.redistribute(MESH, [Replicate()], async_op=True).to_local().sum()
    sharded.redistribute(placements=[Shard(1)]).to_local()
    replicated = distribute_tensor(tensor(4, 2), MESH, [Replicate()])
    replicated.redistribute(MESH, [Shard(0)]).to_local()
    partial = DTensor.from_local(tensor(4, 2), MESH, [Partial()])
    partial.redistribute(MESH, [Replicate()]).to_local()
    partial.redistribute(MESH, [Shard(0)]).to_local()
    DTensor.from_local(tensor(4, 2), MESH, [Partial("avg")]).full_tensor()
    distribute_tensor(tensor(5, 2), MESH, [Shard(0)]).full_tensor()  # uneven
    weight: Any = nn.Parameter(distribute_tensor(tensor(4, 2), MESH, [Shard(0)]))
    (weight.redistribute(MESH, [Replicate()]) * 2).sum().backward()
    sharded.sum().full_tensor()
    (sharded @ distribute_tensor(tensor(2, 4), MESH, [Shard(0)])).full_tensor()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(self.norm(tokens))))
        return result


def tensor_parallel() -> None:
    block = parallelize_module(Block(), MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    block(tensor(4, 8)).sum().backward()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
    }
    model = parallelize_module(Block(), MESH, plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(tensor(2, 4, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    distribute_module(nn.Linear(4, 4), MESH)(distribute_tensor(tensor(2, 4), MESH, [Replicate()]))


def compute(value: torch.Tensor) -> torch.Tensor:
    reduced = funcol.all_reduce(value * 2, "sum", GROUP)
    gathered = funcol.all_gather_tensor(reduced + 1, 0, GROUP)
    return funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, GROUP) + 1


def communicate(value: torch.Tensor) -> torch.Tensor:
    """Nothing but communication, and in an order that needs no copies: compiling a kernel takes a minute."""
    gathered = funcol.all_gather_tensor(value, 0, GROUP)
    return funcol.all_reduce(funcol.reduce_scatter_tensor(gathered, "sum", 0, GROUP), "sum", GROUP)


def with_python_collectives(value: torch.Tensor) -> torch.Tensor:
    value = value * 2
    dist.all_reduce(value, group=GROUP)
    output = torch.empty(SIZE * value.size(0), value.size(1))
    dist.all_gather_into_tensor(output, value, group=GROUP)
    return output + 1


def under_modes() -> None:
    """Modes that stand before commtrace in the dispatcher, and see what they would see without it."""
    with CommDebugMode() as counted:
        redistribution()
        funcol.wait_tensor(funcol.all_reduce(tensor(3), "sum", GROUP))
    assert counted.get_total_counts() == COUNTED_WITHOUT_COMMTRACE, counted.get_comm_counts()
    with torch.inference_mode():
        funcol.wait_tensor(funcol.all_reduce(tensor(5), "sum", GROUP))
        dist.all_reduce(tensor(6))
        distribute_tensor(tensor(4, 2), MESH, [Shard(0)]).full_tensor()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (funcol.all_gather_tensor(tensor(4, 4), 0, GROUP) @ tensor(4, 4)).sum()


COUNTED_WITHOUT_COMMTRACE = 17


def with_messages(value: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(value)
    messages = [dist.P2POp(dist.isend, value, NEXT), dist.P2POp(dist.irecv, received, PREVIOUS)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received + 1


def compiled(backend: str) -> None:
    torch._dynamo.reset()
    first = torch.compile(compute, backend=backend, fullgraph=True)
    second = torch.compile(with_python_collectives, backend=backend)
    third = torch.compile(with_messages, backend=backend)
    for _ in range(2):
        first(tensor(4, 2))
        second(tensor(4, 2))
        third(tensor(4, 2))
    model = torch.compile(
        parallelize_module(Block(), MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()}), backend=backend
    )
    for _ in range(2):
        model(tensor(4, 8)).sum().backward()


def compiled_eager() -> None:
    compiled("eager")


def compiled_aot_eager() -> None:
    compiled("aot_eager")


def compiled_inductor() -> None:
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(sys.argv[-1]) / "cache")
    torch._inductor.config.compile_threads = 1
    function = torch.compile(communicate, backend="inductor", fullgraph=True)
    for _ in range(2):
        function(tensor(4, 2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch(
        [
            functions, in_place, point_to_point, gradients, operators, redistribution, tensor_parallel, under_modes,
            compiled_eager, compiled_aot_eager, compiled_inductor,
        ]
    )  # fmt: skip
