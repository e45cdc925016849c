"""NCCL kernels in a torch.profiler trace, and how far commtrace's spans are from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Interval(NamedTuple):
    """When something ran on the device, ns."""

    name: str
    start: int
    end: int


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


def nccl_kernels(trace: Path) -> list[Interval]:
    """In the order in which they were launched."""
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()]
    kernels.sort(key=lambda event: event["args"]["correlation"])
    return [
        Interval(event["name"], round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in kernels
    ]


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
    assert len(kernels) == len(operations), (len(kernels), len(operations))
    pairs = list(zip(kernels, operations, strict=True))
    ends = [row["end"] - kernel.end for kernel, row in pairs if row["timing"] == "cuda_event"]
    assert ends, "no operation was timed by the device"
    offset = np.median(ends)
    timings = ("cuda_event", "unknown") if barriers else (timing,)
    chosen = [
        (kernel, row) for kernel, row in pairs if row["timing"] in timings and (row["name"] == "barrier") == barriers
    ]
    starts = np.array([row["start"] - kernel.start for kernel, row in chosen], np.float64)
    own_ends = np.array([row["end"] - kernel.end for kernel, row in chosen], np.float64)
    return Errors(starts - offset, own_ends - offset)
