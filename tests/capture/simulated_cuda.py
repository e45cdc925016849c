"""A simulated GPU as ``torch.cuda`` shows it: streams, events and graph capture with exact times, moved on by hand.

The GPU itself is the simulated driver (tests/native/driver), which stands for libcuda.so.1: what is
recorded here is seen by whoever opens that library, and the other way round. This face fails where a real GPU would
wait or break something: on ``synchronize``, on the creation of a context that the job did not ask for, on events with
timing that are recorded into a graph, and on calls by other threads that break the capture of a graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, MutableSet
from contextlib import contextmanager, suppress
from typing import Any

from tests.native import simulated_driver
from tests.native.simulated_driver import DriverError, SimulatedDriver

MILLISECOND = 1_000_000
MICROSECOND = 1_000


class ForbiddenError(AssertionError):
    """Something that capture must never do."""


@contextmanager
def captures_unbroken() -> Iterator[None]:
    """Forbid what breaks the capture of a graph."""
    try:
        yield
    except DriverError as error:
        if simulated_driver.CAPTURE_UNSUPPORTED <= error.status <= simulated_driver.CAPTURE_WRONG_THREAD:
            raise ForbiddenError(f"breaks the capture of a graph: {error}") from error
        raise


class SimulatedStream:
    """Work on it runs in order.

    Attributes:
        stream_id: torch's number of it; 0 for the default stream of its device.
        handle: the driver's, as torch hands it out: 0 for the default stream of whichever device is current.
    """

    def __init__(self, cuda: SimulatedCuda, device: int, stream_id: int | None = None) -> None:
        self.cuda = cuda
        self.device = self.device_index = device
        self.stream_id = next(cuda.stream_ids) if stream_id is None else stream_id
        self.is_default = self.stream_id == 0
        self._handle = cuda.driver.legacy_stream(device) if self.is_default else cuda.driver.pool_stream(device)

    @property
    def handle(self) -> int:
        return 0 if self.is_default else self._handle

    @property
    def cuda_stream(self) -> int:
        """The handle, by torch's name."""
        return self.handle

    @property
    def is_capturing(self) -> bool:
        return self.cuda.driver.capture_status(self._handle) != simulated_driver.NOT_CAPTURED

    def run(self, duration_ns: int) -> tuple[int, int]:
        """Queue a kernel; returns when it starts and ends."""
        return self.cuda.driver.kernel(self._handle, duration_ns)

    def wait_until(self, time_ns: int) -> None:
        """Queue a wait for something that happens then on another stream."""
        self.cuda.driver.wait_until(self._handle, time_ns)

    def follow(self, stream: SimulatedStream) -> None:
        """Queue a wait for what is on ``stream`` now, without an event of torch's."""
        self.cuda.driver.follow(self._handle, stream._handle)

    def position_ns(self) -> int:
        """When what is queued next can start."""
        return self.cuda.driver.position_ns(self._handle)

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
    """Like ``torch.cuda.Event``: each simulated GPU has a class of its own, so that its methods can be replaced.

    Attributes:
        device: on which it was recorded first.
        handle: the driver's event, made there.
    """

    cuda: SimulatedCuda

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.cuda.events.append(self)
        self.device: int | None = None
        self.handle = 0

    def record(self, stream: SimulatedStream | None = None) -> None:
        cuda = self.cuda
        stream = stream or cuda.current_stream()
        if stream.device not in cuda.contexts:
            raise ForbiddenError(f"creates a context on device {stream.device}")
        if self.enable_timing and stream.is_capturing:
            raise ForbiddenError("recorded into a graph")
        if self.device not in (None, stream.device):
            raise ForbiddenError("an event stays on the device on which it was recorded first")
        with cuda.runtime(stream.device), captures_unbroken():
            if self.device is None:
                self.device = stream.device
                self.handle = cuda.driver.create_event(0 if self.enable_timing else simulated_driver.DISABLE_TIMING)
            cuda.driver.record(self.handle, stream.handle)

    def query(self) -> bool:
        with captures_unbroken():
            return self.cuda.driver.query(self.handle)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds, in float32 as from the driver.

        Raises:
            RuntimeError: the events are not completed, have no timing, or are not on one device.
        """
        with self.cuda.runtime(self.device), captures_unbroken():
            return self.cuda.driver.elapsed_ms(self.handle, end.handle)

    def synchronize(self) -> None:
        raise ForbiddenError("synchronize")

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Only the job has streams wait."""
        stream = stream or self.cuda.current_stream()
        self.cuda.driver.wait_event(stream._handle, self.handle)


class SimulatedGraph:
    """Like ``torch.cuda.CUDAGraph``: each simulated GPU has a class of its own, so that its methods can be replaced.

    A graph that is replayed into another one becomes a kernel of it.
    """

    cuda: SimulatedCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.executable = 0
        self._graph = 0
        self._stream: SimulatedStream | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Capture what this thread and others put on the current stream, and on those that join it.

        Raises:
            DriverError: the stream is captured already, or is the default one.
        """
        modes = ("global", "thread_local", "relaxed")
        stream = self.cuda.current_stream()
        self.cuda.driver.begin_capture(stream.handle, modes.index(capture_error_mode))
        self._stream = stream

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            ForbiddenError: it was broken meanwhile.
        """
        assert self._stream is not None
        with captures_unbroken():
            self._graph = self.cuda.driver.end_capture(self._stream.handle)
        if not self.keep_graph:
            self.instantiate()

    @classmethod
    def unknown(cls, cuda: SimulatedCuda) -> SimulatedGraph:
        """Return one whose class is replaced by nobody."""
        unknown: SimulatedGraph = type("UnknownGraph", (cls,), {"cuda": cuda})()
        return unknown

    def instantiate(self) -> None:
        self.executable = self.cuda.driver.instantiate(self._graph)

    def replay(self) -> None:
        """Launch it on the current stream."""
        if not self.executable:
            self.instantiate()
        stream = self.cuda.current_stream()
        if stream.is_capturing:
            stream.run(MILLISECOND)
        else:
            self.cuda.driver.launch_graph(self.executable, stream._handle)


class DevicesInUse(MutableSet[int]):
    """The devices that the job uses: their contexts are there."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self._devices: set[int] = set()

    def __contains__(self, device: object) -> bool:
        return device in self._devices

    def __iter__(self) -> Iterator[int]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def add(self, value: int) -> None:
        self._devices.add(value)
        self._driver.use_device(value)

    def discard(self, value: int) -> None:
        self._devices.discard(value)
        self._driver.use_device(value, False)


class SimulatedCuda:
    """Stands for the module ``torch.cuda`` and for the driver. Making one resets the driver: there is one at a time.

    Attributes:
        driver: the simulated one, in scripted time.
        contexts: devices that the job uses.
        events: all that have been made with ``Event``.
        can_spare: whether the driver has a function that lets a thread query while another one captures.
    """

    def __init__(self, *contexts: int) -> None:
        self.driver = simulated_driver.load()
        self.driver.reset()
        self.driver.initialize(*contexts)
        self.contexts = DevicesInUse(self.driver)
        self.contexts |= set(contexts or (0,))
        self.initialized = True
        self.events: list[SimulatedEvent] = []
        methods = {name: vars(SimulatedEvent)[name] for name in ("record", "wait")}
        self.Event: type[SimulatedEvent] = type("Event", (SimulatedEvent,), {"cuda": self, **methods})
        captures = {name: vars(SimulatedGraph)[name] for name in ("capture_begin", "capture_end", "replay")}
        self.CUDAGraph: type[SimulatedGraph] = type("CUDAGraph", (SimulatedGraph,), {"cuda": self, **captures})
        self.stream_ids = itertools.count(1)
        self.can_spare = True
        self._current = threading.local()
        self._defaults: dict[int, SimulatedStream] = {}

    @property
    def library_path(self) -> str:
        """Where the native part finds the driver."""
        return str(self.driver.path)

    @property
    def now_ns(self) -> int:
        """The host's time; the devices keep up with it."""
        return self.driver.now_ns

    @now_ns.setter
    def now_ns(self, time_ns: int) -> None:
        self.driver.now_ns = time_ns

    @property
    def reading_ns(self) -> int:
        """How long it takes to read the host's clock."""
        return self.driver.reading_ns

    @reading_ns.setter
    def reading_ns(self, duration_ns: int) -> None:
        self.driver.reading_ns = duration_ns

    def advance(self, duration_ns: int) -> None:
        self.driver.advance(duration_ns)

    def host_ns(self) -> int:
        return self.driver.host_ns()

    # torch.cuda

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        return int(getattr(self._current, "device", 0))

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self._current.device = self.current_device(), device
        try:
            # torch makes no context by this, on devices that the job does not use.
            if device not in self.contexts:
                yield
            else:
                with self.runtime(device):
                    yield
        finally:
            self._current.device = before

    @contextmanager
    def runtime(self, device: int | None) -> Iterator[None]:
        """Make the context of ``device`` current, as CUDA's runtime does where torch calls it.

        In a thread without a context it stays.
        """
        before = self.driver.current_device()
        if device is None or device == before:
            yield
            return
        self.driver.set_current(device)
        try:
            yield
        finally:
            if before is not None:
                self.driver.set_current(before)

    def current_stream(self, device: int | None = None) -> SimulatedStream:
        device = self.current_device() if device is None else device
        streams: dict[int, SimulatedStream] = self._current.__dict__.setdefault("streams", {})
        return streams.get(device) or self._defaults.setdefault(device, SimulatedStream(self, device, stream_id=0))

    def raw_stream(self, device: int) -> int:
        """As ``torch._C._cuda_getCurrentRawStream``: 0 for the default stream."""
        return self.current_stream(device).handle

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
    def graph(
        self, graph: SimulatedGraph | None = None, stream: SimulatedStream | None = None, mode: str = "global"
    ) -> Iterator[SimulatedGraph]:
        """Capture a graph on this thread; as torch does, beside the default stream.

        Without a ``graph`` it is one that torch does not know, as of a library that calls CUDA itself.

        Raises:
            ForbiddenError: the capture was broken meanwhile.
        """
        graph = graph or SimulatedGraph.unknown(self)
        stream = stream or self.current_stream()
        if stream.is_default:
            stream = self.Stream()
        with self.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            try:
                yield graph
            except BaseException:
                with suppress(DriverError, ForbiddenError):
                    graph.capture_end()
                raise
            graph.capture_end()

    def synchronize(self, device: Any = None) -> None:
        raise ForbiddenError("synchronize")

    # the driver

    def has_context(self, device: int) -> bool:
        return device in self.contexts

    def spare_captures(self) -> None:
        if not self.can_spare:
            raise OSError("libcuda.so.1 cannot be loaded")
        try:
            self.driver.exchange_capture_mode(simulated_driver.THREAD_LOCAL)
        except DriverError as error:
            raise OSError("no context is current in this thread") from error
