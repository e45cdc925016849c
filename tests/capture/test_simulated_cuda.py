"""The simulated GPU shows what a native reader of its driver sees, and fails where a real one would be harmed."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.capture.simulated_cuda import MILLISECOND, ForbiddenError, SimulatedCuda
from tests.capture.simulated_nccl import tensor
from tests.native import simulated_driver


@pytest.fixture
def cuda() -> SimulatedCuda:
    return SimulatedCuda()


def test_a_native_reader_records_on_the_streams_of_the_job(cuda: SimulatedCuda) -> None:
    library = ctypes.CDLL(cuda.library_path)
    event = cuda.driver.create_event()
    beside = cuda.Stream()
    with cuda.stream(beside):
        _, end = cuda.current_stream().run(3 * MILLISECOND)
        assert cuda.raw_stream(0) == beside.handle != 0
        assert library.cuEventRecord(ctypes.c_uint64(event), ctypes.c_uint64(cuda.raw_stream(0))) == 0
    assert cuda.raw_stream(0) == 0

    assert cuda.driver.event_ns(event) == end
    assert library.cuEventQuery(ctypes.c_uint64(event)) == simulated_driver.NOT_READY
    cuda.advance(3 * MILLISECOND)
    assert library.cuEventQuery(ctypes.c_uint64(event)) == simulated_driver.SUCCESS


def test_a_thread_gets_its_context_by_the_first_call_of_the_runtime(cuda: SimulatedCuda) -> None:
    devices: list[int | None] = []

    def work() -> None:
        devices.append(cuda.driver.current_device())
        cuda.Event().record()
        devices.append(cuda.driver.current_device())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert devices == [None, 0]
    assert cuda.driver.calls("cuDevicePrimaryCtxRetain") == 0


def test_the_context_of_another_device_is_current_for_one_call() -> None:
    cuda = SimulatedCuda(0, 1)
    with cuda.device(1):
        assert cuda.driver.current_device() == 1
        event = cuda.current_stream().record_event()
    assert cuda.driver.current_device() == 0
    event.record(cuda.current_stream(1))
    assert cuda.driver.current_device() == 0
    with pytest.raises(ForbiddenError, match="an event stays"):
        event.record(cuda.current_stream(0))
    with pytest.raises(ForbiddenError, match="creates a context on device 2"):
        cuda.Event().record(cuda.current_stream(2))


def test_a_graph_runs_when_it_is_replayed(cuda: SimulatedCuda) -> None:
    beside = cuda.Stream()
    with cuda.graph() as graph:
        stream = cuda.current_stream()
        stream.run(MILLISECOND)
        beside.wait_event(stream.record_event())
        beside.run(5 * MILLISECOND)
        stream.wait_event(beside.record_event())
        with pytest.raises(ForbiddenError, match="recorded into a graph"):
            cuda.Event(enable_timing=True).record()
    assert cuda.current_stream().position_ns() == beside.position_ns() == cuda.now_ns

    graph.replay()
    assert cuda.current_stream().position_ns() == cuda.now_ns + 6 * MILLISECOND


def test_a_capture_that_another_thread_has_broken_is_reported(cuda: SimulatedCuda) -> None:
    event = cuda.current_stream().record_event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            event.query()
        except ForbiddenError as error:
            failures.append(error)

    def capture() -> None:
        with cuda.graph():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

    with pytest.raises(ForbiddenError, match="cuStreamEndCapture: 901"):
        capture()
    assert [str(error) for error in failures] == ["breaks the capture of a graph: cuEventQuery: 900"]


def test_each_simulated_gpu_begins_anew(cuda: SimulatedCuda) -> None:
    event = cuda.current_stream().record_event()
    cuda.advance(MILLISECOND)

    assert SimulatedCuda().now_ns == cuda.now_ns == 1_000 * MILLISECOND
    with pytest.raises(RuntimeError, match="cuEventQuery: 400"):
        event.query()


def test_a_simulated_tensor_says_where_it_is() -> None:
    places = [(tensor(8, name).is_cuda, tensor(8, name).get_device()) for name in ("cuda:3", "cuda", "cpu")]
    assert places == [(True, 3), (True, 0), (False, -1)]
