"""What communication that C++ starts costs: functional collectives, and the buckets of DistributedDataParallel.

    python bench/cpp_communication.py functional
    python bench/cpp_communication.py ddp [--ranks 4] [--buckets 10] [--steps 300] [--sleep-ms 9]

``functional`` measures the calling thread on torch's fake backend, in new processes: before ``commtrace.start``, while
it records, and after ``commtrace.stop``, because what a recording leaves behind is one of the questions. ``ddp``
measures the CPU time of all threads of all ranks under gloo, which sleep as if a device computed. It records and does
not in turns within one job, because two jobs differ by more than what is measured. One rank shows the cost without
gloo's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace

CALLS = 2_000
BURSTS = 7
WIDTH = 256
WARM_UP_STEPS = 5
OPENING_SECONDS = 1.0
"""What it costs to open the files, once in a job, is not a bucket's."""


def functional() -> list[float]:
    """Return µs per all_reduce with its wait: before, recording, after."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    operators: Any = torch.ops._c10d_functional
    tensor, name = torch.ones(1024), dist.distributed_c10d._get_default_group().group_name

    def burst() -> float:
        """Return µs per call."""
        start = time.thread_time_ns()
        for _ in range(CALLS):
            operators.wait_tensor.default(operators.all_reduce.default(tensor, "sum", name))
        return float((time.thread_time_ns() - start) / CALLS / 1000)

    def phase() -> float:
        """Return the median of bursts."""
        return statistics.median(burst() for _ in range(BURSTS))

    phase()
    figures = [phase()]
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(commtrace.Config(dir=directory))
        figures.append(phase())
        commtrace.stop()
    return [*figures, phase()]


def ddp(options: argparse.Namespace) -> list[float]:
    """Return µs of this rank's CPU time per step of a model with one bucket per layer: plain, recording, …, plain."""
    store = FileStore(options.store, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(options.buckets)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20 * 0.9)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-6), torch.ones(4, WIDTH)

    def train(steps: int) -> None:
        """Train on the same batch again and again."""
        for _ in range(steps):
            time.sleep(options.sleep_ms / 1000)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    def phase() -> float:
        """Return µs of CPU time per step."""
        train(WARM_UP_STEPS)
        start = time.process_time_ns()
        train(options.steps // options.turns)
        return float((time.process_time_ns() - start) / (options.steps // options.turns) / 1000)

    phase()
    figures = [phase()]
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory() as directory:
            commtrace.start(commtrace.Config(dir=directory))
            time.sleep(OPENING_SECONDS)
            figures.append(phase())
            commtrace.stop()
        figures.append(phase())
    return figures


def run(options: argparse.Namespace) -> list[float]:
    """Return the figures of new processes, added up over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", str(Path(folder) / "store"), "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(options.ranks if options.what == "ddp" else 1)
        ]
        figures = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return [sum(phase) for phase in zip(*figures, strict=True)]


def print_functional(options: argparse.Namespace) -> None:
    """Print the cost before, while and after a recording."""
    rounds = [run(options) for _ in range(options.rounds)]
    print(f"µs of the calling thread per all_reduce with its wait, fake backend; medians of {len(rounds)} processes")
    for index, name in enumerate(("before start", "recording", "after stop")):
        values = [figures[index] for figures in rounds]
        added = statistics.median(figures[index] - figures[0] for figures in rounds)
        print(f"{name:16} {statistics.median(values):8.2f} {added:+8.2f}")


def print_ddp(options: argparse.Namespace) -> None:
    """Print ratios of turns to the mean of their neighbours, and what a bucket costs."""
    figures = run(options)
    per_bucket = options.ranks * options.buckets
    print(f"CPU time of {options.ranks} gloo ranks, {options.buckets} buckets, {options.turns} turns of", end=" ")
    print(
        f"{options.steps // options.turns} steps; plain {statistics.median(figures[::2]) / per_bucket:.1f} µs per bucket"
    )
    for name, first in (("recording", 1), ("noise", 2)):
        turns = range(first, len(figures) - 1, 2)
        beside = [(figures[turn], (figures[turn - 1] + figures[turn + 1]) / 2) for turn in turns]
        if name == "noise":  # a turn without a recording between two of these, beside the plain turns before and after
            beside = [
                (figures[turn], (figures[turn - 2] + figures[turn + 2]) / 2) for turn in range(2, len(figures) - 2, 2)
            ]
        ratios = [value / plain for value, plain in beside]
        added = [(value - plain) / per_bucket for value, plain in beside]
        print(f"{name:10} × {quartiles(ratios, '.3f')}   µs per bucket {quartiles(added, '+.1f')}")


def quartiles(values: Sequence[float], form: str) -> str:
    """Return the median, and the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Print the table, or run as one of its processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("functional", "ddp"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sleep-ms", type=float, default=9.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        print(json.dumps(functional() if options.what == "functional" else ddp(options)))
        dist.destroy_process_group()
        return
    print(f"torch {torch.__version__}:", end=" ")
    (print_functional if options.what == "functional" else print_ddp)(options)


if __name__ == "__main__":
    main()
