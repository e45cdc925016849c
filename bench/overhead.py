"""What one captured communication costs the training thread, beside torch.profiler, in one run.

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

import commtrace

ROUNDS = 15
CALLS = 2_000


def nanoseconds_per_call(operation: Callable[[], object]) -> float:
    """Mean over one burst; a burst is short enough for the buffer to hold it."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        operation()
    return (time.perf_counter_ns() - start) / CALLS


def plain(operation: Callable[[], object]) -> float:
    """Without any tool."""
    return nanoseconds_per_call(operation)


def captured(operation: Callable[[], object]) -> float:
    """With commtrace recording to files."""
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(commtrace.Config(dir=directory))
        operation()
        result = nanoseconds_per_call(operation)
        commtrace.stop()
    return result


def profiled(operation: Callable[[], object]) -> float:
    """With torch.profiler's CPU activities on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        return nanoseconds_per_call(operation)


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
    variants = {"plain": plain, "commtrace": captured, "torch.profiler": profiled}
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, fake backend")
    print(f"µs per call, median of {ROUNDS} rounds of {CALLS}; added cost in brackets\n")
    print(f"{'operation':28}" + "".join(f"{name:>22}" for name in variants))
    for name, operation in operations.items():
        rounds: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(ROUNDS):
            for variant, measure in variants.items():
                rounds[variant].append(measure(operation) / 1000)
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
