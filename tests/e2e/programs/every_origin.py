"""Every way in which Python code can communicate through torch.distributed, with torch.profiler watching.

Each rank leaves ``profiler-RANK.json`` in the folder given as the argument. The ranks import commtrace at different
times: before torch, after torch, or after the process groups exist.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
IMPORTED = ("before torch", "after torch", "after init")[int(os.environ["RANK"]) % 3]

if IMPORTED == "before torch":
    import commtrace.auto

import torch
import torch.distributed as dist
from torch.distributed import all_gather_single, all_reduce, isend  # bound before anything is patched
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

bound_reduce = torch.distributed.reduce

if IMPORTED == "after torch":
    import commtrace.auto

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
HALVES = [dist.new_group(list(half)) for half in (range(SIZE // 2), range(SIZE // 2, SIZE))]
AGAIN = dist.new_group(list(range(SIZE)))  # the same members as the world
MESH = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("outer", "inner"))

if IMPORTED == "after init":
    import commtrace.auto  # noqa: F401


def tensor(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def chunks(count: int) -> list[torch.Tensor]:
    return [tensor(count) for _ in range(SIZE)]


def collectives() -> None:
    all_reduce(tensor(3))
    dist.all_reduce(tensor(4, torch.bfloat16), async_op=True).wait()
    dist.broadcast(tensor(5), SIZE - 1)
    bound_reduce(tensor(6), dst=0)
    dist.all_gather(chunks(7), tensor(7))
    all_gather_single(tensor(8 * SIZE), tensor(8))
    dist.reduce_scatter(tensor(9), chunks(9))
    dist.reduce_scatter_single(tensor(10), tensor(10 * SIZE))
    dist.gather(tensor(11), chunks(11) if RANK == 0 else None, dst=0)
    dist.scatter(tensor(12), chunks(12) if RANK == 1 else None, src=1)
    dist.all_to_all_single(tensor(2 * SIZE), tensor(2 * SIZE))
    dist.all_to_all(chunks(13), chunks(13))
    uneven_all_to_all()
    dist.barrier()
    dist.monitored_barrier()
    works = [dist.all_reduce(tensor(14 + index), async_op=True) for index in range(4)]
    works += [dist.all_gather_single(tensor(20 * SIZE), tensor(20), async_op=True), dist.barrier(async_op=True)]
    for work in reversed(works):
        work.wait()


def uneven_all_to_all() -> None:
    """Rank r sends r + 1 numbers to everybody."""
    sizes = [rank + 1 for rank in range(SIZE)]
    dist.all_to_all_single(tensor(sum(sizes)), tensor(SIZE * (RANK + 1)), sizes, [RANK + 1] * SIZE)


def point_to_point() -> None:
    if RANK % 2 == 0:
        dist.send(tensor(21), NEXT)
        dist.recv(tensor(22), PREVIOUS)
    else:
        dist.recv(tensor(21), PREVIOUS)
        dist.send(tensor(22), NEXT)
    works: list[Any] = [isend(tensor(23), NEXT), dist.irecv(tensor(23), PREVIOUS)]
    for work in works:
        work.wait()
    batch = [
        dist.P2POp(dist.isend, tensor(24), NEXT),
        dist.P2POp(dist.irecv, tensor(24), PREVIOUS),
        dist.P2POp(dist.isend, tensor(25), NEXT),
        dist.P2POp(dist.irecv, tensor(25), PREVIOUS),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(tensor(26))
        dist.all_reduce(tensor(27))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_single(tensor(28 * SIZE), tensor(28))
        dist.all_gather_single(tensor(29 * SIZE), tensor(29))
    manager.wait()
    with dist._coalescing_manager():
        dist.reduce_scatter_single(tensor(30), tensor(30 * SIZE))
        dist.reduce_scatter_single(tensor(31), tensor(31 * SIZE))


def objects() -> None:
    everybody: list[object] = [None] * SIZE
    dist.all_gather_object(everybody, {"rank": RANK})
    dist.gather_object("x" * RANK, everybody if RANK == 0 else None, dst=0)
    dist.broadcast_object_list([RANK, "a"], src=0)
    dist.scatter_object_list([None], everybody if RANK == 0 else None, src=0)
    if RANK == 0:
        dist.send_object_list([1, 2], dst=1)
    elif RANK == 1:
        dist.recv_object_list([None, None], src=0)


def groups() -> None:
    half = HALVES[RANK >= SIZE // 2]
    dist.all_reduce(tensor(32), group=half)
    dist.broadcast(tensor(33), group_src=0, group=half)
    dist.all_reduce(tensor(34), group=AGAIN)
    for name in ("outer", "inner"):
        dist.all_reduce(tensor(35), group=MESH.get_group(name))


def from_two_threads() -> None:
    """Each thread in a group of its own: in one group their order would differ between ranks."""

    def repeat(count: int, group: dist.ProcessGroup | None) -> None:
        for _ in range(50):
            dist.all_reduce(tensor(count), group=group)

    threads = [threading.Thread(target=repeat, args=(36, None)), threading.Thread(target=repeat, args=(37, AGAIN))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    torch.set_num_threads(1)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=all_threads) as profiler:
        collectives()
        point_to_point()
        coalesced()
        objects()
        groups()
        from_two_threads()
    profiler.export_chrome_trace(str(FOLDER / f"profiler-{RANK}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
