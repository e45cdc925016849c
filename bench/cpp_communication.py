"""What communication that C++ starts costs: functional collectives, and the buckets of DistributedDataParallel.

    python bench/cpp_communication.py functional
    python bench/cpp_communication.py ddp [--ranks 4] [--buckets 10] [--steps 300] [--sleep-ms 9]

Each round is a new process, or new ranks, because what a recording leaves behind is one of the questions: the same work
runs before ``commtrace.start``, while it records, and after ``commtrace.stop``. ``functional`` measures the calling
thread on torch's fake backend; ``ddp`` the CPU time of all threads of all ranks under gloo, which sleep as if a device
computed. ``plain`` measures the same three phases without commtrace: what it shows is noise.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace

PHASES = ("before", "recording", "after")
CALLS = 2_000
BURSTS = 7


def functional(_options: argparse.Namespace) -> Callable[[], float]:
    """Return what measures a functional all_reduce with its wait, in µs of the calling thread's CPU time."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    operators: Any = torch.ops._c10d_functional
    tensor, name = torch.ones(1024), dist.distributed_c10d._get_default_group().group_name

    def burst() -> float:
        """Return µs per call."""
        start = time.thread_time_ns()
        for _ in range(CALLS):
            operators.wait_tensor.default(operators.all_reduce.default(tensor, "sum", name))
        return float((time.thread_time_ns() - start) / CALLS / 1000)

    return lambda: statistics.median(burst() for _ in range(BURSTS))


def ddp(options: argparse.Namespace) -> Callable[[], float]:
    """Return what measures steps of a DDP model with one bucket per layer, in µs of the rank's CPU time per step."""
    store = FileStore(options.store, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    width = 256
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(options.buckets)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=width * width * 4 / 2**20 * 0.9)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-6), torch.ones(4, width)

    def train(steps: int) -> None:
        """Train on the same batch again and again."""
        for _ in range(steps):
            time.sleep(options.sleep_ms / 1000)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    def phase() -> float:
        """Return µs of CPU time per step."""
        train(5)
        start = time.process_time_ns()
        train(options.steps)
        return float((time.process_time_ns() - start) / options.steps / 1000)

    return phase


def measure(options: argparse.Namespace) -> None:
    """Run the three phases in this process, and print their figures as JSON."""
    torch.set_num_threads(1)
    phase: Callable[[], float] = (functional if options.what == "functional" else ddp)(options)
    phase()
    figures = [phase()]
    with tempfile.TemporaryDirectory() as directory:
        if options.way == "commtrace":
            commtrace.start(commtrace.Config(dir=directory))
        figures.append(phase())
        if options.way == "commtrace":
            commtrace.stop()
        figures.append(phase())
    print(json.dumps(figures))
    dist.destroy_process_group()


def one_round(way: str, options: argparse.Namespace) -> list[float]:
    """Return the figures of the phases, of all ranks together, from new processes."""
    ranks = options.ranks if options.what == "ddp" else 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--store", str(Path(folder) / "store")]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(ranks)
        ]
        figures = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return [sum(phase) for phase in zip(*figures, strict=True)]


def main() -> None:
    """Print the table, or run as one of its processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("functional", "ddp"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sleep-ms", type=float, default=9.0)
    parser.add_argument("--way", choices=("plain", "commtrace"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options)
        return
    unit = "µs of the calling thread per call with its wait, fake backend"
    per_unit = 1
    if options.what == "ddp":
        unit = f"µs of CPU per bucket of a rank's steps, gloo, {options.ranks} ranks, {options.buckets} buckets"
        per_unit = options.ranks * options.buckets
    print(f"torch {torch.__version__}, {unit}; medians of {options.rounds} rounds in turns")
    rounds: dict[str, list[list[float]]] = {"plain": [], "commtrace": []}
    for _ in range(options.rounds):
        for way, found in rounds.items():
            found.append(one_round(way, options))
    for way, found in rounds.items():
        for index, phase in enumerate(PHASES):
            values = [figures[index] / per_unit for figures in found]
            ratios = [figures[index] / figures[0] for figures in found]
            added = statistics.median(figures[index] - figures[0] for figures in found) / per_unit
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            ratio = statistics.median(ratios)
            print(
                f"{way:10} {phase:10} {statistics.median(values):9.2f} {added:+8.2f}   × {ratio:.3f} ({spread})",
                flush=True,
            )


if __name__ == "__main__":
    main()
