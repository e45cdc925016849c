"""Kernels in a torch.profiler trace, and how far commtrace's spans are from those of NCCL."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
_COLUMNS: Final = ("name", "stream", "correlation", "start_ns", "duration_ns", "is_nccl")
_LETTERS_OF_A_NAME: Final = 60


class Interval(NamedTuple):
    """When something ran on the device, ns."""

    name: str
    start: int
    end: int


class Kernel(NamedTuple):
    """A kernel of a trace; times in ns. Launches are in the order of their correlation."""

    name: str
    stream: int
    correlation: int
    start: int
    end: int
    is_nccl: bool


class Errors(NamedTuple):
    """Of spans of one rank, ns, after the constant difference between the two clocks has been taken away.

    Attributes:
        start, end: span minus kernel.
    """

    start: Any
    end: Any

    def p95(self) -> tuple[float, float]:
        """95 % of starts, and of ends, are off by no more than this."""
        return float(np.percentile(np.abs(self.start), 95)), float(np.percentile(np.abs(self.end), 95))


def all_kernels(trace: Path) -> list[Kernel]:
    """Return the kernels of a trace, in the order in which they were launched."""
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [
        Kernel(
            event["name"],
            int(event["args"].get("stream", 0)),
            int(event["args"]["correlation"]),
            round(event["ts"] * 1000),
            round((event["ts"] + event["dur"]) * 1000),
            "nccl" in event["name"].lower(),
        )
        for event in events
        if event.get("cat") == "kernel"
    ]
    return sorted(kernels, key=lambda kernel: kernel.correlation)


def nccl_kernels(trace: Path) -> list[Interval]:
    """Return the kernels of NCCL, in the order in which they were launched."""
    return nccl_of(all_kernels(trace))


def nccl_of(kernels: Iterable[Kernel]) -> list[Interval]:
    return [Interval(kernel.name, kernel.start, kernel.end) for kernel in kernels if kernel.is_nccl]


def without_replays(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels that were launched one by one: those of a replayed graph have one correlation in common."""
    launched = list(kernels)
    num_kernels = Counter(kernel.correlation for kernel in launched)
    return [kernel for kernel in launched if num_kernels[kernel.correlation] == 1]


def write_kernels(kernels: Iterable[Kernel], path: Path) -> None:
    """Write a compressed table of kernels: a hundredth of the trace."""
    with gzip.open(path, "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for kernel in kernels:
            table.writerow([
                kernel.name[:_LETTERS_OF_A_NAME], kernel.stream, kernel.correlation, kernel.start,
                kernel.end - kernel.start, int(kernel.is_nccl),
            ])  # fmt: skip


def read_kernels(path: Path) -> list[Kernel]:
    """Return what :func:`write_kernels` has written."""
    with gzip.open(path, "rt", newline="") as file:
        kernels = [
            Kernel(
                row["name"],
                int(row["stream"]),
                int(row["correlation"]),
                int(row["start_ns"]),
                int(row["start_ns"]) + int(row["duration_ns"]),
                row["is_nccl"] == "1",
            )
            for row in csv.DictReader(file)
        ]
    return sorted(kernels, key=lambda kernel: kernel.correlation)


def synchronisations(trace: Path) -> int:
    """How often the process waited for the device."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("name") in SYNCHRONISING for event in events)


def recorded_operations(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that are one kernel each, in the order of their launches: those of a bracket share one."""
    launched = sorted(rows, key=lambda row: int(row["id"]))
    return [row for row in launched if row["op_in_seq"] == 0]


def compared(
    kernels: Sequence[Interval],
    operations: Sequence[dict[str, Any]],
    timing: str = "cuda_event",
    *,
    barriers: bool = False,
) -> Errors:
    """How far spans of a timing are from the kernels of their launches.

    The clocks are told apart by the ends of the operations that are timed by events. Barriers are compared apart, exact
    or not: NCCL makes the host wait for their kernel, so the event behind them is recorded only once the host goes on.
    """
    pairs, offset = _paired(kernels, operations)
    timings = ("cuda_event", "unknown") if barriers else (timing,)
    chosen = [
        (kernel, row) for kernel, row in pairs if row["timing"] in timings and (row["name"] == "barrier") == barriers
    ]
    starts = np.array([row["start"] - kernel.start for kernel, row in chosen], np.float64)
    own_ends = np.array([row["end"] - kernel.end for kernel, row in chosen], np.float64)
    return Errors(starts - offset, own_ends - offset)


class Distances(NamedTuple):
    """How far spans of one rank are from their kernels, ns: span minus kernel, by what their rows say of themselves."""

    exact_starts: Any
    lower_bounds: Any
    exact_ends: Any
    upper_bounds: Any

    def misses(self, tolerance_ns: float) -> list[str]:
        """Return what does not hold: of exact times 95 % must be within the tolerance, and bounds on their side."""
        misses = []
        for name, errors in (("starts", self.exact_starts), ("ends", self.exact_ends)):
            if len(errors) and (p95 := float(np.percentile(np.abs(errors), 95))) > tolerance_ns:
                misses.append(f"95 % of the exact {name} are within {p95 / 1000:.1f} µs only")
        for name, beyond in (("starts", self.lower_bounds), ("ends", -self.upper_bounds)):
            if len(beyond) and (most := float(beyond.max())) > tolerance_ns:
                misses.append(f"a bound of {name} lies on the wrong side of its kernel by {most / 1000:.1f} µs")
        return misses


def is_no_barrier(row: Mapping[str, Any]) -> bool:
    """Return whether a row is judged: NCCL makes the host wait for a barrier's kernel, so its end is the host's."""
    return row["name"] != "barrier"


def distances(
    kernels: Sequence[Interval],
    operations: Sequence[dict[str, Any]],
    judges: Callable[[Mapping[str, Any]], bool] = is_no_barrier,
) -> Distances:
    """Return how far spans are from the kernels of their launches, exact times and bounds apart.

    Args:
        judges: says which rows are judged; all of them tell the clocks apart.
    """
    pairs, offset = _paired(kernels, operations)
    judged = [(kernel, row) for kernel, row in pairs if judges(row)]

    def errors(side: str, *, exact: bool) -> Any:
        values = [row[side] - getattr(kernel, side) - offset for kernel, row in judged if is_exact(row, side) == exact]
        return np.array(values, np.float64)

    return Distances(
        errors("start", exact=True), errors("start", exact=False), errors("end", exact=True), errors("end", exact=False)
    )


def is_exact(row: dict[str, Any], side: str) -> bool:
    """Return what a row says of its start or end. Recordings from before there were columns for it have the timing."""
    exact = row.get(f"{side}_exact")
    return bool(exact) if exact is not None else side == "start" or row["timing"] != "unknown"


def _paired(
    kernels: Sequence[Interval], operations: Sequence[dict[str, Any]]
) -> tuple[list[tuple[Interval, dict[str, Any]]], float]:
    """Return each kernel with its operation, and the constant difference of the clocks, from ends timed by events."""
    assert len(kernels) == len(operations), (len(kernels), len(operations))
    pairs = list(zip(kernels, operations, strict=True))
    ends = [row["end"] - kernel.end for kernel, row in pairs if row["timing"] == "cuda_event" and is_exact(row, "end")]
    assert ends, "no operation was timed by the device"
    return pairs, float(np.median(ends))


def exposed_ns(kernels: Sequence[Kernel], chosen: Iterable[Interval]) -> int:
    """Return for how long the chosen kernels ran while no kernel computed."""
    computing = np.array(sorted((kernel.start, kernel.end) for kernel in kernels if not kernel.is_nccl), np.int64)
    total = 0
    for interval in chosen:
        covered, reached = 0, interval.start
        for start, end in computing:
            if start >= interval.end:
                break
            start, end = max(start, reached), min(end, interval.end)
            if end > start:
                covered, reached = covered + int(end - start), int(end)
        total += interval.end - interval.start - covered
    return total
