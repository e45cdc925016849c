"""What live metrics cost commtrace's own thread, beside writing the trace, in one run.

    python bench/live_metrics.py

CPU time of the calling thread, per step, for steps of several sizes: medians over passes in which both take turns.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from commtrace.live.collector import StepCollector
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace import schema
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.schema import Row, mark_row
from commtrace.trace.spans import RowBatch

PASSES = 15
CALLS_PER_STEP = (3, 30, 300, 3_000)
GROUP = 1
_ROLES = {"id": GROUP, "ranks": [0, 1, 2, 3], "ordinal": 0, "role": "dp"}


class Adding:
    """A listener that only adds up, as the exporter does."""

    def __init__(self) -> None:
        self.totals = StepCounters()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        self.totals.add(summary)

    def close(self) -> None:
        pass

    def abandon_after_fork(self) -> None:
        pass


def row(kind: int, name: str, lane: int, step: int, start: int, end: int, number: int = -1, on: int = -1) -> Row:
    place = (step, -1, -1, -1)
    return Row(
        kind, name, lane, start, end, *place, GROUP, number, 0, 1_000, -1, "bfloat16", -1, True, number, on,
    )  # fmt: skip


def step_rows(step: int, calls: int) -> Sequence[Row]:
    """A forward, an all_reduce and its stall, over and over, and the step around them."""
    begin = step * calls * 1_000
    rows = []
    for call in range(calls):
        at, number = begin + call * 1_000, step * calls + call
        rows.append(row(schema.FORWARD, "forward", schema.COMPUTE, step, at, at + 800))
        rows.append(row(schema.COLLECTIVE, "all_reduce", schema.COMMUNICATION, step, at + 700, at + 1_000, number))
        rows.append(row(schema.STALL, "all_reduce", schema.COMPUTE, step, at + 900, at + 1_000, on=number))
    return [*rows, row(schema.STEP, "step", schema.COMPUTE, step, begin, begin + calls * 1_000)]


def cpu_ms(action: Callable[[Sequence[Row]], None], rows: Sequence[Row]) -> float:
    start = time.thread_time_ns()
    action(rows)
    return (time.thread_time_ns() - start) / 1e6


def scrape(registry: CollectorRegistry) -> None:
    generate_latest(registry)  # type: ignore[no-untyped-call]


def metadata() -> RankMetadata:
    return RankMetadata("bench", 0, 1, 0, 0, 4, "host", "host", "", 1, "gloo", "cpu", "")


def measure(calls: int, directory: Path) -> tuple[tuple[float, ...], RankCollector]:
    """CPU ms per step: of writing the trace alone; of summing up the step, and of writing the trace after that."""
    rank, listener = LiveRank(metadata(), directory), Adding()
    collector = StepCollector(rank, [listener])
    writer, second = (SegmentWriter(directory / f"{calls}-{which}", metadata()) for which in ("alone", "beside"))
    collector.write([mark_row("process_group", _ROLES)])
    steps_per_pass = max(1, 300 // calls)
    alone, summed, beside = [], [], []
    for number in range(PASSES):
        steps = range(number * steps_per_pass, (number + 1) * steps_per_pass)
        rows = [one for step in steps for one in step_rows(step, calls)]
        alone.append(cpu_ms(writer.write, RowBatch(rows)) / steps_per_pass)
        batch = RowBatch(rows)  # as the recorder hands it to both, one after the other
        summed.append(cpu_ms(collector.write, batch) / steps_per_pass)
        beside.append(cpu_ms(second.write, batch) / steps_per_pass)
    writer.close()
    second.close()
    # The first pass has no step to close yet.
    return tuple(statistics.median(one[1:]) for one in (alone, summed, beside)), RankCollector(rank, listener.totals)


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("| rows per step | writing the trace alone, ms per step | live metrics | writing beside them |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for calls in CALLS_PER_STEP:
            (alone, summed, beside), samples = measure(calls, Path(directory))
            print(f"| {3 * calls + 1:,} | {alone:.2f} | {summed:.2f} | {beside:.2f} |")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(samples)
    times = [cpu_ms(lambda _rows: scrape(registry), []) for _ in range(101)]
    print(f"One scrape: {statistics.median(times):.2f} ms")


if __name__ == "__main__":
    main()
