"""What one captured communication, module or batch costs the training thread, beside torch.profiler, in one run.

    python bench/overhead.py

Runs on the fake backend: Python cost only, no network. Each figure is the median over rounds; the variants take turns
within each round, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

import commtrace

ROUNDS = 15
CALLS = 2_000
MODULES = 50


def nanoseconds_per_call(operation: Callable[[], object], calls: int) -> float:
    """CPU time of this thread, mean over one burst; a burst is short enough for the buffer to hold it.

    Not wall time: on a machine with other work to do that would measure the other work.
    """
    start = time.thread_time_ns()
    for _ in range(calls):
        operation()
    return (time.thread_time_ns() - start) / calls


def plain(operation: Callable[[], object], calls: int) -> float:
    """Without any tool."""
    return nanoseconds_per_call(operation, calls)


class Tiny(torch.nn.Module):
    """One node of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)


class Numbers(Dataset[int]):
    """What a loader costs nothing to read."""

    def __len__(self) -> int:
        return 10 * ROUNDS * CALLS

    def __getitem__(self, index: int) -> int:
        return index


class Spaced(torch.nn.Module):
    """Small modules with functional code between them: no module's input is another one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Tiny() for _ in range(MODULES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.neg(x))
        return x


def captured(operation: Callable[[], object], calls: int) -> float:
    """With commtrace recording to files."""
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(commtrace.Config(dir=directory, modules="depth=1"))
        operation()
        result = nanoseconds_per_call(operation, calls)
        commtrace.stop()
    return result


def profiled(operation: Callable[[], object], calls: int) -> float:
    """With torch.profiler's CPU activities on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        return nanoseconds_per_call(operation, calls)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor, gathered = torch.ones(1024), torch.ones(2048)

    def waited() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async + wait": waited,
        "all_gather_into_tensor": lambda: dist.distributed_c10d._all_gather_base(gathered, tensor),
        "send": lambda: dist.send(tensor, 1),
    }
    gradient, start = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    chain, spaced = torch.nn.Sequential(*(Tiny() for _ in range(MODULES))), Spaced()
    batches = iter(DataLoader(Numbers(), collate_fn=len))
    operations |= {
        "DataLoader next": lambda: next(batches),
        "module, in a chain": lambda: chain(start).backward(gradient),
        "module, with code between": lambda: spaced(start).backward(gradient),
    }
    variants = {"plain": plain, "commtrace": captured, "torch.profiler": profiled}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, fake backend")
    print(f"µs of CPU time per call, median of {ROUNDS} rounds of {CALLS}; added cost in brackets\n")
    print(f"{'operation':28}" + "".join(f"{name:>22}" for name in variants))
    for name, operation in operations.items():
        rounds: dict[str, list[float]] = {variant: [] for variant in variants}
        modules = MODULES if name.startswith("module") else 1
        for _ in range(ROUNDS):
            for variant, measure in variants.items():
                rounds[variant].append(measure(operation, CALLS // modules) / 1000 / modules)
        base = statistics.median(rounds["plain"])
        cells = []
        for variant, values in rounds.items():
            added = statistics.median(value - plain for value, plain in zip(values, rounds["plain"], strict=True))
            median = statistics.median(values)
            cells.append(f"{median:.2f}" if variant == "plain" else f"{median:.2f} (+{added:.2f})")
        print(f"{name:28}" + "".join(f"{cell:>22}" for cell in cells))
        assert base > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
