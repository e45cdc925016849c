"""Python's own ways to communicate, with the oddities of their arguments."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, distributed_c10d
from torch.distributed import all_reduce as bound_all_reduce
from torch.distributed import batch_isend_irecv as bound_batch

import commtrace.auto  # noqa: F401
from tests.e2e.programs.watched import watch

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
WORLD = distributed_c10d._get_default_group()
AGAIN = dist.new_group(list(range(SIZE)))
ALONE = [dist.new_group([rank]) for rank in range(SIZE)][RANK]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def chunks(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor(*shape, dtype=dtype) for _ in range(SIZE)]


def keywords() -> None:
    dist.all_reduce(tensor=tensor(3), op=dist.ReduceOp.MAX, group=None, async_op=False)
    dist.all_reduce(tensor(3), group=AGAIN, async_op=True).wait()
    dist.broadcast(tensor=tensor(4), src=1, group=WORLD, async_op=False)
    dist.broadcast(tensor(4), group_src=1, async_op=True).wait()
    dist.reduce(tensor=tensor(5), dst=1, op=dist.ReduceOp.SUM, group=AGAIN)
    dist.reduce(tensor(5), group_dst=0, async_op=True).wait()
    dist.all_gather(tensor_list=chunks(6), tensor=tensor(6), group=AGAIN, async_op=False)
    dist.all_gather(chunks(6), tensor(6), async_op=True).wait()
    dist.all_gather_single(output_tensor=tensor(7 * SIZE), input_tensor=tensor(7), group=None, async_op=False)
    dist.all_gather_single(tensor(SIZE, 7), tensor(1, 7), AGAIN, True).wait()
    dist.reduce_scatter(output=tensor(8), input_list=chunks(8), op=dist.ReduceOp.SUM, group=AGAIN)
    dist.reduce_scatter(tensor(8), chunks(8), async_op=True).wait()
    dist.reduce_scatter_single(output=tensor(9), input=tensor(9 * SIZE), group=AGAIN, async_op=False)
    dist.reduce_scatter_single(tensor(9), tensor(9 * SIZE), async_op=True).wait()
    dist.gather(tensor=tensor(10), gather_list=chunks(10) if RANK == 1 else None, dst=1, group=AGAIN)
    dist.gather(tensor(10), chunks(10) if RANK == 0 else None, group_dst=0, async_op=True).wait()
    dist.scatter(tensor=tensor(11), scatter_list=chunks(11) if RANK == 0 else None, src=0, group=AGAIN)
    dist.scatter(tensor(11), chunks(11) if RANK == 1 else None, group_src=1, async_op=True).wait()
    dist.all_to_all_single(output=tensor(2 * SIZE), input=tensor(2 * SIZE), group=AGAIN, async_op=False)
    dist.all_to_all_single(tensor(2 * SIZE), tensor(2 * SIZE), None, None, None, True).wait()
    dist.all_to_all(output_tensor_list=chunks(12), input_tensor_list=chunks(12), group=AGAIN)
    dist.all_to_all(chunks(12), chunks(12), async_op=True).wait()
    dist.barrier(group=AGAIN, async_op=False)
    dist.barrier(async_op=True).wait()
    for operation in (dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.SUM):
        bound_all_reduce(tensor(13), operation)


def deprecated_names() -> None:
    dist.all_gather_into_tensor(output_tensor=tensor(7 * SIZE), input_tensor=tensor(7), group=AGAIN)
    dist.reduce_scatter_tensor(output=tensor(9), input=tensor(9 * SIZE), group=AGAIN, async_op=True).wait()
    dist.all_reduce_coalesced([tensor(3), tensor(4)])
    dist.all_reduce_coalesced([tensor(3), tensor(4)], group=AGAIN, async_op=True).wait()
    dist.all_gather_coalesced([[tensor(3), tensor(5)] for _ in range(SIZE)], [tensor(3), tensor(5)])


def sizes_and_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
        dist.broadcast(tensor(5, dtype=dtype), 0)
        dist.all_gather(chunks(2, dtype=dtype), tensor(2, dtype=dtype))
    dist.all_reduce(tensor(0))
    dist.broadcast(tensor(0), 0)
    dist.all_reduce(torch.tensor(1.0))
    dist.all_reduce(torch.ones(4, dtype=torch.complex64))
    dist.all_gather(chunks(2, 3), tensor(2, 3))
    dist.all_reduce(torch.nn.Parameter(tensor(5)).data)
    dist.all_reduce(tensor(2, 3, 4)[:, :, 1].contiguous())
    dist.all_reduce(tensor(8)[2:5])


def uneven() -> None:
    """Rank r sends r + 1 rows to everybody; then nothing at all; then everything stays."""
    sizes = [rank + 1 for rank in range(SIZE)]
    dist.all_to_all_single(
        tensor(sum(sizes), 3), tensor(SIZE * (RANK + 1), 3), output_split_sizes=sizes,
        input_split_sizes=[RANK + 1] * SIZE,
    )  # fmt: skip
    dist.all_to_all_single(tensor(0), tensor(0), [0] * SIZE, [0] * SIZE)
    dist.all_to_all_single(tensor(4), tensor(4), [4, 0] if RANK == 0 else [0, 4], [4, 0] if RANK == 0 else [0, 4])


def objects() -> None:
    everybody: list[object] = [None] * SIZE
    dist.all_gather_object(object_list=everybody, obj={"rank": RANK}, group=AGAIN)
    dist.gather_object("x" * (RANK + 1), everybody if RANK == 0 else None, dst=0)
    dist.broadcast_object_list([RANK, "a", None], src=1, device=torch.device("cpu"))
    dist.scatter_object_list([None], ["a", "bc"] if RANK == 0 else [None, None], src=0)
    if RANK == 0:
        dist.send_object_list([1, "two"], dst=1)
        dist.recv_object_list([None], src=1)
    else:
        dist.recv_object_list([None, None], src=0)
        dist.send_object_list(["x"], dst=0)


def point_to_point() -> None:
    if RANK == 0:
        dist.send(tensor=tensor(21), dst=1, group=None, tag=3)
        dist.recv(tensor(22), src=1, group=AGAIN)
        dist.send(tensor(0), group_dst=1)
        dist.recv(tensor(5, dtype=torch.int64))
    else:
        dist.recv(tensor=tensor(21), src=0, tag=3)
        dist.send(tensor(22), dst=0, group=AGAIN)
        dist.recv(tensor(0), group_src=0)
        dist.send(tensor(5, dtype=torch.int64), 0)
    works: list[Any] = [dist.isend(tensor(23), NEXT, tag=1), dist.irecv(tensor(23), src=PREVIOUS, tag=1)]
    for work in reversed(works):
        work.wait()
    batch = [P2POp(dist.isend, tensor(24), NEXT), P2POp(op=dist.irecv, tensor=tensor(24), peer=PREVIOUS)]
    for work in bound_batch(batch):
        work.wait()
    batch = [P2POp(dist.irecv, tensor(3), PREVIOUS, AGAIN), P2POp(dist.isend, tensor(3), group=AGAIN, group_peer=NEXT)]
    for work in dist.batch_isend_irecv(p2p_op_list=batch):
        work.wait()


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(tensor(26))
        dist.all_reduce(tensor(27))
    with dist._coalescing_manager(group=AGAIN, async_ops=True) as manager:
        dist.all_gather_single(tensor(28 * SIZE), tensor(28), group=AGAIN)
        dist.all_gather_single(tensor(29 * SIZE), tensor(29), group=AGAIN)
    manager.wait()
    with dist._coalescing_manager():
        dist.reduce_scatter_single(tensor(30), tensor(30 * SIZE))
    with dist._coalescing_manager():
        pass


def methods() -> None:
    """What C++ extensions and old code call."""
    WORLD.allreduce([tensor(31)]).wait()
    WORLD.allreduce(tensor(31), dist.ReduceOp.SUM).wait()
    WORLD.broadcast(tensor(32), 0).wait()
    WORLD.allgather([chunks(33)], [tensor(33)]).wait()
    WORLD.allgather(chunks(33), tensor(33)).wait()
    WORLD.reduce_scatter(tensor(34), chunks(34)).wait()
    WORLD._allgather_base(tensor(35 * SIZE), tensor(35)).wait()
    (WORLD.send([tensor(36)], NEXT, 0) if RANK == 0 else WORLD.recv([tensor(36)], PREVIOUS, 0)).wait()
    WORLD.barrier().wait()


def waits_of_other_kinds() -> None:
    dist.all_reduce(tensor(40), async_op=True).get_future().wait()
    dist.all_reduce(tensor(41), async_op=True).get_future().then(lambda future: future.value()).wait()
    work = dist.all_reduce(tensor(42), async_op=True)
    while not work.is_completed():
        pass
    work = dist.all_reduce(tensor(43), async_op=True)
    work.wait()
    work.wait()
    dist.all_reduce(tensor(44), async_op=True).wait(timedelta(seconds=60))
    works = [dist.all_reduce(tensor(45), async_op=True) for _ in range(3)]
    works[-1].wait()
    works[0].wait()
    torch.futures.wait_all([work.get_future() for work in works])


def monitored_barriers() -> None:
    dist.monitored_barrier()
    dist.monitored_barrier(group=AGAIN, timeout=timedelta(seconds=60), wait_all_ranks=True)


def changing_groups() -> None:
    for size in (5, 6, 7):
        group = dist.new_group(list(range(SIZE)))
        dist.all_reduce(tensor(size), group=group)
        dist.destroy_process_group(group)
    mine, _ = dist.new_subgroups(group_size=1)
    dist.all_reduce(tensor(8), group=mine)
    pair, _ = dist.new_subgroups_by_enumeration([list(range(SIZE))])
    dist.all_reduce(tensor(9), group=pair)
    described = dist.new_group(list(range(SIZE)), group_desc="EXPERTS", use_local_synchronization=True)
    dist.all_gather_object([None] * SIZE, 1, group=described)
    dist.all_reduce(tensor(10), group=ALONE)


def not_a_member() -> None:
    """torch warns and does nothing."""
    group = dist.new_group([0])
    dist.all_reduce(tensor(3), group=group) if RANK == 0 else None


def threads() -> None:
    """Each in a group of its own: in one group their order would differ between ranks."""

    def repeat(count: int, group: dist.ProcessGroup | None) -> None:
        for _ in range(30):
            dist.all_reduce(tensor(count), group=group)
            dist.broadcast(tensor(count), group_src=0, group=group, async_op=True).wait()

    workers = [
        threading.Thread(target=repeat, args=(50 + index, group)) for index, group in enumerate((None, AGAIN, ALONE))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def wait_in_another_thread() -> None:
    work = dist.all_reduce(tensor(60), async_op=True)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    waiter.join()


def differentiable() -> None:
    """torch.distributed.nn.functional: autograd functions around the collectives."""
    from torch.distributed.nn import functional

    value = tensor(6).requires_grad_()
    functional.all_reduce(value).sum().backward()
    torch.stack(functional.all_gather(value)).sum().backward()
    functional.broadcast(value, 0).sum().backward()
    functional.reduce_scatter(tensor(3), [value[:3], value[3:]]).sum().backward()
    functional.all_to_all_single(tensor(6), value).sum().backward()
    functional.all_to_all(chunks(3), [value[:3], value[3:]])[0].sum().backward()
    functional.reduce(value, 0).sum().backward()
    functional.gather(value, 0)
    functional.scatter([value[:3], value[3:]], 0)


def spread_in_cpp() -> None:
    """What FSDP1 calls to give all ranks the same model, without a DDP."""
    verify: Any = dist._verify_params_across_processes  # its logger has no default in all versions
    verify(WORLD, [tensor(3), tensor(4)])
    dist._broadcast_coalesced(AGAIN, [tensor(70), tensor(71), tensor(72, dtype=torch.int64)], 100, 0)


def graph_of_python() -> None:
    """Collectives issued inside a backward pass, by a hook."""
    layer = torch.nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
        parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    layer(tensor(2, 4)).sum().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch(
        [
            keywords, deprecated_names, sizes_and_dtypes, uneven, objects, point_to_point, coalesced, methods,
            waits_of_other_kinds, monitored_barriers, changing_groups, not_a_member, threads, wait_in_another_thread,
            differentiable, spread_in_cpp, graph_of_python,
        ]
    )  # fmt: skip
