"""What one captured communication, module or batch costs the training thread, by engine, beside torch.profiler.

    python bench/overhead.py
    python bench/overhead.py --rounds 5 --calls 500 --only harvest

Prints three tables: calls on the fake backend, where there is no network and no device; the same calls with marks on a
simulated driver; and what commtrace's own thread needs for a million spans. A bucket of DDP, functional collectives,
and the CPU time of a whole job are in bench/cpp_communication.py; figures of a GPU come from bench/gpu_hour.py.

Each figure is CPU time, the median over rounds. The variants take turns within each round, each of them first in its
turn, so that a noisy machine disturbs all of them alike. What is added is the median of the differences to the plain
call of the same round.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

import commtrace
from commtrace.capture import instrumentation
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.native import Native, NativeClock
from commtrace.recording.options import NATIVE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.engines import check_engine, engines, recorded_rows, why_not_native
from bench.harvest import print_harvest
from tests.capture.simulated_cuda import SimulatedCuda
from tests.native import simulated_driver

MODULES = 50
SECTIONS = ("calls", "driver", "harvest")

Operation = Callable[[], object]
Variant = Callable[[Operation, int], float]
"""Runs an operation so often; returns ns per call."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--calls", type=int, default=2_000, help="in each round, default 2000")
    parser.add_argument("--spans", type=int, default=1_000_000, help="of the harvest, default a million")
    parser.add_argument("--only", choices=SECTIONS, help="one of the tables")
    options = parser.parse_args()
    sections = [options.only] if options.only else SECTIONS
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for the flat collectives
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, fake backend: no device, no network"
    )
    if why_not_native():
        print(f"Without the native engine: {why_not_native()}.")
    if "calls" in sections:
        recorded = {f"commtrace, {engine}": partial(captured, engine) for engine in engines()}
        variants: dict[str, Variant] = {"plain": plain, **recorded, "torch.profiler": profiled}
        operations = {**communication(), **modules_and_batches(options.rounds * options.calls)}
        print_table(operations, variants, options.rounds, options.calls)
    if "driver" in sections:
        print_on_simulated_driver(options.rounds, options.calls)
    if "harvest" in sections:
        for engine in engines():
            print_harvest(engine, communication()["all_reduce"], options.spans)
    dist.destroy_process_group()


def communication(kind: type[torch.Tensor] = torch.Tensor) -> dict[str, Operation]:
    """Return the calls that are measured, on tensors of a kind. The fake backend ends each of them at once."""
    tensor, gathered = torch.ones(1024).as_subclass(kind), torch.ones(2048).as_subclass(kind)
    group = dist.distributed_c10d

    def wait_for(work: dist.Work | None) -> None:
        assert work is not None
        work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, async + wait": lambda: wait_for(dist.all_reduce(tensor, async_op=True)),
        "send": lambda: dist.send(tensor, 1),
        "isend + wait": lambda: wait_for(dist.isend(tensor, 1)),
        "all_gather_into_tensor": lambda: group._all_gather_base(gathered, tensor),
        "reduce_scatter_tensor": lambda: group._reduce_scatter_base(tensor, gathered),
        "broadcast": lambda: dist.broadcast(tensor, 0),
    }


def modules_and_batches(most_batches: int) -> dict[str, Operation]:
    """Return a forward and backward of small modules, and a DataLoader's next."""
    gradient, start = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    chain, spaced = torch.nn.Sequential(*(Tiny() for _ in range(MODULES))), Spaced()
    batches = iter(DataLoader(Numbers(10 * most_batches), collate_fn=len))
    return {
        "DataLoader next": lambda: next(batches),
        "module, in a chain": lambda: chain(start).backward(gradient),
        "module, with code between": lambda: spaced(start).backward(gradient),
    }


class Tiny(torch.nn.Module):
    """One node of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)


class Spaced(torch.nn.Module):
    """Small modules with functional code between them: no module's input is another one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Tiny() for _ in range(MODULES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.neg(x))
        return x


class Numbers(Dataset[int]):
    """What a loader costs nothing to read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def nanoseconds_per_call(operation: Operation, calls: int) -> float:
    """Return CPU time of this thread, mean over one burst; a burst is short enough for the buffer to hold it.

    Not wall time: on a machine with other work to do that would measure the other work.
    """
    start = time.thread_time_ns()
    for _ in range(calls):
        operation()
    return (time.thread_time_ns() - start) / calls


def plain(operation: Operation, calls: int) -> float:
    """Measure without any tool."""
    return nanoseconds_per_call(operation, calls)


def captured(engine: str, operation: Operation, calls: int, *, by_device: bool = False) -> float:
    """Measure with commtrace recording to files; make sure that the engine recorded, and how it timed the calls."""
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(commtrace.Config(dir=directory, engine=engine, modules="depth=1"))
        operation()
        result = nanoseconds_per_call(operation, calls)
        commtrace.stop()
        check_engine(directory, engine)
        timings = [row["timing"] for row in recorded_rows(directory) if row["kind"] in ("collective", "p2p")]
    # With a device the first call is the host's, which opens it.
    assert timings.count("host") == min(len(timings), 1) if by_device else set(timings) <= {"host"}, timings
    return result


def profiled(operation: Operation, calls: int) -> float:
    """Measure with torch.profiler's CPU activities on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        return nanoseconds_per_call(operation, calls)


def print_table(operations: Mapping[str, Operation], variants: Mapping[str, Variant], rounds: int, calls: int) -> None:
    """Print a row for each operation, a column for each variant; ``plain`` is what the others are compared with."""
    print(f"µs of CPU time per call, median of {rounds} rounds of {calls}; added cost in brackets\n")
    print(f"{'operation':28}" + "".join(f"{name:>22}" for name in variants))
    for name, operation in operations.items():
        modules = MODULES if name.startswith("module") else 1
        measured = {
            variant: [taken / 1000 / modules for taken in values]
            for variant, values in in_turns(operation, variants, rounds, max(calls // modules, 1)).items()
        }
        cells = []
        for variant, values in measured.items():
            differences = [value - plain for value, plain in zip(values, measured["plain"], strict=True)]
            added = "" if variant == "plain" else f" ({statistics.median(differences):+.2f})"
            cells.append(f"{statistics.median(values):.2f}{added}")
        print(f"{name:28}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    print()


def in_turns(operation: Operation, variants: Mapping[str, Variant], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return what each variant took in each round, ns per call. Each of them goes first as often as the others."""
    measured: dict[str, list[float]] = {variant: [] for variant in variants}
    names = list(variants)
    for turn in range(rounds):
        first = turn % len(names)
        for variant in names[first:] + names[:first]:
            measured[variant].append(variants[variant](operation, calls))
    return measured


def print_on_simulated_driver(rounds: int, calls: int) -> None:
    """Print the table of calls with marks on the simulated driver of the tests.

    Of the native engine alone: the Python engine takes its marks through torch.cuda, of which there is none.
    """
    if why_not_native() or simulated_driver.compiler() is None:
        print("Not run on the simulated driver: it takes the native engine and a C compiler.\n")
        return
    print("The native engine with marks on the simulated driver:")
    recorded = partial(captured, NATIVE, by_device=True)
    with simulated_device():
        print_table(communication(OnDevice), {"plain": plain, "commtrace, native": recorded}, rounds, calls)


class OnDevice(torch.Tensor):
    """A tensor of the host that says that it is on device 0."""

    is_cuda = True
    get_device = staticmethod(itertools.repeat(0).__next__)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@contextmanager
def simulated_device() -> Iterator[None]:
    """Have recordings take marks on the simulated driver, in real time, on a stream without work."""
    cuda = SimulatedCuda()
    cuda.driver.use_real_time()
    stream = cuda.current_stream().handle

    def clock(native: Native) -> NativeClock:
        return NativeClock(native.core, cuda, driver=cuda.library_path)

    with (
        # Calls into C, as torch's own are.
        mock.patch.object(cuda, "raw_stream", {0: stream}.get),
        mock.patch.object(cuda, "current_device", itertools.repeat(0).__next__),
        mock.patch.object(instrumentation, "_device_clock", clock),
        mock.patch.object(
            instrumentation, "ProcessGroupCapture", partial(ProcessGroupCapture, tensor_types=(OnDevice,))
        ),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),  # broadcast asks for it
    ):
        yield


if __name__ == "__main__":
    main()
