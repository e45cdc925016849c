"""What commtrace's own thread needs to resolve and write spans, and how much of that holds the GIL at most.

    python bench/overhead.py --only harvest

Spans are recorded in bursts that the buffer holds, and harvested while nothing else runs. All figures are CPU time, so
that they hold on a loaded machine. pyarrow's ``write_batch`` lets go of the GIL in part, and is told apart; the rest of
the Python threads' time holds it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
from engines import check_engine, config, details, recorded_rows
from thread_time import native_threads_ns, python_threads_ns

import commtrace

SPANS_PER_BURST = 50_000
_TICK_SECONDS = 0.6
"""Longer than between two passes of the harvester."""


class Harvest(NamedTuple):
    """What the threads of commtrace needed, ns of CPU time.

    Attributes:
        spans: rows of communication and stalls that were written.
        python_ns: of its Python threads.
        writing_ns: of that, in pyarrow's ``write_batch``, which lets go of the GIL in part.
        native_ns: of its threads that have no Python, and never hold it.
    """

    spans: int
    python_ns: int
    writing_ns: int
    native_ns: int


def print_harvest(engine: str, operation: Callable[[], object], spans: int) -> None:
    """Print what a million spans of this operation take."""
    harvest = harvested(engine, operation, spans)
    python, writing, native = (  # ns per span are s per thousand million
        taken / harvest.spans / 1_000 for taken in (harvest.python_ns, harvest.writing_ns, harvest.native_ns)
    )
    print(
        f"Harvest, {engine}: {harvest.spans} spans were resolved and written. For a million, CPU time of commtrace's "
        f"Python threads: {python:.3f} s, of it {writing:.3f} s in pyarrow's write_batch; so {python - writing:.3f} to "
        f"{python:.3f} s with the GIL. Of its native threads, which never hold it: {native:.3f} s."
    )


def harvested(engine: str, operation: Callable[[], object], spans: int) -> Harvest:
    """Record at least so many spans, and return what it took to write them."""
    with tempfile.TemporaryDirectory() as directory, _timed_writing() as writing:
        commtrace.start(config(engine, directory))
        operation()
        _wait_for_harvester()
        before, writing_before, native_before = python_threads_ns(), writing[0], native_threads_ns()
        idle_ns = _python_ns_of_an_idle_tick()
        bursts = max(spans // SPANS_PER_BURST, 1)
        ticks = 0
        for _ in range(bursts):
            for _ in range(SPANS_PER_BURST // 2):  # a call and its stall
                operation()
            ticks += _wait_for_harvester()
        python_ns = python_threads_ns() - before - idle_ns * (ticks + 1)
        harvest = (python_ns, writing[0] - writing_before, native_threads_ns() - native_before)
        commtrace.stop()
        check_engine(directory, engine)
        rows = recorded_rows(Path(directory))
    assert not details(rows, "dropped"), "spans were dropped"
    return Harvest(sum(row["kind"] in ("collective", "p2p", "stall") for row in rows), *harvest)


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


@contextmanager
def _timed_writing() -> Iterator[list[int]]:
    """Add up the CPU time that pyarrow takes to write batches."""
    taken = [0]
    new_stream = pa.ipc.new_stream

    class Timed:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def write_batch(self, *arguments: Any, **options: Any) -> None:
            begin = time.thread_time_ns()
            self._stream.write_batch(*arguments, **options)
            taken[0] += time.thread_time_ns() - begin

        def __enter__(self) -> Timed:
            self._stream.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._stream.__exit__(*exception)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    def timed_stream(*arguments: Any, **options: Any) -> Timed:
        return Timed(new_stream(*arguments, **options))

    with mock.patch.object(pa.ipc, "new_stream", timed_stream):
        yield taken
