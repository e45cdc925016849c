"""The clocks that time a device's work: ``mark`` on the training thread, ``resolve`` to ns on the harvester thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeGuard

from commtrace.trace import schema

if TYPE_CHECKING:
    import torch


now_ns: Final = time.monotonic_ns
"""The axis of all spans: CLOCK_MONOTONIC is shared by the processes of a host and no clock step moves it."""

Mark = Any
"""A point on a device's timeline: an int (ns, already known) or an object that the clock can resolve later."""


class DeviceClock(Protocol):
    """Take marks on the training thread, resolve them on the harvester thread."""

    timing: int
    """The timing of spans between two marks: a code of ``schema.TIMINGS``."""

    def mark(self) -> Mark:
        """Return a mark at the current position of the current stream. Never waits."""

    def resolve(self, mark: Mark) -> int | None:
        """Return the time of a mark in ns, or None while the device has not reached it. Never waits."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is recording a graph, in which marks must not be taken."""

    def refresh(self) -> None:
        """Take a new anchor between device time and host time: the harvester, before each pass."""


class DeviceTiming(DeviceClock, Protocol):
    """A clock of an accelerator: :class:`CudaClock`, or :class:`commtrace.capture.native.NativeClock`."""

    @property
    def is_off(self) -> bool:
        """Return whether marks are the host's time for good: the device or its driver has failed."""

    def mark(self, device: int | None = None, /) -> Mark:
        """Return a mark on the current stream of ``device``, or of the current one."""

    def host_ns(self) -> int:
        """Return the host's time, ns."""

    def switch_off(self) -> None:
        """Let marks be the host's time from now on; unresolved ones stay so."""

    def synchronized(self) -> None:
        """Note that the host has waited for the device."""

    def current_stream(self) -> torch.cuda.Stream: ...

    def stream_number(self, stream: torch.cuda.Stream, /) -> int:
        """Return a stream's number in marks."""

    @property
    def event_type(self) -> type:
        """Return the job's class of events."""

    @property
    def used_device(self) -> int | None:
        """Return the device that was marked first; None before one has been."""


class HostClock:
    """The clock of CPU work: a mark is the host's time in ns."""

    timing = schema.HOST_TIMING
    mark = staticmethod(now_ns)

    def resolve(self, mark: Mark) -> int | None:
        return int(mark)

    def is_capturing(self) -> bool:
        return False

    def refresh(self) -> None:
        return None


ANCHOR_TRIES: Final = 3
ANCHOR_POLLS: Final = 1_000
"""Queries after which an anchor is given up: the stream is shared with something that keeps the device busy."""

DRIFT_PPM: Final = 100
"""Largest drift between device and host clock: a new anchor is taken if it is no worse than the old one has become."""

NANOSECONDS_PER_MILLISECOND: Final = 1_000_000


LONGEST_RECORD_NS: Final = 10_000
"""A host that takes longer to record an event was kept from going on: when it did so is not known."""

WIDEST_BRACKET_NS: Final = 100_000
"""Of an anchor by which leads are told. The native part has the same limits."""


class CudaMark:
    """A place on a stream (``stream``: its number, unique on its device); ``time_ns`` once it has been resolved.

    The host took it at ``taken_at``, ns, behind its record call, which began at ``taken_from``; the device passes it
    later. Where the host's time is no guide, ``taken_from`` is ``UNKNOWN_LEAD`` or ``SYNCHRONIZED_LEAD`` of the schema.
    """

    __slots__ = ("device", "event", "stream", "taken_at", "taken_from", "time_ns")

    def __init__(self, event: torch.cuda.Event, device: int, stream: int, taken_from: int, taken_at: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.device = device
        self.stream = stream
        self.taken_at = taken_at
        self.taken_from = taken_from
        self.time_ns: int | None = None

    @property
    def lead_us(self) -> int:
        """Return how far the host was ahead of the device, once the mark has been resolved (``start_lead_us``)."""
        if self.taken_from < 0:
            return self.taken_from
        if self.time_ns is None:
            return schema.UNKNOWN_LEAD
        lead_us = int((self.time_ns - self.taken_from) / 1000)  # towards 0, as in C
        return min(max(lead_us, schema.LEAST_LEAD_US), schema.MOST_LEAD_US)


def is_on_device(mark: Mark) -> TypeGuard[CudaMark]:
    """Return whether a mark is on a stream, and no time of the host: a CudaMark, or one of the native part."""
    return mark is not None and not isinstance(mark, int)


class Anchor(NamedTuple):
    """An event and the host time at which the device passed it, wrong by at most half the bracket."""

    event: torch.cuda.Event
    host_ns: int
    bracket_ns: int


class Driver(Protocol):
    """A :class:`CudaDriver`, or a simulated one."""

    def has_context(self, device: int) -> bool: ...

    def spare_captures(self) -> None: ...


class CudaClock:
    """A DeviceClock of CUDA (and HIP) events. Making one touches no device: the job may fork or choose one later."""

    timing = schema.CUDA_EVENT_TIMING

    def __init__(
        self, cuda: ModuleType | None = None, driver: Driver | None = None, host_ns: Callable[[], int] = now_ns
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda = cuda
        self._driver = driver or CudaDriver()
        self.host_ns = host_ns
        self._pools: dict[int, deque[torch.cuda.Event]] = {}
        self._anchors: dict[int, Anchor] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._thread = threading.local()
        # torch's own method: its replacement (device_calls) is for the events of the job.
        self._record: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = cuda.Event.record
        self.is_off = False
        self._marked_since_synchronized: set[tuple[int, int]] | None = None  # devices and streams; None before any

    def mark(self, device: int | None = None) -> Mark:
        """Record an event on the current stream of ``device``, or of the current one. Never waits.

        On an H100 with slow cores it takes 8 µs, half of it in torch.cuda.current_stream (bench/RESULTS.md).
        """
        cuda = self._cuda
        if self.is_off or not cuda.is_initialized():
            return self.host_ns()
        current = cuda.current_device()
        if device is None:
            device = current
        pool = self._pools.get(device)
        if pool is None:
            device_in_use = self._device_in_use(device)
            if device_in_use is None:
                return self.host_ns()
            device = device_in_use
            pool = self._pools.setdefault(device, deque())
        if cuda.is_current_stream_capturing():
            return self.host_ns()
        try:
            event = pool.pop()
        except IndexError:
            event = cuda.Event(enable_timing=True)
        stream = cuda.current_stream(device)
        taken_from = self.host_ns()
        self._record(event, stream)
        taken_at = self.host_ns()
        if taken_at - taken_from > LONGEST_RECORD_NS:
            taken_from = schema.UNKNOWN_LEAD
        marked = self._marked_since_synchronized
        if marked is not None and (device, stream.stream_id) not in marked:
            marked.add((device, stream.stream_id))
            taken_from = schema.SYNCHRONIZED_LEAD
        return CudaMark(event, device, stream.stream_id, taken_from, taken_at)

    def synchronized(self) -> None:
        """Note that the host has waited for the device: the next mark of each stream is passed at once by necessity."""
        self._marked_since_synchronized = set()

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured into a graph, to which an event would belong."""
        return bool(self._cuda.is_initialized() and self._cuda.is_current_stream_capturing())

    def resolve(self, mark: Mark) -> int | None:
        """Return a mark's host time in ns; None while the device has not passed it. Harvester only; never waits.

        Raises:
            RuntimeError: the clock is off, or the device has failed.
        """
        if isinstance(mark, int):
            return mark
        known: int | None = mark.time_ns
        if known is not None:
            return known
        if self.is_off:
            raise RuntimeError("the device's clock is switched off")
        anchor = self._anchors.get(mark.device)
        # cudaEventQuery and cudaEventElapsedTime block when the driver is stuck: only the harvester calls them.
        if anchor is None or not mark.event.query():
            return None
        # elapsed_time is float32 milliseconds: 60 ns fine at 1 s, 0.25 ms after an hour. So anchors are renewed.
        elapsed_ns = round(anchor.event.elapsed_time(mark.event) * NANOSECONDS_PER_MILLISECOND)
        time_ns: int = anchor.host_ns + elapsed_ns
        self._pools[mark.device].append(mark.event)
        if anchor.bracket_ns > WIDEST_BRACKET_NS and mark.taken_from > 0:
            mark.taken_from = schema.UNKNOWN_LEAD
        mark.time_ns, mark.event = time_ns, None
        return time_ns

    def refresh(self) -> None:
        """Take a new anchor on every marked device. Harvester only.

        Raises:
            OSError: the driver cannot be asked without endangering the job's graph captures.
            RuntimeError: the device has failed.
        """
        for device in list(self._pools):
            anchor = self._take_anchor(device)
            if anchor is not None and self._is_better(anchor, self._anchors.get(device)):
                self._anchors[device] = anchor

    def switch_off(self) -> None:
        """Let marks be the host's time from now on; unresolved ones stay so."""
        self.is_off = True

    def current_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self._cuda.current_stream()
        return stream

    def stream_number(self, stream: torch.cuda.Stream) -> int:
        """Return a stream's number in marks: torch's, unique on its device."""
        return stream.stream_id

    @property
    def event_type(self) -> type:
        event_type: type = self._cuda.Event
        return event_type

    @property
    def used_device(self) -> int | None:
        """Return the device that was marked first; None before one has been."""
        return next(iter(self._pools), None)

    def _device_in_use(self, device: int) -> int | None:
        if self._driver.has_context(device):
            return device
        # The job never set its device, and uses another one.
        return next(iter(self._pools)) if len(self._pools) == 1 else None

    def _take_anchor(self, device: int) -> Anchor | None:
        with self._cuda.device(device):
            # On a stream on which nothing else runs it passes at once, and orders nothing on the streams of the job.
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = self._cuda.Stream()
            self._spare_captures(stream)
            readings = [self._read_anchor(stream) for _ in range(ANCHOR_TRIES)]
        usable = [reading for reading in readings if reading is not None]
        if not usable:
            # torch hands out the same 32 streams over and over: this one is shared. Try the next one.
            del self._streams[device]
        return min(usable, key=lambda anchor: anchor.bracket_ns, default=None)

    def _read_anchor(self, stream: torch.cuda.Stream) -> Anchor | None:
        event = self._cuda.Event(enable_timing=True)
        before = self.host_ns()
        self._record(event, stream)
        for _ in range(ANCHOR_POLLS):
            if event.query():
                after = self.host_ns()
                return Anchor(event, (before + after) // 2, after - before)
        return None

    def _is_better(self, new: Anchor, old: Anchor | None) -> bool:
        # A thread that did not get the GIL between its readings makes a wide bracket: the old anchor stays then.
        return (
            old is None or new.bracket_ns <= old.bracket_ns + 2 * DRIFT_PPM * (new.host_ns - old.host_ns) // 1_000_000
        )

    def _spare_captures(self, stream: torch.cuda.Stream) -> None:
        if not getattr(self._thread, "spares_captures", False):
            # The first call of CUDA's runtime makes a context current in this thread, and torch calls it not even to
            # choose device 0, which is every thread's from the start. Recording is allowed while others capture.
            self._record(self._cuda.Event(enable_timing=True), stream)
            self._driver.spare_captures()
            self._thread.spares_captures = True


_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_EXCHANGE_CAPTURE_MODE: Final = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


class CudaDriver:
    """Functions of the CUDA driver that ``torch.cuda`` lacks; none creates a context."""

    def has_context(self, device: int) -> bool:
        """Return whether this process uses the device."""
        # A mark on a device that the job does not use would create a context there: some hundred MB on GPU 0 for each
        # rank of a node whose ranks never call torch.cuda.set_device.
        import torch

        has_primary_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return has_primary_context(device)

    def spare_captures(self) -> None:
        """Let the calling thread query events while another thread captures a graph. A context must be current.

        Raises:
            OSError: the driver has no such function, or refuses.
        """
        # By default such a query fails, and the capture with it. The watchdog of ProcessGroupNCCL does the same:
        # https://github.com/pytorch/pytorch/pull/148594
        exchange = _exchange_capture_mode()
        status = exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        if status != 0:
            raise OSError(f"{exchange.__name__} failed with status {status}")


def _exchange_capture_mode() -> Any:
    for library, name in _EXCHANGE_CAPTURE_MODE:
        try:
            return getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
    raise OSError(f"none of {', '.join(library for library, _ in _EXCHANGE_CAPTURE_MODE)} can be loaded")
