"""The extension's thread on the simulated driver in real time: what it says of the device, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from commtrace.trace.schema import COLLECTIVE
from tests.capture.simulated_nccl import SimulatedTensor, tensor
from tests.native.bare_core import ASYNCHRONOUS, NO_PLACE, BareCore, ProcessGroup
from tests.native.simulated_driver import SimulatedDriver
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

MICROSECOND, MILLISECOND = 1_000, 1_000_000
FLOAT32_ERROR_NS = 500
"""Of a distance of up to 1 s from an anchor, 60 ns, and twice the host's reading of it."""


class Device(NamedTuple):
    """A job on device 0: each of its threads has a stream of its own."""

    core: BareCore
    driver: SimulatedDriver
    streams: threading.local

    def use(self, stream: int) -> None:
        self.driver.set_current(0)
        self.streams.current = stream

    def mark(self) -> Any:
        return self.core.core.mark(0)

    def mark_behind(self, duration_ns: int, lateness_ns: int = 0) -> tuple[Any, int, int]:
        """Put a kernel on the thread's stream, and a mark behind it; return also between when the device passes it.

        The host may lose its core in between, and take the mark when the kernel is over.
        """
        _, end = self.driver.kernel(self.streams.current, duration_ns)
        before = time.monotonic_ns()
        mark = self.mark()
        return mark, max(end, before + lateness_ns), max(end, mark.taken_at + lateness_ns)

    def errors(self, marks: Iterable[tuple[Any, int, int]]) -> list[int]:
        """Return by how much the times of marks are wrong."""
        times = [(self.resolved(mark), earliest, latest) for mark, earliest, latest in marks]
        return [max(0, earliest - time_ns, time_ns - latest) for time_ns, earliest, latest in times]

    def resolved(self, mark: Any) -> int:
        return self.core.resolved(mark, 30.0)


@pytest.fixture
def device(driver: SimulatedDriver) -> Iterator[Device]:
    driver.use_real_time()
    core, streams = BareCore(), threading.local()
    streams.current = driver.create_stream()
    core.use_driver(driver, lambda _device: streams.current)
    yield Device(core, driver, streams)
    for function in ("cuEventQuery", "cuEventRecord"):
        driver.release(function)
    core.core.end()
    core.core.close_device(5_000)
    assert core.errors == []


def in_threads(number: int, action: Callable[[int], None]) -> None:
    """Run an action in threads; raise what one of them has raised."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            action(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_four_threads_on_four_streams_each_lose_nothing(device: Device) -> None:
    known: list[list[tuple[Any, int, int]]] = []

    def train(index: int) -> None:
        device.driver.set_current(0)
        streams = {device.driver.create_stream(): [] for _ in range(4)}  # type: dict[int, list[tuple[Any, int, int]]]
        for round_number in range(250):
            for stream, marks in streams.items():
                device.use(stream)
                marks.append(device.mark_behind((1 + (index + round_number) % 4) * 20 * MICROSECOND))
                device.core.core.span(0, index, 1, NO_PLACE, marks[-1][0], marks[-1][0])
        known.extend(streams.values())

    in_threads(4, train)

    for marks in known:
        assert max(device.errors(marks)) <= FLOAT32_ERROR_NS + lateness_of_anchors(device)
        times = [device.resolved(mark) for mark, _, _ in marks]
        assert times == sorted(times)
    rows: list[Any] = []

    def taken() -> int:
        rows.extend(device.core.take())
        return len(rows)

    until(lambda: taken() >= 4_000)
    assert (len(rows), device.core.num_dropped()) == (4_000, 0)


def lateness_of_anchors(device: Device) -> int:
    """How wrong an anchor may be on this machine: half of the best of three readings, on a core that others want."""
    best = []
    for _ in range(5):
        before = time.monotonic_ns()
        device.driver.host_ns()
        best.append(time.monotonic_ns() - before)
    return max(best) + 50 * MICROSECOND


def test_the_device_may_be_late_and_its_clock_may_drift(device: Device) -> None:
    stream = device.streams.current
    device.driver.set_lateness_ns(stream, 20 * MILLISECOND)
    device.driver.set_drift_ppm(50.0)
    marks = []
    for _ in range(30):
        marks.append(device.mark_behind(MILLISECOND, 20 * MILLISECOND))
        time.sleep(0.02)

    # 50 ppm of the half second between anchors, and of the 50 ms by which the device is late.
    assert max(device.errors(marks)) <= 50 * 0.6 * 1_000 + FLOAT32_ERROR_NS + lateness_of_anchors(device)


def test_marks_far_ahead_of_a_late_device_are_resolved_in_order(device: Device) -> None:
    marks = [device.mark_behind(300 * MICROSECOND) for _ in range(500)]
    assert device.core.core.resolve(marks[-1][0]) is None

    assert max(device.errors(marks)) <= FLOAT32_ERROR_NS + lateness_of_anchors(device)
    times = [device.resolved(mark) for mark, _, _ in marks]
    assert times == sorted(times)


def test_a_stuck_stream_holds_up_no_other(device: Device) -> None:
    stuck, other = device.driver.create_stream(), device.driver.create_stream()
    device.use(stuck)
    device.driver.kernel(stuck, 1_000_000 * MILLISECOND)
    behind = [device.mark() for _ in range(300)]
    device.use(other)
    device.resolved(device.mark())

    assert all(device.core.core.resolve(mark) is None for mark in behind)


def test_marks_on_more_streams_than_there_is_room_for_are_lost_and_counted(device: Device) -> None:
    marks = marks_on_too_many_streams(device)
    for number, mark in enumerate(marks):
        device.core.core.span(0, 0, 1, NO_PLACE, number, mark)

    assert [is_lost(device, mark) for mark in marks] == [False] * 1_024 + [True] * 76
    device.core.core.give_up()
    assert device.core.num_dropped() == 1_100


def marks_on_too_many_streams(device: Device) -> list[Any]:
    """Return marks that the device does not pass, the last of which are lost."""
    marks = []
    for _ in range(1_100):
        stream = device.driver.create_stream()
        device.use(stream)
        device.driver.kernel(stream, 1_000_000 * MILLISECOND)
        marks.append(device.mark())
    until(lambda: is_lost(device, marks[-1]))
    return marks


def test_what_has_lost_a_mark_does_not_wait_for_another_one(device: Device) -> None:
    """It would be among what the device is behind with, and there is no time to tell of it."""
    device.core.use_driver(device.driver, lambda _device: device.streams.current, (SimulatedTensor,))
    marks = marks_on_too_many_streams(device)
    work = ProcessGroup()
    # Launched on a stream that is not followed, waited for on one that is, and never passed.
    device.core.method(lambda *_: work)(device.core.process_group, [tensor(8)], ASYNCHRONOUS)
    device.use(marks[0].stream)
    device.core.wait(lambda *_: None)(work)

    def dropped() -> int:
        device.core.take()
        return int(device.core.num_dropped(COLLECTIVE))

    until(dropped)
    assert device.core.num_dropped(COLLECTIVE) == 1
    assert device.core.core.ahead() == []


def is_lost(device: Device, mark: Any) -> bool:
    try:
        device.core.core.resolve(mark)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize(
    "function",
    ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime", "cuStreamCreate", "cuStreamIsCapturing"],
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_failure_of_the_driver_costs_marks_and_nothing_else(device: Device, function: str, call: int) -> None:
    stream = device.streams.current
    calls_before = device.driver.calls(function)
    device.driver.fail(function, 700, call)
    for number in range(20):
        device.driver.kernel(stream, 10 * MICROSECOND)
        device.core.core.span(0, 0, 1, NO_PLACE, number, device.mark())
        time.sleep(0.002)
    rows: list[Any] = []

    def taken_or_dropped() -> int:
        rows.extend(device.core.take())
        return len(rows) + device.core.num_dropped()

    until(lambda: taken_or_dropped() >= 20)

    assert len(rows) + device.core.num_dropped() == 20
    was_called = device.driver.calls(function) - calls_before >= call
    has_failed = was_called and function != "cuStreamIsCapturing"  # whose error means that nothing is to be done
    assert device.core.core.device_state()[1] == (700 if has_failed else 0)


def test_its_thread_takes_no_signals_and_next_to_no_time(device: Device) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc")
    device.resolved(device.mark())
    [task] = [
        path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text().strip() == "commtrace-marks"
    ]
    status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
    # All that can be blocked: not KILL (9), STOP (19), and two of the C library's own (32, 33).
    assert int(status["SigBlk"], 16) == 2**64 - 1 - sum(1 << number - 1 for number in (9, 19, 32, 33))

    def cpu_seconds() -> float:
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    time.sleep(2)
    assert cpu_seconds() - before <= 0.05


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise SystemExit(3)", "os._exit(4)", "core.core.close_device(500)"])
def test_a_process_whose_driver_hangs_ends_all_the_same(built_driver: SimulatedDriver, ends: str) -> None:
    script = textwrap.dedent(f"""
        import os, sys, time
        from tests.native.bare_core import BareCore
        from tests.native.simulated_driver import SimulatedDriver
        from pathlib import Path
        driver = SimulatedDriver(Path({str(built_driver.path)!r}))
        driver.reset(); driver.initialize(); driver.use_real_time()
        stream = driver.create_stream()
        core = BareCore()
        core.core.open_driver(str(driver.path), True)
        core.configure(times_devices=True, raw_stream=lambda _: stream, current_device=lambda: 0)
        driver.hold("cuEventQuery")
        core.core.mark(0)
        while not driver.held_calls():
            time.sleep(0.001)
        print(time.monotonic(), flush=True)
        {ends}
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    ended_at = time.monotonic()

    assert process.stderr == ""
    assert process.returncode == {"sys.exit(0)": 0, "raise SystemExit(3)": 3, "os._exit(4)": 4}.get(ends, 0)
    assert ended_at - float(process.stdout) < 10
