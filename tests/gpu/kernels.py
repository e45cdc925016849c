"""NCCL kernels in a torch.profiler trace, and how far commtrace's spans are from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commtrace.trace import schema

SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Interval(NamedTuple):
    """When something ran on the device, ns."""

    name: str
    start: int
    end: int


class Errors(NamedTuple):
    """Of the spans of one rank, ns, after the constant difference between the two clocks has been taken away."""

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


def compared(kernels: Sequence[Interval], operations: Sequence[dict[str, Any]]) -> Errors:
    """How far spans are from the kernels, for the operations whose end commtrace says to know exactly."""
    assert len(kernels) == len(operations), (len(kernels), len(operations))
    pairs = [
        (kernel, row)
        for kernel, row in zip(kernels, operations, strict=True)
        if row["timing"] == schema.CUDA_EVENT_TIMING
    ]
    assert pairs, "no operation was timed by the device"
    starts = np.array([row["start"] - kernel.start for kernel, row in pairs], np.float64)
    ends = np.array([row["end"] - kernel.end for kernel, row in pairs], np.float64)
    offset = np.median(ends)
    return Errors(starts - offset, ends - offset)
