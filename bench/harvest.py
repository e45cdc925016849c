"""What commtrace's own thread needs to resolve and write spans, and how much of that holds the GIL at most.

    python bench/overhead.py --only harvest

Spans are recorded in bursts that the buffer holds, and harvested while nothing else runs. All figures are CPU time, so
that they hold on a loaded machine. The extension gathers and copies columns without the GIL, pyarrow's ``write_batch``
lets go of it in part: both are told apart. The rest of the Python threads' time holds it.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
from engines import check_engine, details, recorded_rows
from thread_time import native_threads_ns, python_threads_ns

import commtrace
from commtrace import _native

SPANS_PER_BURST = 50_000
_TICK_SECONDS = 0.6
"""Longer than between two passes of the harvester."""


class Harvest(NamedTuple):
    """What the threads of commtrace needed, ns of CPU time.

    Attributes:
        spans: rows of communication and stalls that were written.
        python_ns: of its Python threads, without what follows.
        taking_ns: of these, in the extension's ``take``, without the GIL.
        writing_ns: of these, in pyarrow's ``write_batch``, which lets go of the GIL in part.
        native_ns: of its threads that have no Python, and never hold it.
    """

    spans: int
    python_ns: int
    taking_ns: int
    writing_ns: int
    native_ns: int


def print_harvest(engine: str, operation: Callable[[], object], spans: int) -> None:
    """Print what a million spans of this operation take."""
    harvest = harvested(engine, operation, spans)
    # ns per span are s per thousand million
    python, taking, writing, native = (taken / harvest.spans / 1_000 for taken in harvest[1:])
    print(
        f"Harvest, {engine}: {harvest.spans} spans were resolved and written. For a million, CPU time of commtrace's "
        f"Python threads: {python:.3f} s of Python, {writing:.3f} s in pyarrow's write_batch, {taking:.3f} s in the "
        f"extension without the GIL; so {python:.3f} to {python + writing:.3f} s with the GIL. Of its native threads, "
        f"which never hold it: {native:.3f} s."
    )


def harvested(engine: str, operation: Callable[[], object], spans: int) -> Harvest:
    """Record at least so many spans, and return what it took to write them."""
    with tempfile.TemporaryDirectory() as directory, _timed() as timed:
        commtrace.start(commtrace.Config(dir=directory, engine=engine))
        operation()
        _wait_for_harvester()
        before, timed_before, native_before = python_threads_ns(), Counter(timed), native_threads_ns()
        idle_ns = _python_ns_of_an_idle_tick()
        bursts = max(spans // SPANS_PER_BURST, 1)
        ticks = 0
        for _ in range(bursts):
            for _ in range(SPANS_PER_BURST // 2):  # a call and its stall
                operation()
            ticks += _wait_for_harvester()
        native_ns = native_threads_ns() - native_before
        taking_ns, writing_ns = (timed[what] - timed_before[what] for what in ("take", "write_batch"))
        python_ns = python_threads_ns() - before - idle_ns * (ticks + 1) - taking_ns - writing_ns
        commtrace.stop()
        check_engine(directory, engine)
        rows = recorded_rows(Path(directory))
    assert not details(rows, "dropped"), "spans were dropped"
    written = sum(row["kind"] in ("collective", "p2p", "stall") for row in rows)
    return Harvest(written, python_ns, taking_ns, writing_ns, native_ns)


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
def _timed() -> Iterator[Counter[str]]:
    """Add up the CPU time that threads spend in ``write_batch`` of pyarrow and ``take`` of the extension."""
    taken: Counter[str] = Counter()
    new_stream = pa.ipc.new_stream
    core, _ = _native.load()

    def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begin = time.thread_time_ns()
        try:
            return function(*arguments, **options)
        finally:
            taken[function.__name__] += time.thread_time_ns() - begin

    class TimedStream:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._stream = new_stream(*arguments, **options)
            self.write_batch = partial(timed, self._stream.write_batch)

        def __enter__(self) -> TimedStream:
            self._stream.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._stream.__exit__(*exception)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(pa.ipc, "new_stream", TimedStream))
        if core is not None:
            patches.enter_context(mock.patch.object(core, "take", partial(timed, core.take)))
        yield taken
