"""Stamps of graphs with the thread that reads them, in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native import simulated_driver
from tests.native.bare_core import BareCore
from tests.native.simulated_driver import SimulatedDriver
from tests.waiting import until

KERNEL_NS = 200_000


class Stamped:
    """The extension with its thread, and streams by thread."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self.driver = driver
        self.bare = BareCore()
        self.core = self.bare.core
        self._of_thread = threading.local()
        driver.use_real_time()
        driver.set_launch_latency_ns(10_000)
        self.core.use_clock(driver.host_clock)
        self.bare.use_driver(driver, self._stream)

    def _stream(self, _device: int) -> int:
        return int(self._of_thread.__dict__.setdefault("stream", self.driver.create_stream()))

    @property
    def stream(self) -> int:
        return self._stream(0)

    def prepare(self) -> None:
        self.core.mark()
        assert self.core.prepare_stamps(True) == ""

    def capture(self, graph_id: int, kernels: int = 1) -> tuple[int, int]:
        """Capture as many stamped kernels; return the graph and its executable."""
        core, stream = self.core, self.stream
        self.driver.begin_capture(stream, simulated_driver.THREAD_LOCAL)
        stamps = core.begin_stamps(graph_id)
        assert not isinstance(stamps, str), stamps
        for _ in range(kernels):
            before = core.stamps_before(stamps, 0)
            self.driver.kernel(stream, KERNEL_NS)
            _, behind, has_one_start = core.stamp_start(stamps, before)
            assert has_one_start
            core.stamp_end(stamps, 0, before, behind)
        graph = self.driver.end_capture(stream)
        core.close_stamps(stamps, True)
        return graph, self.driver.instantiate(graph)

    def read(self, count: int, timeout_seconds: float = 30.0) -> dict[int, dict[int, Any]]:
        """The times of as many replays, by graph and number."""
        deadline = time.monotonic() + timeout_seconds
        times_by_graph: dict[int, dict[int, Any]] = {}
        while sum(map(len, times_by_graph.values())) < count and time.monotonic() < deadline:
            for graph, replay, _, times in self.core.take_stamps():
                times_by_graph.setdefault(graph, {})[replay] = np.frombuffer(times, np.int64)
            self.driver.capture_status(self.stream)  # at a call of the driver, what is due is written
            time.sleep(0.0005)
        return times_by_graph


@pytest.fixture
def stamped(driver: SimulatedDriver) -> Iterator[Stamped]:
    stamped = Stamped(driver)
    yield stamped
    assert stamped.core.close_device(2_000)
    stamped.core.use_clock(0)


def test_a_thread_reads_all_of_500_replays(stamped: Stamped) -> None:
    stamped.prepare()
    _, executable = stamped.capture(7, kernels=3)
    times_by_replay: dict[int, Any] = {}
    for _ in range(20):  # fewer at a time than there are slots: what is due is written as this thread gets a core
        for _ in range(25):
            stamped.driver.launch_graph(executable, stamped.stream)
        times_by_replay |= stamped.read(25)[7]

    assert (sorted(times_by_replay), stamped.core.stamps_lost()) == (list(range(500)), 0)
    times = np.array([times_by_replay[replay] for replay in range(500)])
    assert (np.abs(times[:, 1::2] - times[:, ::2] - KERNEL_NS) < 1_000).all()
    assert (np.diff(times[:, 0]) > 0).all()


def test_graphs_come_and_go_in_threads(stamped: Stamped) -> None:
    stamped.prepare()
    failures: list[BaseException] = []

    def work(first_id: int) -> None:
        try:
            stamped.driver.set_current(0)
            for graph_id in range(first_id, first_id + 20):
                graph, executable = stamped.capture(graph_id)
                for _ in range(5):
                    stamped.driver.launch_graph(executable, stamped.stream)
                stamped.driver.call("cuStreamSynchronize", stamped.stream)
                stamped.driver.call("cuGraphDestroy", graph)
                stamped.driver.call("cuGraphExecDestroy", executable)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first_id,)) for first_id in (100, 200, 300)]
    for thread in threads:
        thread.start()
    times_by_graph = stamped.read(300)
    for thread in threads:
        thread.join(30)

    assert failures == []
    assert {graph: sorted(replays) for graph, replays in times_by_graph.items()} == {
        first + at: list(range(5)) for first in (100, 200, 300) for at in range(20)
    }


def test_the_thread_ends_while_replays_go_on(stamped: Stamped) -> None:
    stamped.prepare()
    _, executable = stamped.capture(1)
    for _ in range(200):
        stamped.driver.launch_graph(executable, stamped.stream)
    stamped.read(10)
    assert stamped.core.close_device(2_000)
    assert stamped.core.take_stamps() == []
    # The graph is replayed after the recording, and the memory of its stamps is still there.
    for _ in range(10):
        stamped.driver.launch_graph(executable, stamped.stream)
    stamped.driver.call("cuStreamSynchronize", stamped.stream)


NOT_CAPTURED = "the stream is not captured"
TOUCHING = ("cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphNodeGetDependencies", "cuGraphAddKernelNode")


def touched(stamped: Stamped) -> list[int]:
    """How often functions were called that need a graph which is still there."""
    return [stamped.driver.calls(function) for function in TOUCHING]


def answers(stamped: Stamped, stamps: tuple[int, int], before: int) -> set[object]:
    """What the functions say that would stamp a communication of one node."""
    core = stamped.core
    return {
        core.stamps_before(stamps, 0),
        core.stamp_start(stamps, before),
        core.stamps_frontier(stamps, 0),
        core.stamp_end(stamps, 0, before, before + 1),
        core.stamp_end(stamps, -1, before, before + 1),
        core.stamp_wait(stamps, 0, b"", before, before + 1, False),
    }


def test_nothing_of_an_invalidated_capture_is_touched(stamped: Stamped) -> None:
    stamped.prepare()
    driver, stream = stamped.driver, stamped.stream
    event = driver.create_event()
    driver.begin_capture(stream, simulated_driver.THREAD_LOCAL)
    stamps = stamped.core.begin_stamps(9)
    before = stamped.core.stamps_before(stamps, 0)
    driver.kernel(stream, KERNEL_NS)
    with pytest.raises(simulated_driver.DriverError):
        driver.query(event)  # no thread may that captures
    assert driver.capture_status(stream) == simulated_driver.INVALIDATED

    calls = touched(stamped)
    assert answers(stamped, stamps, before) == {NOT_CAPTURED}
    assert touched(stamped) == calls

    with pytest.raises(simulated_driver.DriverError):  # the driver destroys the graph
        driver.end_capture(stream)
    assert answers(stamped, stamps, before) == {NOT_CAPTURED}
    assert touched(stamped) == calls


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_the_next_capture_of_a_stream_is_not_taken_for_the_last(stamped: Stamped, is_destroyed: bool) -> None:
    stamped.prepare()
    driver, stream = stamped.driver, stamped.stream
    driver.begin_capture(stream, simulated_driver.THREAD_LOCAL)
    stamps = stamped.core.begin_stamps(9)  # and not closed, as if the end had not been seen
    driver.kernel(stream, KERNEL_NS)
    graph = driver.end_capture(stream)
    if is_destroyed:
        driver.call("cuGraphDestroy", graph)
    driver.begin_capture(stream, simulated_driver.THREAD_LOCAL)

    calls = touched(stamped)
    other_graph = "captured into another graph, such as the body of a conditional node"
    assert answers(stamped, stamps, 0) <= {NOT_CAPTURED, other_graph}
    assert touched(stamped) == calls
    driver.kernel(stream, KERNEL_NS)
    assert driver.stamps(driver.end_capture(stream)) == []


def test_the_thread_asks_for_no_context(stamped: Stamped) -> None:
    stamped.prepare()
    assert stamped.core.close_device(2_000)
    asking = "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain"
    calls = [stamped.driver.calls(function) for function in asking]

    stamped.core.open_driver(str(stamped.driver.path), True)  # and no training thread has used the device since
    time.sleep(0.1)

    assert [stamped.driver.calls(function) for function in asking] == calls


def test_room_is_made_before_a_capture_while_other_threads_go_on(stamped: Stamped) -> None:
    stamped.prepare()
    driver, core = stamped.driver, stamped.core
    allocated = driver.calls("cuMemHostAlloc")
    assert core.prepare_stamps(True) == ""
    assert driver.calls("cuMemHostAlloc") == allocated  # nothing was used yet
    graph, executable = stamped.capture(1)

    def prepare() -> None:
        driver.set_current(0)
        assert core.prepare_stamps(True) == ""

    driver.hold("cuMemHostAlloc")
    thread = threading.Thread(target=prepare)
    thread.start()
    try:
        assert until(lambda: driver.held_calls() == 1)  # this thread has the GIL
    finally:
        driver.release("cuMemHostAlloc")
        thread.join(30)
    assert driver.calls("cuMemHostAlloc") == allocated + 1

    stamped.capture(2)
    assert core.prepare_stamps(True) == ""
    assert driver.calls("cuMemHostAlloc") == allocated + 1
    driver.call("cuGraphDestroy", graph)
    driver.call("cuGraphExecDestroy", executable)


def test_graphs_that_are_dropped_while_captured_are_forgotten(stamped: Stamped) -> None:
    stamped.prepare()
    driver, core, stream = stamped.driver, stamped.core, stamped.stream
    numbers = set()
    for graph_id in range(5):
        driver.begin_capture(stream, simulated_driver.THREAD_LOCAL)
        stamps = core.begin_stamps(graph_id)
        numbers.add(stamps[0])
        before = core.stamps_before(stamps, 0)
        driver.kernel(stream, KERNEL_NS)
        core.stamp_start(stamps, before)
        driver.call("cuGraphDestroy", driver.end_capture(stream))  # without close_stamps
        time.sleep(0.1)  # the thread looks every few milliseconds

    assert len(numbers) < 5


PROGRAMMATIC = "kernels around it overlap (programmatic edges)"


def test_a_driver_that_cannot_tell_of_programmatic_edges(tmp_path: Path) -> None:
    """As before CUDA 12.3, which answers such questions with an error."""
    if simulated_driver.compiler() is None:
        pytest.skip(simulated_driver.NO_COMPILER)
    old = SimulatedDriver(simulated_driver.build(tmp_path, "-DBEFORE_12_3"))
    assert not hasattr(old.library, "cuStreamGetCaptureInfo_v3")
    for _ in range(100):
        old.reset()  # so that its contexts are not those of the driver of other tests
    old.initialize()
    old.set_version(12020)
    stamped = Stamped(old)
    stamped.prepare()
    _, executable = stamped.capture(3)
    old.launch_graph(executable, stamped.stream)
    assert list(stamped.read(1)) == [3]

    stream = stamped.stream
    old.begin_capture(stream, simulated_driver.THREAD_LOCAL)
    stamps = stamped.core.begin_stamps(4)
    before = stamped.core.stamps_before(stamps, 0)
    old.set_programmatic(stream)
    assert stamped.core.stamps_before(stamps, 0) == PROGRAMMATIC
    old.kernel(stream, KERNEL_NS)
    assert stamped.core.stamp_start(stamps, before) == PROGRAMMATIC
    old.set_programmatic(stream, False)
    assert old.stamps(old.end_capture(stream)) == []
    assert stamped.core.close_device(2_000)
    stamped.core.use_clock(0)
