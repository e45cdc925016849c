"""What commtrace's own thread needs to resolve and write spans, and how much of that holds the GIL.

    python bench/overhead.py --only harvest

Spans are recorded in bursts that the buffer holds, in steps of a thousand spans, and harvested while nothing else runs;
the segments are rewritten in dense form as in any run. All figures are CPU time, so that they hold on a loaded machine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import commtrace
from bench.engines import check_engine, details, recorded_rows
from bench.gil_time import GilTime, gil_time_of
from bench.thread_time import native_threads_ns, python_threads_ns
from commtrace.config import OtlpConfig

SPANS_PER_BURST = 50_000
SPANS_PER_STEP = 1_000
_TICK_SECONDS = 0.6
"""Longer than between two passes of the harvester."""

OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "default configuration": {},
    "one step in ten in detail": {"sample": 10},
    "Prometheus": {"export": "prometheus"},
    "OpenTelemetry of one step in ten": {
        "export": "otlp", "otlp": OtlpConfig(sample=10, level="communication"),
    },
}  # fmt: skip
"""Configurations that are measured, by what they are called."""


class Harvest(NamedTuple):
    """What the threads of commtrace needed, ns of CPU time.

    Attributes:
        spans: rows of communication and stalls that were written.
        python_ns: of its Python threads.
        held_ns: of the harvester while it held the GIL; None where that cannot be measured.
        native_ns: of its threads that have no Python, and never hold it.
    """

    spans: int
    python_ns: int
    held_ns: int | None
    native_ns: int


def print_harvest(engine: str, operation: Callable[[], object], spans: int) -> None:
    """Print what a million spans of this operation take, by configuration."""
    for what, options in OPTIONS.items():
        harvest = harvested(engine, operation, spans, **options)
        per_million = 1_000_000 / spans / 1e9
        held = "not measured here (bench/gil_time.py)"
        if harvest.held_ns is not None:
            held = f"{harvest.held_ns * per_million:.3f} s"
        print(
            f"Harvest, {engine}, {what}: {spans} spans were resolved, {harvest.spans} written. For a million, CPU time "
            f"of commtrace's Python threads: {harvest.python_ns * per_million:.3f} s; of the harvester with the GIL: "
            f"{held}. Of its native threads, which never hold it: {harvest.native_ns * per_million:.3f} s.",
            flush=True,
        )


def harvested(engine: str, operation: Callable[[], object], spans: int, **options: Any) -> Harvest:
    """Record so many spans, two by each operation, and return what it took to write them."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        if "otlp" in options:
            options["otlp"] = replace(options["otlp"], file=f"{directory}/spans.jsonl")
        commtrace.start(commtrace.Config(dir=directory, engine=engine, **options))
        with commtrace.step(0):
            operation()
        _wait_for_harvester()
        (harvester,) = (thread for thread in threading.enumerate() if thread.name == "commtrace-harvester")
        assert harvester.native_id is not None
        with gil_time_of(harvester.native_id) as idle:
            idle_ns = _python_ns_of_an_idle_tick()
        before, native_before = python_threads_ns(), native_threads_ns()
        measured = stack.enter_context(gil_time_of(harvester.native_id))
        ticks, step = 0, 0
        for _ in range(max(spans // SPANS_PER_BURST, 1)):
            for _ in range(SPANS_PER_BURST // SPANS_PER_STEP):
                step += 1
                with commtrace.step(step):
                    for _ in range(SPANS_PER_STEP // 2):  # a call and its stall
                        operation()
            ticks += _wait_for_harvester()
        native_ns = native_threads_ns() - native_before
        python_ns = python_threads_ns() - before - idle_ns * ticks
        stack.pop_all().close()
        commtrace.stop()
        check_engine(directory, engine)
        rows = recorded_rows(Path(directory))
    assert not details(rows, "dropped"), "spans were dropped"
    written = sum(row["kind"] in ("collective", "p2p", "stall") for row in rows)
    return Harvest(written, python_ns, _held(measured, idle, ticks), native_ns)


def _held(measured: GilTime | None, idle: GilTime | None, ticks: int) -> int | None:
    return None if measured is None or idle is None else measured.held_ns - idle.held_ns * ticks


def _wait_for_harvester() -> int:
    """Wait until a pass finds nothing to do; return how many ticks that took."""
    ticks, last = 0, -1
    while True:
        before = python_threads_ns()
        time.sleep(_TICK_SECONDS)
        ticks += 1
        taken = python_threads_ns() - before
        if last >= 0 and taken < 20_000_000:
            return ticks
        last = taken


def _python_ns_of_an_idle_tick() -> int:
    before = python_threads_ns()
    time.sleep(_TICK_SECONDS)
    return python_threads_ns() - before
