"""The simulated CUDA driver (tests/native/driver, in C) built, and the hand of a test on it.

    driver = load()
    driver.reset()
    driver.initialize()                      # as a job that computes on device 0
    stream = driver.create_stream()
    driver.kernel(stream, 3_000_000)         # 3 ms
    driver.fail("cuEventQuery", 700)         # from the next call on
    driver.advance(3_000_000)
    assert driver.calls("cuEventSynchronize") == 0

The library at ``driver.path`` is the same one for whoever opens it by that path in this process: the native part of
commtrace is given the path instead of libcuda's name.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

SOURCES: Final = Path(__file__).with_name("driver")
NO_COMPILER: Final = "no C compiler is there, with which the simulated driver would be built"

NEVER_NS: Final = (2**63 - 1) // 4
"""How long a kernel takes that never ends, and when."""

SUCCESS, INVALID_VALUE, NOT_INITIALIZED = 0, 1, 3
INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 101, 201, 400
NOT_READY, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT = 600, 700, 702
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNMATCHED, CAPTURE_UNJOINED = 900, 901, 902, 903, 904
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT, CAPTURE_WRONG_THREAD = 905, 906, 907, 908

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Modes of a capture, and of a thread towards the captures of others."""

NOT_CAPTURED, CAPTURED, INVALIDATED = 0, 1, 2
"""What cuStreamIsCapturing says of a stream."""

NON_BLOCKING = 1
"""Flag of a stream: as torch's are, without order towards the legacy stream."""

DISABLE_TIMING = 2
"""Flag of an event."""

EXTERNAL = 1
"""Flag of a record or a wait in a capture: a node of the graph, not an edge."""

LEGACY_STREAM, PER_THREAD_STREAM = 1, 2

HANDLE, HANDLES = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
INT, UNSIGNED, NANOSECONDS = ctypes.c_int, ctypes.c_uint, ctypes.c_int64
INTS, SIZES, TIMES = ctypes.POINTER(INT), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(NANOSECONDS)

DRIVER_FUNCTIONS: Final[dict[str, list[Any]]] = {
    "cuInit": [UNSIGNED],
    "cuDriverGetVersion": [INTS],
    "cuDeviceGet": [INTS, INT],
    "cuDeviceGetCount": [INTS],
    "cuDevicePrimaryCtxGetState": [INT, ctypes.POINTER(UNSIGNED), INTS],
    "cuDevicePrimaryCtxRetain": [HANDLES, INT],
    "cuDevicePrimaryCtxRelease_v2": [INT],
    "cuCtxGetCurrent": [HANDLES],
    "cuCtxSetCurrent": [HANDLE],
    "cuCtxPushCurrent_v2": [HANDLE],
    "cuCtxPopCurrent_v2": [HANDLES],
    "cuCtxGetDevice": [INTS],
    "cuCtxSynchronize": [],
    "cuStreamCreate": [HANDLES, UNSIGNED],
    "cuStreamCreateWithPriority": [HANDLES, UNSIGNED, INT],
    "cuStreamDestroy_v2": [HANDLE],
    "cuStreamGetCtx": [HANDLE, HANDLES],
    "cuStreamQuery": [HANDLE],
    "cuStreamSynchronize": [HANDLE],
    "cuStreamWaitEvent": [HANDLE, HANDLE, UNSIGNED],
    "cuStreamIsCapturing": [HANDLE, INTS],
    "cuStreamGetCaptureInfo": [HANDLE, INTS, HANDLES],
    "cuStreamGetCaptureInfo_v2": [HANDLE, INTS, HANDLES, HANDLES, ctypes.POINTER(HANDLES), SIZES],
    "cuStreamGetCaptureInfo_v3": [HANDLE, INTS, HANDLES, HANDLES, ctypes.POINTER(HANDLES), HANDLES, SIZES],
    "cuStreamBeginCapture_v2": [HANDLE, INT],
    "cuStreamEndCapture": [HANDLE, HANDLES],
    "cuThreadExchangeStreamCaptureMode": [INTS],
    "cuGraphDestroy": [HANDLE],
    "cuGraphGetNodes": [HANDLE, HANDLES, SIZES],
    "cuGraphNodeGetType": [HANDLE, INTS],
    "cuGraphNodeGetDependencies": [HANDLE, HANDLES, SIZES],
    "cuGraphNodeGetDependencies_v2": [HANDLE, HANDLES, HANDLES, SIZES],
    "cuGraphAddEventRecordNode": [HANDLES, HANDLE, HANDLES, ctypes.c_size_t, HANDLE],
    "cuGraphAddKernelNode_v2": [HANDLES, HANDLE, HANDLES, ctypes.c_size_t, ctypes.c_void_p],
    "cuGraphRetainUserObject": [HANDLE, HANDLE, UNSIGNED, UNSIGNED],
    "cuUserObjectCreate": [HANDLES, ctypes.c_void_p, ctypes.c_void_p, UNSIGNED, UNSIGNED],
    "cuUserObjectRelease": [HANDLE, UNSIGNED],
    "cuModuleLoadData": [HANDLES, ctypes.c_char_p],
    "cuModuleGetFunction": [HANDLES, HANDLE, ctypes.c_char_p],
    "cuMemHostAlloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, UNSIGNED],
    "cuGraphInstantiateWithFlags": [HANDLES, HANDLE, ctypes.c_ulonglong],
    "cuGraphExecDestroy": [HANDLE],
    "cuGraphLaunch": [HANDLE, HANDLE],
    "cuEventCreate": [HANDLES, UNSIGNED],
    "cuEventDestroy_v2": [HANDLE],
    "cuEventRecord": [HANDLE, HANDLE],
    "cuEventRecord_ptsz": [HANDLE, HANDLE],
    "cuEventRecordWithFlags": [HANDLE, HANDLE, UNSIGNED],
    "cuEventQuery": [HANDLE],
    "cuEventSynchronize": [HANDLE],
    "cuEventElapsedTime": [ctypes.POINTER(ctypes.c_float), HANDLE, HANDLE],
    "cuEventElapsedTime_v2": [ctypes.POINTER(ctypes.c_float), HANDLE, HANDLE],
}
"""Arguments of functions of the driver, all of which return a status."""

SCRIPT_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    "simulated_reset": (None, [INT]),
    "simulated_now_ns": (NANOSECONDS, []),
    "simulated_host_ns": (NANOSECONDS, []),
    "simulated_set_now_ns": (None, [NANOSECONDS]),
    "simulated_advance": (None, [NANOSECONDS]),
    "simulated_reading_ns": (NANOSECONDS, []),
    "simulated_set_reading_ns": (None, [NANOSECONDS]),
    "simulated_use_real_time": (None, [ctypes.c_bool]),
    "simulated_use_device": (None, [INT, ctypes.c_bool]),
    "simulated_context": (HANDLE, [INT]),
    "simulated_legacy_stream": (HANDLE, [INT]),
    "simulated_pool_stream": (HANDLE, [INT]),
    "simulated_kernel": (INT, [HANDLE, NANOSECONDS, TIMES, TIMES]),
    "simulated_wait_until": (INT, [HANDLE, NANOSECONDS]),
    "simulated_follow": (INT, [HANDLE, HANDLE]),
    "simulated_position_ns": (NANOSECONDS, [HANDLE]),
    "simulated_stop_work": (INT, [HANDLE]),
    "simulated_set_lateness_ns": (INT, [HANDLE, NANOSECONDS]),
    "simulated_set_drift_ppm": (None, [ctypes.c_double]),
    "simulated_set_globaltimer": (None, [ctypes.c_double, ctypes.c_uint64]),
    "simulated_set_stamp_ns": (None, [NANOSECONDS]),
    "simulated_set_launch_latency_ns": (None, [NANOSECONDS]),
    "simulated_set_version": (None, [INT]),
    "simulated_set_programmatic": (INT, [HANDLE, ctypes.c_bool]),
    "simulated_node_kernel": (INT, [HANDLE, INTS, INTS]),
    "simulated_event_ns": (NANOSECONDS, [HANDLE]),
    "simulated_node_times": (INT, [HANDLE, ctypes.c_uint32, TIMES, TIMES]),
    "simulated_function": (INT, [ctypes.c_char_p]),
    "simulated_function_name": (ctypes.c_char_p, [INT]),
    "simulated_fail": (None, [INT, ctypes.c_int64, INT]),
    "simulated_break_device": (None, [INT]),
    "simulated_hold": (None, [INT, ctypes.c_bool]),
    "simulated_held_calls": (INT, []),
    "simulated_forbid": (None, [INT, ctypes.c_bool]),
    "simulated_set_cost_ns": (None, [INT, NANOSECONDS]),
    "simulated_calls": (ctypes.c_int64, [INT]),
    "simulated_calls_of_thread": (ctypes.c_int64, [INT, INT]),
    "simulated_calls_in_children": (ctypes.c_int64, [INT]),
    "simulated_live_events": (ctypes.c_uint64, [HANDLES, ctypes.c_uint64]),
    "simulated_live_streams": (ctypes.c_uint64, [HANDLES, ctypes.c_uint64]),
}
"""Result and arguments of the functions for tests, each of which is described where it is defined."""


class DriverError(RuntimeError):
    """A function of the driver has returned an error."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: {status}")
        self.function = function
        self.status = status


def compiler() -> str | None:
    """Return the path of the machine's C compiler; None if there is none."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, [named] if named else ["cc", "gcc", "clang"])), None)


def build(folder: Path, *options: str) -> Path:
    """Compile the library into ``folder``. It is named as the real one: LD_LIBRARY_PATH has a program find it."""
    command = compiler()
    assert command is not None, NO_COMPILER
    library = folder / "libcuda.so.1"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread"]
    sources = map(str, sorted(SOURCES.glob("*.c")))
    subprocess.run([command, *flags, *options, "-o", str(library), *sources], check=True)
    return library


@functools.cache
def library_path() -> Path:
    """Build the library once per process, into a folder that goes with it; skip the test where that cannot be done."""
    if compiler() is None:
        pytest.skip(NO_COMPILER)
    folder, builder = tempfile.mkdtemp(prefix="simulated-driver-"), os.getpid()

    def remove() -> None:
        if os.getpid() == builder:  # not a forked child, whose parent goes on
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return build(Path(folder))


@functools.cache
def load() -> SimulatedDriver:
    """Return the driver of this process, of which there is one."""
    return SimulatedDriver(library_path())


class SimulatedDriver:
    """The library's functions by what they do. Where the driver returns an error, :class:`DriverError` is raised.

    Attributes:
        path: of the library.
        library: with the driver's own functions, which return their status; handles are ints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library: Any = ctypes.CDLL(str(path))
        for name, arguments in DRIVER_FUNCTIONS.items():
            if hasattr(self.library, name):  # older drivers lack some
                getattr(self.library, name).argtypes = arguments
        for name, (result, arguments) in SCRIPT_FUNCTIONS.items():
            getattr(self.library, name).restype = result
            getattr(self.library, name).argtypes = arguments

    def reset(self, devices: int = 8) -> None:
        """Go back to a process that has not initialised CUDA. Time is scripted; handles from before are stale."""
        self.library.simulated_reset(devices)

    def initialize(self, *devices: int) -> None:
        """Have the job use ``devices`` (0), the first of which is current in this thread."""
        self.call("cuInit", 0)
        for device in devices or (0,):
            self.use_device(device)
        self.set_current(devices[0] if devices else 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        status = getattr(self.library, function)(*arguments)
        if status != SUCCESS:
            raise DriverError(function, status)

    # time

    @property
    def now_ns(self) -> int:
        return int(self.library.simulated_now_ns())

    @now_ns.setter
    def now_ns(self, time_ns: int) -> None:
        self.library.simulated_set_now_ns(time_ns)

    @property
    def reading_ns(self) -> int:
        """How long it takes to read the host's clock, while time is scripted."""
        return int(self.library.simulated_reading_ns())

    @reading_ns.setter
    def reading_ns(self, duration_ns: int) -> None:
        self.library.simulated_set_reading_ns(duration_ns)

    def host_ns(self) -> int:
        """Read the host's clock."""
        return int(self.library.simulated_host_ns())

    @property
    def host_clock(self) -> int:
        """The address of ``int64_t simulated_host_ns(void)``, for a native reader of the host's clock."""
        return int(ctypes.cast(self.library.simulated_host_ns, ctypes.c_void_p).value or 0)

    def advance(self, duration_ns: int) -> None:
        """Let scripted time pass."""
        self.library.simulated_advance(duration_ns)

    def use_real_time(self) -> None:
        """Let the time be CLOCK_MONOTONIC from now on."""
        self.library.simulated_use_real_time(True)

    def set_drift_ppm(self, ppm: float) -> None:
        """Have the device's clock run faster than the host's by ``ppm`` millionths."""
        self.library.simulated_set_drift_ppm(ppm)

    # contexts

    def use_device(self, device: int, is_in_use: bool = True) -> None:
        """Have the job use a device, or use it no more."""
        self.library.simulated_use_device(device, is_in_use)

    def set_current(self, device: int | None) -> None:
        """Make the context of a device current in this thread, or none."""
        self.call("cuCtxSetCurrent", 0 if device is None else self.library.simulated_context(device))

    def current_device(self) -> int | None:
        """Return the device whose context is current in this thread."""
        device = INT()
        status = self.library.cuCtxGetDevice(ctypes.byref(device))
        return device.value if status == SUCCESS else None

    # streams

    def create_stream(self, flags: int = NON_BLOCKING) -> int:
        return self._created("cuStreamCreate", flags)

    def legacy_stream(self, device: int) -> int:
        """Return a handle of the device's legacy stream that holds in each context, as 0 does not."""
        return int(self.library.simulated_legacy_stream(device))

    def pool_stream(self, device: int) -> int:
        """Return a new stream as from torch's pool: non-blocking, and never destroyed."""
        return int(self.library.simulated_pool_stream(device))

    def kernel(self, stream: int, duration_ns: int) -> tuple[int, int]:
        """Put a kernel on a stream and return when it starts and ends, ns."""
        start, end = NANOSECONDS(), NANOSECONDS()
        self.call("simulated_kernel", stream, duration_ns, ctypes.byref(start), ctypes.byref(end))
        return start.value, end.value

    def wait_until(self, stream: int, time_ns: int) -> None:
        """Have a stream wait until a time, as for something of which nothing else is simulated."""
        self.call("simulated_wait_until", stream, time_ns)

    def follow(self, stream: int, earlier: int) -> None:
        """Have a stream wait for what is on another one now, as by an event between them."""
        self.call("simulated_follow", stream, earlier)

    def wait_event(self, stream: int, event: int, flags: int = 0) -> None:
        self.call("cuStreamWaitEvent", stream, event, flags)

    def stop_work(self, stream: int) -> None:
        """Forget the work of a stream that has not ended yet, as the kernels of an aborted communicator stop."""
        self.call("simulated_stop_work", stream)

    def position_ns(self, stream: int) -> int:
        """Return when what is put on the stream next can start."""
        return int(self.library.simulated_position_ns(stream))

    def set_lateness_ns(self, stream: int, duration_ns: int) -> None:
        """Have work start so long after the host has put it on the stream, at the earliest."""
        self.call("simulated_set_lateness_ns", stream, duration_ns)

    def capture_status(self, stream: int) -> int:
        status = INT()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's mode towards the captures of others; returns the one before."""
        exchanged = INT(mode)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        return exchanged.value

    # events

    def create_event(self, flags: int = 0) -> int:
        return self._created("cuEventCreate", flags)

    def record(self, event: int, stream: int, flags: int = 0) -> None:
        if flags:
            self.call("cuEventRecordWithFlags", event, stream, flags)
        else:
            self.call("cuEventRecord", event, stream)

    def query(self, event: int) -> bool:
        status = self.library.cuEventQuery(event)
        if status not in (SUCCESS, NOT_READY):
            raise DriverError("cuEventQuery", status)
        return bool(status == SUCCESS)

    def elapsed_ms(self, start: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value

    def event_ns(self, event: int) -> int | None:
        """Return when an event is reached; None if it is not on a stream."""
        time_ns = int(self.library.simulated_event_ns(event))
        return time_ns if time_ns >= 0 else None

    # graphs

    def begin_capture(self, stream: int, mode: int = GLOBAL) -> None:
        self.call("cuStreamBeginCapture_v2", stream, mode)

    def end_capture(self, stream: int) -> int:
        return self._returned("cuStreamEndCapture", stream)

    def launch_graph(self, executable: int, stream: int) -> None:
        self.call("cuGraphLaunch", executable, stream)

    def instantiate(self, graph: int) -> int:
        return self._created("cuGraphInstantiateWithFlags", graph, 0)

    def nodes(self, graph: int) -> list[int]:
        """Return the handles of a graph's nodes, in the order in which they were added."""
        return self._nodes("cuGraphGetNodes", graph)

    def dependencies(self, node: int) -> list[int]:
        return self._nodes("cuGraphNodeGetDependencies", node)

    def node_times(self, executable: int, node: int) -> tuple[int, int]:
        """Return when the ``node``-th node of a graph started and ended in its last launch."""
        start, end = NANOSECONDS(), NANOSECONDS()
        self.call("simulated_node_times", executable, node, ctypes.byref(start), ctypes.byref(end))
        return start.value, end.value

    # the kernels of the native part

    def set_globaltimer(self, ppm: float = 0.0, ahead_ns: int = 5 * 10**15) -> None:
        """Have %globaltimer be ahead of the host's clock, and run faster by ``ppm`` millionths."""
        self.library.simulated_set_globaltimer(ppm, ahead_ns)

    def set_stamp_ns(self, duration_ns: int) -> None:
        """Have kernels of the native part that are added or launched from now on take so long."""
        self.library.simulated_set_stamp_ns(duration_ns)

    def set_launch_latency_ns(self, duration_ns: int) -> None:
        """Have kernels of the native part start so long after they were launched, at the earliest."""
        self.library.simulated_set_launch_latency_ns(duration_ns)

    def set_version(self, version: int) -> None:
        """Be an older driver: 12020 is CUDA 12.2, which loads no modules during captures."""
        self.library.simulated_set_version(version)

    def set_programmatic(self, stream: int, is_programmatic: bool = True) -> None:
        """Have kernels that are captured on a stream start before those before them have ended."""
        self.call("simulated_set_programmatic", stream, is_programmatic)

    def stamps(self, graph: int) -> list[int]:
        """Return the nodes of a graph that are kernels of the native part."""
        kernel, priority = INT(), INT()
        nodes = []
        for node in self.nodes(graph):
            self.call("simulated_node_kernel", node, ctypes.byref(kernel), ctypes.byref(priority))
            nodes += [node] if kernel.value else []
        return nodes

    def priority(self, node: int) -> int:
        """Return the priority of a node, which was given by its attribute."""
        kernel, priority = INT(), INT()
        self.call("simulated_node_kernel", node, ctypes.byref(kernel), ctypes.byref(priority))
        return priority.value

    # failures, and what was asked

    def fail(self, function: str, status: int, call: int = 1) -> None:
        """Have a function return ``status`` from its ``call``-th call from now on; 0 ends that."""
        self.library.simulated_fail(self._number(function), call, status)

    def break_device(self, status: int = ILLEGAL_ADDRESS) -> None:
        """Have everything fail from now on, as after an illegal address."""
        self.library.simulated_break_device(status)

    def hold(self, function: str) -> None:
        """Have calls of a function wait until they are released, as in a driver that is stuck."""
        self.library.simulated_hold(self._number(function), True)

    def release(self, function: str) -> None:
        self.library.simulated_hold(self._number(function), False)

    def held_calls(self) -> int:
        """Return how many calls wait to be released."""
        return int(self.library.simulated_held_calls())

    def forbid(self, *functions: str) -> None:
        """End the process when one of the functions is called."""
        for function in functions:
            self.library.simulated_forbid(self._number(function), True)

    def set_cost_ns(self, function: str, cost_ns: int) -> None:
        """Have each call of a function keep its thread busy so long."""
        self.library.simulated_set_cost_ns(self._number(function), cost_ns)

    def calls(self, function: str, thread: int | None = None) -> int:
        """Return how often a function was called since the reset; only by ``thread`` (its native id) if one is given.

        Versions and per-thread forms count as the function: cuEventElapsedTime_v2 as cuEventElapsedTime.
        """
        number = self._number(function)
        if thread is None:
            return int(self.library.simulated_calls(number))
        return int(self.library.simulated_calls_of_thread(number, thread))

    def calls_in_children(self) -> dict[str, int]:
        """Return what forked children have called since the reset, all of which was refused."""
        calls = {name: int(self.library.simulated_calls_in_children(self._number(name))) for name in self.functions()}
        return {name: count for name, count in calls.items() if count}

    def live_events(self) -> list[int]:
        """Return the events that are not destroyed."""
        return self._live("simulated_live_events")

    def live_streams(self) -> list[int]:
        """Return the streams that were created and are not destroyed."""
        return self._live("simulated_live_streams")

    def functions(self) -> list[str]:
        """Return the functions of the driver, by the names under which their calls are counted."""
        names = map(self.library.simulated_function_name, itertools.count())
        return [name.decode() for name in itertools.takewhile(bool, names)]

    def _number(self, function: str) -> int:
        number = int(self.library.simulated_function(function.encode()))
        assert number >= 0, f"{function} is not counted: leave out _v2 or _ptsz"
        return number

    def _created(self, function: str, *arguments: int) -> int:
        handle = HANDLE()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle.value

    def _returned(self, function: str, *arguments: int) -> int:
        handle = HANDLE()
        self.call(function, *arguments, ctypes.byref(handle))
        return handle.value

    def _nodes(self, function: str, handle: int) -> list[int]:
        count = ctypes.c_size_t()
        self.call(function, handle, None, ctypes.byref(count))
        nodes = (HANDLE * count.value)()
        self.call(function, handle, nodes, ctypes.byref(count))
        return list(nodes)

    def _live(self, function: str) -> list[int]:
        list_handles = getattr(self.library, function)
        handles = (HANDLE * int(list_handles(None, 0)))()
        count = int(list_handles(handles, len(handles)))
        return list(handles)[:count]
