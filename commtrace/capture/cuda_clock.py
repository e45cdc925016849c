"""Device time from CUDA events, without ever waiting for the device.

A mark records a pooled event on the current stream. The harvester later asks the event, by query, whether the device
has passed it, and reads its time relative to an *anchor*: an event whose host time is known within a bracket.
``Event.elapsed_time`` returns float32 milliseconds, 60 ns fine at 1 s and 0.25 ms after an hour, so a new anchor is
taken before every harvest. Anchors are recorded on a stream of their own that is always idle: they pass at once and
order nothing on the streams of the job.

``cudaEventQuery`` and ``cudaEventElapsedTime`` can block when the driver is stuck: only the harvester calls them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from commtrace.capture.clock import now_ns
from commtrace.trace import schema

ANCHOR_TRIES: Final = 3
ANCHOR_POLLS: Final = 1_000
"""Queries after which an anchor is given up: the device is busy with something that blocks even an idle stream."""

NANOSECONDS_PER_MILLISECOND: Final = 1_000_000


class CudaMark:
    """A place on a device's timeline; ``time_ns`` once it has been resolved."""

    __slots__ = ("device", "event", "time_ns")

    def __init__(self, event: Any, device: int) -> None:
        self.event = event
        self.device = device
        self.time_ns: int | None = None


class Anchor(NamedTuple):
    """An event and the host time at which the device passed it, wrong by at most half the bracket."""

    event: Any
    host_ns: int
    bracket_ns: int


class CudaClock:
    """A :class:`~commtrace.capture.clock.DeviceClock` of CUDA (and HIP) events.

    Args:
        cuda: the module that provides events and streams: ``torch.cuda``; tests pass a simulated one.
    """

    timing = schema.CUDA_EVENT_TIMING

    def __init__(self, cuda: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda = cuda
        self._pools: dict[int, deque[Any]] = {}
        self._anchors: dict[int, Anchor] = {}
        self._streams: dict[int, Any] = {}

    def mark(self) -> CudaMark:
        """Record an event on the current stream of the current device. ~1 µs; never waits."""
        device = self._cuda.current_device()
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools.setdefault(device, deque())
        try:
            event = pool.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return CudaMark(event, device)

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph: an event recorded there would belong to the graph."""
        return bool(self._cuda.is_current_stream_capturing())

    def resolve(self, mark: CudaMark | int) -> int | None:
        """Host time of a mark in ns, or None while the device has not passed it. Harvester only; never waits."""
        if isinstance(mark, int):
            return mark
        if mark.time_ns is not None:
            return mark.time_ns
        anchor = self._anchors.get(mark.device)
        if anchor is None or not mark.event.query():
            return None
        elapsed_ns = round(anchor.event.elapsed_time(mark.event) * NANOSECONDS_PER_MILLISECOND)
        mark.time_ns = anchor.host_ns + elapsed_ns
        self._pools[mark.device].append(mark.event)
        mark.event = None
        return mark.time_ns

    def refresh(self) -> None:
        """Take a new anchor on every device that has been marked. Harvester only."""
        for device in list(self._pools):
            anchor = self._take_anchor(device)
            if anchor is not None:
                self._anchors[device] = anchor

    def anchor_error_ns(self, device: int) -> int | None:
        """Half the bracket of the newest anchor: the error of the device's axis against the host's."""
        anchor = self._anchors.get(device)
        return None if anchor is None else anchor.bracket_ns // 2

    def _take_anchor(self, device: int) -> Anchor | None:
        """The narrowest of a few readings."""
        with self._cuda.device(device):
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams.setdefault(device, self._cuda.Stream())
            readings = [self._read_anchor(stream) for _ in range(ANCHOR_TRIES)]
        usable = [reading for reading in readings if reading is not None]
        return min(usable, key=lambda anchor: anchor.bracket_ns, default=None)

    def _read_anchor(self, stream: Any) -> Anchor | None:
        event = self._cuda.Event(enable_timing=True)
        before = now_ns()
        event.record(stream)
        for _ in range(ANCHOR_POLLS):
            if event.query():
                after = now_ns()
                return Anchor(event, (before + after) // 2, after - before)
        return None
