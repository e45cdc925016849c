"""What communication that C++ starts costs: functional collectives, and the buckets of DistributedDataParallel.

    python bench/cpp_communication.py functional [--engine native]
    python bench/cpp_communication.py ddp [--ranks 4] [--buckets 10] [--width 256] [--steps 600] [--sleep-ms 9]

``functional`` measures the calling thread on torch's fake backend, in new processes: before ``commtrace.start``, while
it records, and after ``commtrace.stop``, because what a recording leaves behind is one of the questions. ``ddp``
measures the CPU time of the training thread, and of all threads, of all ranks under gloo, which sleep as if a device
computed; the last line is of commtrace's own threads and processes, sleeps included. It records and does not in turns
within one job, because two jobs differ by more than what is measured; the row *noise* compares plain turns with each
other. In each turn it trains with a bucket for each layer, and with one for all layers: what the former takes more is
the buckets', the rest the step's. One rank shows the cost without gloo's. On a machine with other work, ``chrt -r 5``
before the command keeps that from the cores while a rank computes.
"""

from __future__ import annotations

import argparse
import contextlib
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
from bench.thread_time import native_threads_ns, python_threads_ns

CALLS = 2_000
BURSTS = 7
WARM_UP_STEPS = 5
OPENING_SECONDS = 1.0
"""What it costs to open the files, once in a job, is not a bucket's."""


def functional(options: argparse.Namespace) -> list[float]:
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
        commtrace.start(commtrace.Config(dir=directory, engine=options.engine))
        figures.append(phase())
        commtrace.stop()
    return [*figures, phase()]


def ddp(options: argparse.Namespace) -> list[list[float]]:
    """Return medians of µs of CPU time per step, of turns: plain, recording, …, plain.

    The lists are of a model with a bucket for each layer: of the training thread, of all threads of this rank, and of
    commtrace's threads and processes (means); and the same of one with a bucket for all layers.
    """
    store = FileStore(options.store, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    width = options.width
    megabytes = width * width * 4 / 2**20
    models = [model_of(options, bucket_cap_mb=megabytes * cap) for cap in (0.9, 1.1 * options.buckets)]
    batch = torch.ones(4, width)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """Return µs of CPU time of a step on the same batch: of this thread, and of all."""
        time.sleep(options.sleep_ms / 1000)
        start, start_of_all = time.thread_time_ns(), time.process_time_ns()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        return (time.thread_time_ns() - start) / 1000, (time.process_time_ns() - start_of_all) / 1000

    def phase() -> list[float]:
        """Return means of the middle half of the steps, by model and by threads."""
        figures = []
        for model, optimizer in models:
            for _ in range(WARM_UP_STEPS):
                step(model, optimizer)
            start = python_threads_ns() + native_threads_ns() + child_processes_ns()
            steps = [step(model, optimizer) for _ in range(options.steps // options.turns)]
            end = python_threads_ns() + native_threads_ns() + child_processes_ns()
            figures += [*(middle(column) for column in zip(*steps, strict=True)), (end - start) / 1000 / len(steps)]
        return figures

    phase()
    figures = [phase()]
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory() as directory:
            commtrace.start(commtrace.Config(dir=directory, engine=options.engine))
            time.sleep(OPENING_SECONDS)
            figures.append(phase())
            commtrace.stop()
        figures.append(phase())
    return [list(column) for column in zip(*figures, strict=True)]


def model_of(options: argparse.Namespace, bucket_cap_mb: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model, and its optimizer."""
    layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.buckets)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def child_processes_ns() -> int:
    """Return the CPU time so far of the processes that this one has started and that run, ns."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                # Linux's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)
                total += time.clock_gettime_ns((~int(stat.parent.name) << 3) | 2)
    return total


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half: what the system takes now and then is no part of a step."""
    ordered = sorted(values)
    return statistics.mean(ordered[len(ordered) // 4 : -(len(ordered) // 4) or None])


def run(options: argparse.Namespace) -> list[Any]:
    """Return what each new process has measured, one for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", str(Path(folder) / "store"), "--rank"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(options.ranks if options.what == "ddp" else 1)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def print_functional(options: argparse.Namespace) -> None:
    """Print the cost before, while and after a recording."""
    rounds = [run(options)[0] for _ in range(options.rounds)]
    print(f"µs of the calling thread per all_reduce with its wait, fake backend; medians of {len(rounds)} processes")
    for index, name in enumerate(("before start", "recording", "after stop")):
        values = [figures[index] for figures in rounds]
        added = statistics.median(figures[index] - figures[0] for figures in rounds)
        print(f"{name:16} {statistics.median(values):8.2f} {added:+8.2f}")


def print_ddp(options: argparse.Namespace) -> None:
    """Print ratios of turns to the mean of their neighbours, and what a bucket costs."""
    ranks, steps = run(options), options.steps // options.turns
    print(f"{options.ranks} gloo ranks, {options.buckets} buckets, {options.turns} turns of {steps} steps; µs per step")
    for thread, name in enumerate(("training thread", "all threads")):
        many, one = ([sum(turns) / len(ranks) for turns in zip(*(rank[index] for rank in ranks), strict=True)]
                     for index in (thread, 3 + thread))  # fmt: skip
        print(f"{name}: plain {statistics.median(many[::2]):.0f}, with one bucket {statistics.median(one[::2]):.0f}")
        # A recording turn lies between two plain ones; a plain turn is compared with the plain ones beside it.
        for row, first, apart in (("recording", 1, 1), ("noise", 2, 2)):
            turns = range(first, len(many) - apart, 2)
            added, added_to_one = (
                [figures[turn] - (figures[turn - apart] + figures[turn + apart]) / 2 for turn in turns]
                for figures in (many, one)
            )
            ratios = [many[turn] / (many[turn] - more) for turn, more in zip(turns, added, strict=True)]
            per_bucket = [(more - of_one) / (options.buckets - 1)
                          for more, of_one in zip(added, added_to_one, strict=True)]  # fmt: skip
            print(
                f"    {row:10} × {quartiles(ratios, '.3f')}   with one bucket {quartiles(added_to_one, '+.0f')}   "
                f"each further one {quartiles(per_bucket, '+.1f')}"
            )
    print(f"commtrace's threads and processes: {own_time(ranks, 2)}   with one bucket {own_time(ranks, 5)}")


def own_time(ranks: Sequence[Sequence[Sequence[float]]], index: int) -> str:
    """Return the median of turns of commtrace's threads and processes, µs per step, and the quartiles in brackets."""
    return quartiles(
        [statistics.mean(rank[index][turn] for rank in ranks) for turn in range(1, len(ranks[0][0]), 2)], ".0f"
    )


def quartiles(values: Sequence[float], form: str) -> str:
    """Return the median, and the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Print the table, or run as one of its processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("functional", "ddp"))
    parser.add_argument("--engine", choices=("native", "python"), default="native")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument(
        "--width", type=int, default=256, help="of a layer, whose bucket has 4 times its square in bytes"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sleep-ms", type=float, default=9.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        print(json.dumps(functional(options) if options.what == "functional" else ddp(options)))
        dist.destroy_process_group()
        return
    print(f"torch {torch.__version__}, {options.engine} engine:", end=" ")
    (print_functional if options.what == "functional" else print_ddp)(options)


if __name__ == "__main__":
    main()
