"""Totals of a rank over its steps, from which samples are made."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from commtrace.live.summary import OperationSummary, StepSummary, trace_id

BUCKETS_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)
"""Upper bounds of the step duration's buckets; with +Inf they are ten.

Half decades, from the steps of a toy model to the longest ones that the rules can rate. They are equal on all ranks,
whatever these train, so that they can be added up; what needs more than half a decade divides the sum by the count.
"""

MOST_OPERATIONS: Final = 27
"""So many pairs of operation and role get series of their own; what comes later is added up as ``other``."""

OTHER: Final = "other"
COUNTS: Final = ("tokens", "samples", "model_flops")


@dataclass(slots=True)
class OperationTotals:
    """One operation for one role. Times are ns."""

    count: int = 0
    num_bytes: int = 0
    duration_ns: int = 0
    exposed_ns: int = 0
    overlap_ratio: float | None = None
    busbw: float | None = None

    def add(self, one: OperationSummary) -> None:
        self.count += one.count
        self.num_bytes += one.num_bytes
        self.duration_ns += one.duration_ns
        self.exposed_ns += one.exposed_ns
        self.overlap_ratio = one.overlap_ratio if one.overlap_ratio is not None else self.overlap_ratio
        self.busbw = one.busbw_bytes_per_second or self.busbw


@dataclass(slots=True)
class Bucket:
    """Steps between two bounds, with the last one as the exemplar."""

    count: int = 0
    example: StepSummary | None = None

    @property
    def trace_id(self) -> str:
        return f"{trace_id(self.example.run_id, self.example.step):032x}" if self.example else ""


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps. The harvester adds and a scrape reads under ``lock``; training never takes it.

    Attributes:
        last: the latest step.
        mfu: of the latest step that has one.
        peak_memory_bytes: None without an accelerator.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    buckets: list[Bucket] = field(default_factory=lambda: [Bucket() for _ in (*BUCKETS_SECONDS, None)])
    duration_ns: int = 0
    compute_ns: dict[str, int] = field(default_factory=dict)
    bubble_ns: int = 0
    data_ns: int = 0
    checkpoint_ns: int = 0
    gc_ns: int = 0
    other_ns: int = 0
    work_ns: int = 0
    operations: dict[tuple[str, str], OperationTotals] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    last: StepSummary | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None

    def add(self, summary: StepSummary) -> None:
        """Add a step."""
        with self.lock:
            seconds = summary.duration_ns / 1e9
            bucket = self.buckets[sum(seconds > bound for bound in BUCKETS_SECONDS)]
            bucket.count += 1
            bucket.example = summary
            self.duration_ns += summary.duration_ns
            for phase, time in summary.compute_ns.items():
                self.compute_ns[phase] = self.compute_ns.get(phase, 0) + time
            self.bubble_ns += summary.bubble_ns
            self.data_ns += summary.data_ns
            self.checkpoint_ns += summary.checkpoint_ns
            self.gc_ns += summary.gc_ns
            self.other_ns += summary.other_ns
            self.work_ns += summary.work_ns
            self._add_operations(summary.operations)
            for name, number in summary.counts.items():
                self.counts[name] = self.counts.get(name, 0.0) + number
            self.last = summary
            self.mfu = summary.mfu if summary.mfu is not None else self.mfu
            if summary.device is not None:
                self.peak_memory_bytes = summary.device.peak_memory_bytes

    def _add_operations(self, operations: Iterable[OperationSummary]) -> None:
        for one in operations:
            key = (one.operation, one.role)
            if key not in self.operations and len(self.operations) >= MOST_OPERATIONS:
                key = (OTHER, OTHER)
            self.operations.setdefault(key, OperationTotals()).add(one)
