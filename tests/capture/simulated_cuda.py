"""A simulated GPU: streams, events and graph capture with exact times, moved on by hand.

It fails where a real one would wait or break something: on ``synchronize``, on the creation of a context that the job
did not ask for, on events recorded into a graph, and on queries by other threads while a graph is captured.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

MILLISECOND = 1_000_000
MICROSECOND = 1_000


class ForbiddenError(AssertionError):
    """Something that capture must never do."""


class SimulatedStream:
    """Work on it runs in order."""

    def __init__(self, cuda: SimulatedCuda, device: int, stream_id: int | None = None) -> None:
        self.cuda = cuda
        self.device = self.device_index = device
        self.stream_id = next(cuda.stream_ids) if stream_id is None else stream_id
        self.free_at_ns = 0
        self.is_capturing = False

    def run(self, duration_ns: int) -> tuple[int, int]:
        """Queue a kernel; returns when it starts and ends."""
        start = self.position_ns()
        self.free_at_ns = start + duration_ns
        return start, self.free_at_ns

    def wait_until(self, time_ns: int) -> None:
        """Queue a wait for something that happens then on another stream."""
        self.free_at_ns = max(self.position_ns(), time_ns)

    def position_ns(self) -> int:
        """When what is queued next can start."""
        return max(self.free_at_ns, self.cuda.now_ns)

    def record_event(self) -> SimulatedEvent:
        event = self.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        raise ForbiddenError("synchronize")


class SimulatedEvent:
    """Like ``torch.cuda.Event``: each simulated GPU has a class of its own, so that its methods can be replaced."""

    cuda: SimulatedCuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.cuda.events.append(self)
        self.device: int | None = None
        self.time_ns: int | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        cuda = self.cuda
        stream = stream or cuda.current_stream()
        if stream.device not in cuda.contexts:
            raise ForbiddenError(f"creates a context on device {stream.device}")
        if stream.is_capturing:
            raise ForbiddenError("recorded into a graph")
        if self.device not in (None, stream.device):
            raise ForbiddenError("an event stays on the device on which it was recorded first")
        self.device = stream.device
        self.time_ns = stream.position_ns()
        self.cuda.bound_threads.add(threading.get_ident())

    def query(self) -> bool:
        self.cuda.check_query()
        assert self.time_ns is not None
        return self.time_ns <= self.cuda.now_ns

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds, in float32 as from the driver."""
        assert self.time_ns is not None
        assert end.time_ns is not None
        assert self.enable_timing
        assert end.enable_timing
        if self.device != end.device or not (self.query() and end.query()):
            raise RuntimeError("both events must be completed, on one device")
        return float(np.float32((end.time_ns - self.time_ns) / MILLISECOND))

    def synchronize(self) -> None:
        raise ForbiddenError("synchronize")

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Only the job has streams wait."""
        assert self.time_ns is not None
        (stream or self.cuda.current_stream()).wait_until(self.time_ns)


class SimulatedCuda:
    """Stands for the module ``torch.cuda`` and for the driver.

    Attributes:
        now_ns: the host's time; the devices keep up with it.
        reading_ns: how long it takes to read the host's clock.
        contexts: devices that the job uses.
        events: all that have been made.
        bound_threads: in which a context is current, as the runtime's first call in a thread makes it.
    """

    def __init__(self, *contexts: int) -> None:
        self.now_ns = 1_000 * MILLISECOND
        self.reading_ns = 0
        self.contexts = set(contexts or (0,))
        self.initialized = True
        self.events: list[SimulatedEvent] = []
        methods = {name: vars(SimulatedEvent)[name] for name in ("record", "wait")}
        self.Event: type[SimulatedEvent] = type("Event", (SimulatedEvent,), {"cuda": self, **methods})
        self.stream_ids = itertools.count(1)
        self.bound_threads: set[int] = set()
        self.spared_threads: set[int] = set()
        self.can_spare = True
        self._current = threading.local()
        self._defaults: dict[int, SimulatedStream] = {}
        self._capturing_thread: int | None = None

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def host_ns(self) -> int:
        self.now_ns += self.reading_ns
        return self.now_ns

    # torch.cuda

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        return int(getattr(self._current, "device", 0))

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self._current.device = self.current_device(), device
        try:
            yield
        finally:
            self._current.device = before

    def current_stream(self, device: int | None = None) -> SimulatedStream:
        device = self.current_device() if device is None else device
        streams: dict[int, SimulatedStream] = self._current.__dict__.setdefault("streams", {})
        return streams.get(device) or self._defaults.setdefault(device, SimulatedStream(self, device, stream_id=0))

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        streams = self._current.__dict__.setdefault("streams", {})
        before = streams.get(stream.device)
        streams[stream.device] = stream
        try:
            yield
        finally:
            streams[stream.device] = before

    def Stream(self) -> SimulatedStream:  # noqa: N802
        return SimulatedStream(self, self.current_device())

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().is_capturing

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Capture a graph on this thread, in CUDA's default mode."""
        stream = self.current_stream()
        stream.is_capturing, self._capturing_thread = True, threading.get_ident()
        try:
            yield
        finally:
            stream.is_capturing, self._capturing_thread = False, None

    def synchronize(self, device: Any = None) -> None:
        raise ForbiddenError("synchronize")

    # the driver

    def has_context(self, device: int) -> bool:
        return device in self.contexts

    def spare_captures(self) -> None:
        if not self.can_spare:
            raise OSError("libcuda.so.1 cannot be loaded")
        if threading.get_ident() not in self.bound_threads:
            raise OSError("no context is current in this thread")
        self.spared_threads.add(threading.get_ident())

    def check_query(self) -> None:
        thread = threading.get_ident()
        if self._capturing_thread not in (None, thread) and thread not in self.spared_threads:
            raise ForbiddenError("a query that breaks the capture of a graph")
