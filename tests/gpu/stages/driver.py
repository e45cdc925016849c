"""Questions on the driver that cost little to ask: events, threads, captures.

    python -m tests.gpu.stages.driver OUTPUT

Without a GPU the driver is the simulated one of tests/native, if there is a C compiler: that tries this program, and
answers nothing.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

import commtrace
from bench.engines import OFF, engines, recording
from tests.gpu.stages.stage import Answers, run_stage, sized, start_one_rank, synchronize

QUESTIONS_ON_EVENTS: Final = (
    "elapsed time to an earlier event",
    "growth of the event pool",
    "queries while a graph is captured",
)
_TIMING, _BLOCKING_SYNC, _DISABLE_TIMING = 0, 1, 2
_MODES: Final = ("global", "thread_local", "relaxed")
_STREAM_NON_BLOCKING: Final = 1
_LEGACY_STREAM: Final = 1


class Driver:
    """The functions of libcuda that are asked, on device 0. A status is returned, never raised."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.context = ctypes.c_void_p()
        assert self("cuInit", 0) == 0
        assert self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0) == 0
        self.enter_thread()

    def __call__(self, function: str, *arguments: Any) -> int:
        status: int = getattr(self.library, function)(*arguments)
        return status

    def enter_thread(self) -> None:
        """Make the context current in the calling thread."""
        assert self("cuCtxSetCurrent", self.context) == 0

    def new_event(self, flags: int = _TIMING) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        assert self("cuEventCreate", ctypes.byref(event), flags) == 0
        return event

    def new_stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        assert self("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING) == 0
        return stream


def main(answers: Answers) -> None:
    start_one_rank()
    library = libcuda()
    if library is None:
        for question in QUESTIONS_ON_EVENTS:
            answers.add(question, "neither libcuda.so.1 nor a compiler for the simulated one")
    else:
        driver = Driver(library)
        elapse_backwards(answers, driver)
        grow_the_pool(answers, driver)
        query_during_captures(answers, driver)
    launch_beside_waiting_marks(answers)
    mark_beside_a_launching_thread(answers)
    dist.destroy_process_group()


def libcuda() -> str | None:
    """Return the driver's library; of a machine without a GPU the simulated one, or None."""
    if torch.cuda.is_available():
        return "libcuda.so.1"
    from tests.native import simulated_driver  # which needs pytest

    if simulated_driver.compiler() is None:
        return None
    simulated = simulated_driver.load()
    simulated.reset()
    simulated.use_real_time()
    simulated.initialize()
    return str(simulated.path)


def elapse_backwards(answers: Answers, driver: Driver) -> None:
    """Ask for the time from a later event to an earlier one: an anchor may be newer than the mark."""
    stream, early, late = driver.new_stream(), driver.new_event(), driver.new_event()
    assert driver("cuEventRecord", early, stream) == 0
    time.sleep(0.01)
    assert driver("cuEventRecord", late, stream) == 0
    assert driver("cuStreamSynchronize", stream) == 0
    milliseconds = ctypes.c_float()
    forwards = driver("cuEventElapsedTime", ctypes.byref(milliseconds), early, late)
    text = f"forwards {milliseconds.value:.3f} ms (status {forwards})"
    backwards = driver("cuEventElapsedTime", ctypes.byref(milliseconds), late, early)
    answers.add(
        "elapsed time to an earlier event", f"{text}, backwards {milliseconds.value:.3f} ms (status {backwards})"
    )


def creation(driver: Driver, flags: int) -> Callable[[Any], object]:
    """Return what creates an event with these flags."""
    return lambda event: driver("cuEventCreate", ctypes.byref(event), flags)


def grow_the_pool(answers: Answers, driver: Driver) -> None:
    """Time what an event costs that the pool does not have yet."""
    version, stream = ctypes.c_int(), driver.new_stream()
    calls = range(sized(2_000, 50))
    base = mean_us(lambda _: driver("cuDriverGetVersion", ctypes.byref(version)), calls)
    parts = [f"a call by ctypes that does nothing {base:.2f} µs; beyond it:"]
    for name, flags in (("timing", _TIMING), ("blocking sync", _BLOCKING_SYNC), ("no timing", _DISABLE_TIMING)):
        events = [ctypes.c_void_p() for _ in calls]
        taken = {
            "create": mean_us(creation(driver, flags), events),
            "first record": mean_us(lambda event: driver("cuEventRecord", event, stream), events),
            "later ones": mean_us(lambda event: driver("cuEventRecord", event, stream), events),
        }
        assert driver("cuStreamSynchronize", stream) == 0
        taken["query"] = mean_us(lambda event: driver("cuEventQuery", event), events)
        taken["destroy"] = mean_us(lambda event: driver("cuEventDestroy_v2", event), events)
        parts.append(f"{name}: {', '.join(f'{what} {us - base:.2f}' for what, us in taken.items())} µs;")
    answers.add("growth of the event pool", " ".join(parts))


def mean_us(operation: Callable[[Any], object], operands: Iterable[Any]) -> float:
    """Return wall time of a call, µs, mean over the operands."""
    return statistics.mean([per_call(partial(operation, operand), 1) for operand in operands])


def per_call(operation: Callable[[], object], calls: int) -> float:
    """Return wall time, µs per call."""
    begin = time.perf_counter_ns()
    for _ in range(calls):
        operation()
    return (time.perf_counter_ns() - begin) / calls / 1000


def query_during_captures(answers: Answers, driver: Driver) -> None:
    """Ask what another thread may ask while a graph is captured, in each mode of capture."""
    parts = []
    for mode, name in enumerate(_MODES):
        for is_careful in (False, True):
            statuses, end = capture_while_asked(driver, mode, is_careful)
            careful = "after cuThreadExchangeStreamCaptureMode" if is_careful else "as it is"
            parts.append(f"{name}, asked by another thread {careful}: {statuses}, the capture ends with {end}")
    answers.add("queries while a graph is captured", "; ".join(parts))


def capture_while_asked(driver: Driver, mode: int, is_careful: bool) -> tuple[str, int]:
    """Capture a graph while another thread queries; return the statuses that it saw, and that of the capture's end."""
    stream, elsewhere, event = driver.new_stream(), driver.new_stream(), driver.new_event()
    assert driver("cuEventRecord", event, elsewhere) == 0
    assert driver("cuStreamSynchronize", elsewhere) == 0
    assert driver("cuStreamBeginCapture_v2", stream, mode) == 0
    statuses: dict[str, int] = {}

    def ask() -> None:
        driver.enter_thread()
        capturing = ctypes.c_int()
        if is_careful:
            thread_local = ctypes.c_int(1)
            statuses["exchange"] = driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(thread_local))
        statuses["record"] = driver("cuEventRecord", event, elsewhere)
        statuses["query"] = driver("cuEventQuery", event)
        legacy = ctypes.c_void_p(_LEGACY_STREAM)
        statuses["is legacy capturing"] = driver("cuStreamIsCapturing", legacy, ctypes.byref(capturing))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    graph = ctypes.c_void_p()
    end = driver("cuStreamEndCapture", stream, ctypes.byref(graph))
    return ", ".join(f"{name} {status}" for name, status in statuses.items()), end


def launch_beside_waiting_marks(answers: Answers) -> None:
    """Time launches that nobody records while marks on another stream wait for the device, as in a long overlap."""
    on_gpu = torch.cuda.is_available()
    tensor = torch.ones(1024, device="cuda" if on_gpu else "cpu")
    side = torch.cuda.Stream() if on_gpu else None

    def launch() -> object:
        return tensor.add_(1.0)

    per_call(launch, 100)
    taken: dict[str, list[float]] = {variant: [] for variant in (OFF, *engines())}
    for turn in range(sized(3, 1)):
        for variant in taken:
            with recording(variant, answers.output / f"waiting-{variant}-{turn}"):
                time.sleep(0.7)  # the files are open
                if side is not None:
                    with torch.cuda.stream(side):
                        torch.cuda._sleep(2_000_000_000)  # about a second
                        mark_many_times()
                else:
                    mark_many_times()
                for _ in range(sized(25, 3)):
                    taken[variant].append(per_call(launch, sized(400, 20)))
                synchronize()
    text = "; ".join(
        f"{variant} median {statistics.median(values):.2f} µs, largest of the bursts {max(values):.2f}"
        for variant, values in taken.items()
    )
    answers.add("launches while marks are waited for", text)


def mark_many_times() -> None:
    for _ in range(100):
        with commtrace.span("waits"):
            pass


def mark_beside_a_launching_thread(answers: Answers) -> None:
    """Time spans of the script, two marks each, alone and while another thread launches kernels without the GIL."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = []
    for variant in engines():
        with recording(variant, answers.output / f"threads-{variant}"):
            time.sleep(0.7)
            mark_many_times()
            alone = [per_call(mark_many_times, 1) / 100 for _ in range(sized(25, 3))]
            synchronize()
            thread = threading.Thread(target=backward, args=(device,))
            thread.start()
            beside = []
            while thread.is_alive():
                beside.append(per_call(mark_many_times, 1) / 100)
            thread.join()
            synchronize()
        parts.append(
            f"{variant}: alone {statistics.median(alone):.2f} µs a span, beside a backward "
            f"{statistics.median(beside or [0.0]):.2f} (largest burst {max(beside or [0.0]):.2f}, {len(beside)} bursts)"
        )
    answers.add("marks while another thread launches", "; ".join(parts))


def backward(device: str) -> None:
    """Launch thousands of kernels from C++, on a stream of its own."""
    start = torch.ones(1024, device=device, requires_grad=True)
    tensor = start
    for _ in range(sized(5_000, 100)):
        tensor = torch.neg(tensor)
    for _ in range(sized(5, 1)):
        tensor.sum().backward(retain_graph=True)


if __name__ == "__main__":
    run_stage(main, __doc__)
