"""What a communication costs the training thread by each way to see it, on a torch that has hooks of process groups.

    python bench/capture_ways.py [fake|gloo]

``kernels``: methods of ``ProcessGroup``, and kernels in the dispatcher for what C++ issues: the way before torch 2.14.
``hooks``: methods, and torch's hooks for what C++ issues: the way from 2.14 on. ``hooks alone``: no methods, a pair of
hooks that reads what a row needs and appends it: waits, tags and splits are missing, and nobody recognises the Work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace
from commtrace.capture.collectives import cpp_communication

ROUNDS = 11
CALLS = 1_000


def microseconds_per_call(operation: Callable[[], object]) -> float:
    """CPU time of this thread, mean over one burst."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        operation()
    return (time.thread_time_ns() - start) / CALLS / 1000


@contextmanager
def plain() -> Iterator[None]:
    """Without any tool."""
    yield


@contextmanager
def kernels() -> Iterator[None]:
    """As on a torch without hooks."""
    with mock.patch.object(cpp_communication, "torch_has_hooks", return_value=False), hooks():
        yield


@contextmanager
def hooks() -> Iterator[None]:
    """As commtrace records on this torch."""
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(commtrace.Config(dir=directory))
        yield
        commtrace.stop()


@contextmanager
def hooks_alone() -> Iterator[None]:
    """A pair of hooks that reads what a row needs."""
    group: Any = dist.group.WORLD
    launched: dict[int, tuple[Any, ...]] = {}
    rows: list[tuple[Any, ...]] = []

    def pre(call: Any) -> None:
        tensor = call.input_tensors[0]
        launched[call.op_id] = (
            int(call.name), tensor.nbytes, tensor.dtype, tensor.device, call.root, call.async_op, time.monotonic_ns(),
        )  # fmt: skip

    def post(call: Any) -> None:
        rows.append((launched.pop(call.op_id), call.work, time.monotonic_ns()))
        if len(rows) > CALLS:
            rows.clear()

    group.register_pre_hook(1, pre)
    group.register_post_hook(1, post)
    yield
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)


def operations() -> dict[str, Callable[[], object]]:
    """What is called; the backward of a DDP model has one bucket."""
    tensor, name = torch.ones(1024), dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional: Any = torch.ops._c10d_functional
    # Kernels for its operators are there from here on.
    model, start = DistributedDataParallel(torch.nn.Linear(4, 4)), torch.ones(4, 4)

    def waited() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    found: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async + wait": waited,
        "functional all_reduce + wait": lambda: functional.wait_tensor(functional.all_reduce(tensor, "sum", name)),
    }
    if dist.get_backend() != "fake":  # whose futures have no result: torch refuses the backward
        found["DDP forward and backward"] = lambda: model(start).sum().backward()
    return found


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    backend = (sys.argv[1:] or ["fake"])[0]
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    ways = {"plain": plain, "kernels": kernels, "hooks": hooks, "hooks alone": hooks_alone}
    print(f"torch {torch.__version__}, {backend} backend: µs of the calling thread's CPU time per call, median of")
    print(f"{ROUNDS} rounds of {CALLS}, the ways in turns; what it adds to plain in brackets\n")
    print(f"{'operation':30}" + "".join(f"{name:>18}" for name in ways))
    for name, operation in operations().items():
        rounds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, recording in ways.items():
                with recording():
                    operation()
                    rounds[way].append(microseconds_per_call(operation))
        cells = []
        for values in rounds.values():
            added = statistics.median(value - base for value, base in zip(values, rounds["plain"], strict=True))
            cells.append(f"{statistics.median(values):.2f} ({added:+.2f})")
        print(f"{name:30}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
