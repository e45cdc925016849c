"""Captures garbage collections as spans: Python's collector stops the thread that launches the work."""

from __future__ import annotations

import gc
from typing import Any, Final

from commtrace.capture.device.clock import HostClock, now_ns
from commtrace.capture.records import Span, span_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of garbage collections"
SHORTEST_NS: Final = 200_000


class GarbageCollections:
    """Listens to ``gc.callbacks``."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._clock = HostClock()
        self._start_ns = 0
        self._listener = self._collected  # one object, so that it can be found again in gc.callbacks

    def install(self) -> None:
        """Start listening. Idempotent."""
        if self._listener not in gc.callbacks:
            gc.callbacks.append(self._listener)

    def uninstall(self) -> None:
        """Stop listening."""
        if self._listener in gc.callbacks:
            gc.callbacks.remove(self._listener)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        try:
            if phase == "start":
                self._start_ns = now_ns()
                return
            end = now_ns()
            if end - self._start_ns < SHORTEST_NS:
                return
            # Outside of steps collections cost no step anything: imports alone cause hundreds of them.
            if self._tracer.recording and self._tracer.coordinates.step >= 0:
                name = f"generation {info['generation']}"
                span = Span(schema.GC, name, schema.HOST, self._tracer.coordinates, self._clock, self._start_ns)
                span.end = end
                self._tracer.append((span_rows, schema.GC, span))
        except Exception as error:
            self._tracer.failed(PART, error)
