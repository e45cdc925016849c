"""The simulated driver answers as the documentation of CUDA's driver says, at exact times."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native import simulated_driver as simulated
from tests.native.forked import in_child
from tests.native.simulated_driver import DriverError, SimulatedDriver
from tests.waiting import until

MILLISECOND = 1_000_000
SECOND = 1_000_000_000


def status_of(driver: SimulatedDriver, function: str, *arguments: Any) -> int:
    return int(getattr(driver.library, function)(*arguments))


def in_thread(action: Callable[[], Any]) -> Any:
    """Return what ``action`` returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


def as_job(driver: SimulatedDriver, action: Callable[[], Any]) -> Callable[[], Any]:
    """Have ``action`` run where the context of device 0 is current."""

    def run() -> Any:
        driver.set_current(0)
        return action()

    return run


# time, streams and events


def test_an_event_is_reached_when_the_work_before_it_is_over(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.kernel(stream, 3 * MILLISECOND)
    start, end = driver.kernel(stream, 2 * MILLISECOND)
    driver.record(event, stream)

    assert (start, end) == (driver.now_ns + 3 * MILLISECOND, driver.now_ns + 5 * MILLISECOND)
    driver.advance(5 * MILLISECOND - 1)
    assert not driver.query(event)
    driver.advance(1)
    assert driver.query(event)
    assert driver.event_ns(event) == driver.now_ns == end


def test_time_stands_until_it_is_moved_but_for_what_a_reading_takes(driver: SimulatedDriver) -> None:
    assert driver.host_ns() == driver.host_ns() == driver.now_ns == SECOND

    driver.reading_ns = 20
    assert [driver.host_ns(), driver.host_ns()] == [SECOND + 20, SECOND + 40]
    driver.now_ns = 5
    assert driver.now_ns == 5
    native_clock = ctypes.CFUNCTYPE(ctypes.c_int64)(driver.host_clock)
    assert native_clock() == 25


def test_real_time_is_the_clock_of_the_host(driver: SimulatedDriver) -> None:
    driver.use_real_time()
    stream, event = driver.create_stream(), driver.create_event()
    before = time.monotonic_ns()
    start, end = driver.kernel(stream, 20 * MILLISECOND)
    driver.record(event, stream)

    assert before <= start <= driver.host_ns()
    assert driver.query(event) == (driver.host_ns() >= end)
    until(lambda: driver.query(event))
    assert time.monotonic_ns() >= end


def test_elapsed_time_is_milliseconds_in_float32(driver: SimulatedDriver) -> None:
    stream, first, second = driver.create_stream(), driver.create_event(), driver.create_event()
    driver.record(first, stream)
    driver.kernel(stream, 3_600 * SECOND + 123_456)
    driver.record(second, stream)
    driver.advance(3_601 * SECOND)

    assert driver.elapsed_ms(first, second) == ctypes.c_float(3_600_000.123456).value == 3_600_000.0
    assert driver.elapsed_ms(second, first) == -3_600_000.0
    driver.set_drift_ppm(50)
    assert driver.elapsed_ms(first, second) == 3_600_180.0
    milliseconds = ctypes.c_float()
    driver.call("cuEventElapsedTime_v2", ctypes.byref(milliseconds), first, second)
    assert milliseconds.value == 3_600_180.0


def test_elapsed_time_needs_events_with_timing_that_are_reached(driver: SimulatedDriver) -> None:
    stream, start, end = driver.create_stream(), driver.create_event(), driver.create_event()
    milliseconds = ctypes.c_float()

    def elapsed(first: int, second: int) -> int:
        return status_of(driver, "cuEventElapsedTime", ctypes.byref(milliseconds), first, second)

    assert elapsed(start, end) == simulated.INVALID_HANDLE  # neither is recorded
    driver.record(start, stream)
    driver.kernel(stream, 1)
    driver.record(end, stream)
    assert elapsed(start, end) == simulated.NOT_READY
    without_timing = driver.create_event(simulated.DISABLE_TIMING)
    driver.record(without_timing, stream)
    driver.advance(1)
    assert elapsed(start, end) == simulated.SUCCESS
    assert elapsed(start, without_timing) == simulated.INVALID_HANDLE


def test_an_event_that_is_not_recorded_stands_for_no_work(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    assert driver.query(event)

    driver.wait_event(stream, event)
    assert driver.position_ns(stream) == driver.now_ns


def test_a_stream_waits_for_an_event_as_it_was_when_the_wait_was_asked_for(driver: SimulatedDriver) -> None:
    stream, another, event = driver.create_stream(), driver.create_stream(), driver.create_event()
    _, first = driver.kernel(another, 2 * MILLISECOND)
    driver.record(event, another)
    driver.wait_event(stream, event)
    driver.kernel(another, 9 * MILLISECOND)
    driver.record(event, another)

    assert driver.kernel(stream, MILLISECOND) == (first, first + MILLISECOND)


def test_a_stream_follows_another_one(driver: SimulatedDriver) -> None:
    stream, another = driver.create_stream(), driver.pool_stream(0)
    _, end = driver.kernel(another, MILLISECOND)
    driver.follow(stream, another)
    driver.kernel(another, MILLISECOND)
    assert driver.position_ns(stream) == end

    driver.wait_until(stream, end + 5)
    driver.wait_until(stream, end + 3)
    assert driver.position_ns(stream) == end + 5
    assert driver.live_events() == []
    assert driver.live_streams() == [stream]  # torch destroys none of its pool


def test_work_starts_late_where_the_device_is_late(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.set_lateness_ns(stream, 7_000)

    driver.record(event, stream)
    assert driver.event_ns(event) == driver.now_ns + 7_000
    start, end = driver.kernel(stream, MILLISECOND)
    assert start == driver.now_ns + 7_000
    assert driver.kernel(stream, 1)[0] == end  # the device is busy: it is not late beyond that


def test_a_kernel_that_never_ends_is_never_reached(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.kernel(stream, simulated.NEVER_NS)
    driver.kernel(stream, SECOND)
    driver.record(event, stream)
    driver.advance(10**6 * SECOND)

    assert not driver.query(event)
    assert status_of(driver, "cuEventSynchronize", event) == simulated.LAUNCH_TIMEOUT
    driver.stop_work(stream)
    assert driver.position_ns(stream) == driver.now_ns


@pytest.mark.parametrize("handle", [0, simulated.LEGACY_STREAM])
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(driver: SimulatedDriver, handle: int) -> None:
    blocking, non_blocking = driver.create_stream(0), driver.create_stream(simulated.NON_BLOCKING)
    _, first = driver.kernel(blocking, MILLISECOND)
    start, second = driver.kernel(handle, MILLISECOND)

    assert start == first
    assert driver.position_ns(blocking) == second
    assert driver.position_ns(non_blocking) == driver.now_ns


def test_the_default_stream_of_a_thread_is_its_own_where_a_program_was_compiled_so(driver: SimulatedDriver) -> None:
    event = driver.create_event()
    _, end = driver.kernel(simulated.PER_THREAD_STREAM, MILLISECOND)

    driver.call("cuEventRecord_ptsz", event, 0)
    assert driver.event_ns(event) == end
    in_thread(as_job(driver, lambda: driver.call("cuEventRecord_ptsz", event, 0)))
    assert driver.event_ns(event) == driver.now_ns


# devices, contexts and handles


def test_nothing_works_before_it_is_initialised(built_driver: SimulatedDriver) -> None:
    built_driver.reset(devices=3)
    version, count = ctypes.c_int(), ctypes.c_int()

    assert status_of(built_driver, "cuDriverGetVersion", ctypes.byref(version)) == simulated.SUCCESS
    assert version.value == 13_000
    assert status_of(built_driver, "cuDeviceGetCount", ctypes.byref(count)) == simulated.NOT_INITIALIZED
    built_driver.call("cuInit", 0)
    built_driver.call("cuDeviceGetCount", ctypes.byref(count))
    assert count.value == 3
    assert status_of(built_driver, "cuDeviceGet", ctypes.byref(count), 3) == simulated.INVALID_DEVICE


def test_a_context_is_current_per_thread(driver: SimulatedDriver) -> None:
    handle = simulated.HANDLE()
    driver.use_device(1)

    assert driver.current_device() == 0
    assert in_thread(driver.current_device) is None
    assert status_of(driver, "cuCtxPushCurrent_v2", driver.library.simulated_context(1)) == simulated.SUCCESS
    assert driver.current_device() == 1
    driver.call("cuCtxPopCurrent_v2", ctypes.byref(handle))
    assert handle.value == driver.library.simulated_context(1)
    assert driver.current_device() == 0
    driver.call("cuCtxSetCurrent", 0)
    driver.call("cuCtxGetCurrent", ctypes.byref(handle))
    assert handle.value == 0
    assert status_of(driver, "cuCtxPopCurrent_v2", ctypes.byref(handle)) == simulated.INVALID_CONTEXT


def test_only_devices_in_use_have_a_context(driver: SimulatedDriver) -> None:
    flags, is_active = simulated.UNSIGNED(), ctypes.c_int()

    def is_in_use(device: int) -> bool:
        driver.call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    assert [is_in_use(0), is_in_use(2)] == [True, False]
    assert status_of(driver, "cuCtxSetCurrent", driver.library.simulated_context(2)) == simulated.INVALID_CONTEXT
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(simulated.HANDLE()), 2)  # which nobody should call
    assert is_in_use(2)
    assert driver.calls("cuDevicePrimaryCtxRetain") == 1


def test_events_and_streams_belong_to_the_device_that_was_current(driver: SimulatedDriver) -> None:
    driver.use_device(1)
    event, stream = driver.create_event(), driver.create_stream()
    driver.set_current(1)
    beyond = driver.create_stream()
    context = simulated.HANDLE()

    assert status_of(driver, "cuEventRecord", event, beyond) == simulated.INVALID_HANDLE
    assert status_of(driver, "cuEventRecord", event, 0) == simulated.INVALID_HANDLE  # the stream of device 1
    assert status_of(driver, "cuEventRecord", event, stream) == simulated.SUCCESS
    driver.call("cuStreamGetCtx", stream, ctypes.byref(context))
    assert context.value == driver.library.simulated_context(0)
    driver.set_current(None)
    assert status_of(driver, "cuEventRecord", event, 0) == simulated.INVALID_CONTEXT
    assert status_of(driver, "cuEventCreate", ctypes.byref(context), 0) == simulated.INVALID_CONTEXT


def test_handles_that_are_gone_or_invented_are_refused(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.call("cuStreamDestroy_v2", stream)
    driver.call("cuEventDestroy_v2", event)

    for gone in (event, stream, 12_345, 2**64 - 1):
        assert status_of(driver, "cuEventQuery", gone) == simulated.INVALID_HANDLE
        assert status_of(driver, "cuEventDestroy_v2", gone) == simulated.INVALID_HANDLE
        assert status_of(driver, "cuStreamQuery", gone) == simulated.INVALID_HANDLE
    assert driver.create_event() != event  # the same place, another handle
    legacy = driver.legacy_stream(0)
    assert status_of(driver, "cuStreamDestroy_v2", legacy) == simulated.INVALID_HANDLE


def test_live_events_and_streams_are_listed(driver: SimulatedDriver) -> None:
    events = [driver.create_event() for _ in range(3)]
    streams = [driver.create_stream() for _ in range(2)]
    driver.kernel(0, 1)  # the legacy stream is there without having been created
    driver.call("cuEventDestroy_v2", events.pop(1))
    driver.call("cuStreamDestroy_v2", streams.pop(0))

    assert sorted(driver.live_events()) == sorted(events)
    assert driver.live_streams() == streams
    driver.reset()
    assert driver.live_events() == driver.live_streams() == []
    driver.initialize()
    assert status_of(driver, "cuEventQuery", events[0]) == simulated.INVALID_HANDLE


# failures


def test_a_function_fails_from_a_call_on(driver: SimulatedDriver) -> None:
    event = driver.create_event()
    driver.fail("cuEventQuery", 719, call=3)

    assert [status_of(driver, "cuEventQuery", event) for _ in range(4)] == [0, 0, 719, 719]
    driver.fail("cuEventQuery", 0)
    assert driver.query(event)
    assert driver.calls("cuEventQuery") == 5


def test_after_an_illegal_address_everything_fails(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.break_device()

    with pytest.raises(DriverError) as caught:
        driver.record(event, stream)
    assert caught.value.status == simulated.ILLEGAL_ADDRESS
    assert status_of(driver, "cuEventQuery", event) == simulated.ILLEGAL_ADDRESS
    assert status_of(driver, "cuCtxSetCurrent", 0) == simulated.ILLEGAL_ADDRESS


def test_a_driver_that_is_stuck_in_a_query_answers_other_calls(driver: SimulatedDriver) -> None:
    event = driver.create_event()
    driver.hold("cuEventQuery")
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(driver.query(event)))
    thread.start()
    until(driver.held_calls)

    driver.record(event, 0)
    assert answers == []
    driver.release("cuEventQuery")
    thread.join()
    assert answers == [True]


def test_a_call_costs_what_it_is_said_to_cost(driver: SimulatedDriver) -> None:
    event = driver.create_event()
    driver.set_cost_ns("cuEventRecord", 5 * MILLISECOND)

    before = time.monotonic_ns()
    driver.record(event, 0)
    assert time.monotonic_ns() - before >= 5 * MILLISECOND


def test_synchronisation_is_counted_and_takes_the_time_that_it_waits(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    _, end = driver.kernel(stream, MILLISECOND)
    driver.record(event, stream)

    driver.call("cuEventSynchronize", event)
    assert driver.now_ns == end
    _, end = driver.kernel(stream, MILLISECOND)
    driver.call("cuStreamSynchronize", stream)
    assert driver.now_ns == end
    _, end = driver.kernel(stream, MILLISECOND)
    driver.call("cuCtxSynchronize")
    assert driver.now_ns == end
    synchronisations = ["cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"]
    assert [driver.calls(function) for function in synchronisations] == [1, 1, 1]


def test_a_real_synchronisation_waits_and_keeps_nobody_up(driver: SimulatedDriver) -> None:
    driver.use_real_time()
    stream, event = driver.create_stream(), driver.create_event()
    _, end = driver.kernel(stream, 200 * MILLISECOND)
    thread = threading.Thread(target=as_job(driver, lambda: driver.call("cuStreamSynchronize", stream)))
    thread.start()
    until(lambda: driver.calls("cuStreamSynchronize"), every=0.001)

    driver.record(event, stream)
    assert time.monotonic_ns() < end, "this machine stood still for 0.2 s"
    thread.join()
    assert time.monotonic_ns() >= end
    assert driver.query(event)


def test_a_forbidden_function_ends_the_process(driver: SimulatedDriver) -> None:
    program = f"""
import ctypes
library = ctypes.CDLL({str(driver.path)!r})
library.cuInit(0)
library.simulated_forbid(library.simulated_function(b"cuCtxSynchronize"), True)
library.cuCtxSynchronize()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert ended.returncode == -signal.SIGABRT
    assert "cuCtxSynchronize was called" in ended.stderr


# captures and graphs


def captured(driver: SimulatedDriver, mode: int = simulated.GLOBAL) -> int:
    """A stream that is being captured."""
    stream = driver.create_stream()
    driver.begin_capture(stream, mode)
    return stream


def test_captured_work_does_not_run_before_its_replay(driver: SimulatedDriver) -> None:
    stream = captured(driver)
    driver.kernel(stream, 3 * MILLISECOND)
    driver.kernel(stream, 2 * MILLISECOND)
    assert driver.position_ns(stream) == driver.now_ns
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    driver.call("cuGraphDestroy", graph)
    driver.kernel(stream, MILLISECOND)
    started = driver.position_ns(stream)

    driver.launch_graph(executable, stream)
    assert driver.position_ns(stream) == started + 5 * MILLISECOND
    assert driver.node_times(executable, 1) == (started + 3 * MILLISECOND, started + 5 * MILLISECOND)


def test_launches_of_a_graph_run_one_after_another_on_whichever_streams(driver: SimulatedDriver) -> None:
    stream = captured(driver)
    driver.kernel(stream, MILLISECOND)
    executable = driver.instantiate(driver.end_capture(stream))
    another = driver.create_stream()

    driver.launch_graph(executable, stream)
    driver.launch_graph(executable, another)
    assert driver.position_ns(another) == driver.now_ns + 2 * MILLISECOND


def test_branches_of_a_graph_run_side_by_side(driver: SimulatedDriver) -> None:
    stream, beside = captured(driver), driver.create_stream()
    fork, join = driver.create_event(), driver.create_event()
    driver.kernel(stream, MILLISECOND)
    driver.record(fork, stream)
    driver.wait_event(beside, fork)
    assert driver.capture_status(beside) == simulated.CAPTURED
    driver.kernel(beside, 5 * MILLISECOND)
    driver.record(join, beside)
    driver.kernel(stream, MILLISECOND)
    driver.wait_event(stream, join)
    driver.kernel(stream, MILLISECOND)
    graph = driver.end_capture(stream)
    nodes = driver.nodes(graph)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, stream)

    assert driver.capture_status(beside) == simulated.NOT_CAPTURED
    dependencies = [[nodes.index(node) for node in driver.dependencies(node)] for node in nodes]
    assert dependencies == [[], [0], [0], [2, 1]]
    starts = [(driver.node_times(executable, node)[0] - driver.now_ns) // MILLISECOND for node in range(4)]
    assert starts == [0, 1, 1, 6]


def test_a_capture_tells_its_graph_and_what_the_next_node_depends_on(driver: SimulatedDriver) -> None:
    stream, event = captured(driver), driver.create_event()
    driver.kernel(stream, MILLISECOND)
    status, identity, graph, count = ctypes.c_int(), simulated.HANDLE(), simulated.HANDLE(), ctypes.c_size_t()
    dependencies, leaf = simulated.HANDLES(), simulated.HANDLE()
    arguments = [ctypes.byref(each) for each in (status, identity, graph, dependencies, count)]
    driver.call("cuStreamGetCaptureInfo_v2", stream, *arguments)

    assert status.value == simulated.CAPTURED
    assert identity.value > 0
    assert dependencies[: count.value] == driver.nodes(graph.value)
    driver.call("cuGraphAddEventRecordNode", ctypes.byref(leaf), graph, dependencies, count, event)
    _, node = driver.nodes(graph.value)
    assert node == leaf.value
    driver.call("cuGraphNodeGetType", leaf, ctypes.byref(status))
    assert status.value == 7  # CU_GRAPH_NODE_TYPE_EVENT_RECORD
    driver.call("cuStreamGetCaptureInfo_v2", stream, *arguments)
    assert count.value == 1  # the stream does not wait for a leaf
    executable = driver.instantiate(driver.end_capture(stream))  # nor has it to be joined
    driver.launch_graph(executable, stream)
    assert driver.event_ns(event) == driver.now_ns + MILLISECOND


def test_an_external_event_is_that_of_the_last_launch_from_its_enqueueing_on(driver: SimulatedDriver) -> None:
    stream, event = captured(driver), driver.create_event()
    driver.kernel(stream, 4 * MILLISECOND)
    driver.record(event, stream, simulated.EXTERNAL)
    executable = driver.instantiate(driver.end_capture(stream))
    assert driver.event_ns(event) is None

    driver.launch_graph(executable, stream)
    driver.advance(4 * MILLISECOND)
    assert driver.query(event)
    ended = driver.now_ns
    driver.launch_graph(executable, stream)
    assert not driver.query(event)  # the first launch's is lost
    assert driver.event_ns(event) == ended + 4 * MILLISECOND


def test_a_graph_waits_for_an_external_event(driver: SimulatedDriver) -> None:
    stream, another, event = captured(driver), driver.create_stream(), driver.create_event()
    driver.wait_event(stream, event, simulated.EXTERNAL)
    driver.kernel(stream, MILLISECOND)
    executable = driver.instantiate(driver.end_capture(stream))
    _, end = driver.kernel(another, 9 * MILLISECOND)
    driver.record(event, another)

    driver.launch_graph(executable, stream)
    assert driver.node_times(executable, 1) == (end, end + MILLISECOND)


def test_an_external_record_is_for_captures_only(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()

    assert status_of(driver, "cuEventRecordWithFlags", event, stream, simulated.EXTERNAL) == simulated.INVALID_VALUE


@pytest.mark.parametrize(
    ("capture_mode", "thread_mode", "breaks"),
    [
        (simulated.GLOBAL, simulated.GLOBAL, True),
        (simulated.GLOBAL, simulated.THREAD_LOCAL, False),
        (simulated.GLOBAL, simulated.RELAXED, False),
        (simulated.THREAD_LOCAL, simulated.GLOBAL, False),
        (simulated.RELAXED, simulated.GLOBAL, False),
    ],
)
def test_a_query_of_another_thread_breaks_a_capture_by_the_modes_of_both(
    driver: SimulatedDriver, capture_mode: int, thread_mode: int, breaks: bool
) -> None:
    event = driver.create_event()
    driver.record(event, driver.create_stream())
    stream = captured(driver, capture_mode)

    def ask() -> int:
        driver.exchange_capture_mode(thread_mode)
        return status_of(driver, "cuEventQuery", event)

    assert in_thread(as_job(driver, ask)) == (simulated.CAPTURE_UNSUPPORTED if breaks else simulated.SUCCESS)
    assert driver.capture_status(stream) == (simulated.INVALIDATED if breaks else simulated.CAPTURED)
    graph = simulated.HANDLE(1)
    ended = status_of(driver, "cuStreamEndCapture", stream, ctypes.byref(graph))
    assert ended == (simulated.CAPTURE_INVALIDATED if breaks else simulated.SUCCESS)
    assert (graph.value == 0) == breaks
    assert driver.capture_status(stream) == simulated.NOT_CAPTURED


@pytest.mark.parametrize("thread_mode", [simulated.GLOBAL, simulated.THREAD_LOCAL])
def test_the_capturing_thread_may_not_query(driver: SimulatedDriver, thread_mode: int) -> None:
    event = driver.create_event()
    driver.exchange_capture_mode(thread_mode)
    stream = captured(driver, simulated.THREAD_LOCAL)

    assert status_of(driver, "cuEventQuery", event) == simulated.CAPTURE_UNSUPPORTED
    with pytest.raises(DriverError) as caught:
        driver.kernel(stream, 1)
    assert caught.value.status == simulated.CAPTURE_INVALIDATED


def test_a_mode_is_of_its_thread_and_is_given_back(driver: SimulatedDriver) -> None:
    assert driver.exchange_capture_mode(simulated.RELAXED) == simulated.GLOBAL
    assert driver.exchange_capture_mode(simulated.THREAD_LOCAL) == simulated.RELAXED
    assert in_thread(as_job(driver, lambda: driver.exchange_capture_mode(simulated.GLOBAL))) == simulated.GLOBAL
    mode = ctypes.c_int()
    without_context = in_thread(lambda: status_of(driver, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)))
    assert without_context == simulated.INVALID_CONTEXT


def test_the_legacy_stream_cannot_be_asked_while_a_blocking_stream_is_captured(driver: SimulatedDriver) -> None:
    stream, event, status = driver.create_stream(0), driver.create_event(), ctypes.c_int()
    driver.begin_capture(stream, simulated.THREAD_LOCAL)

    asked = in_thread(as_job(driver, lambda: status_of(driver, "cuStreamIsCapturing", 0, ctypes.byref(status))))
    assert asked == simulated.CAPTURE_IMPLICIT
    assert driver.capture_status(stream) == simulated.CAPTURED
    assert in_thread(as_job(driver, lambda: status_of(driver, "cuEventRecord", event, 0))) == simulated.CAPTURE_IMPLICIT
    assert driver.capture_status(stream) == simulated.INVALIDATED


def test_the_legacy_stream_is_free_while_torch_captures(driver: SimulatedDriver) -> None:
    captured(driver)  # non-blocking, as all of torch's are

    assert driver.capture_status(0) == simulated.NOT_CAPTURED
    driver.record(driver.create_event(), 0)


def test_the_legacy_stream_is_not_captured(driver: SimulatedDriver) -> None:
    assert status_of(driver, "cuStreamBeginCapture_v2", 0, simulated.GLOBAL) == simulated.CAPTURE_UNSUPPORTED


def test_a_captured_event_is_no_time(driver: SimulatedDriver) -> None:
    stream, event, milliseconds = captured(driver, simulated.RELAXED), driver.create_event(), ctypes.c_float()
    driver.exchange_capture_mode(simulated.RELAXED)
    driver.record(event, stream)

    assert status_of(driver, "cuEventElapsedTime", ctypes.byref(milliseconds), event, event) == simulated.INVALID_VALUE
    assert driver.capture_status(stream) == simulated.CAPTURED
    assert status_of(driver, "cuEventQuery", event) == simulated.CAPTURED_EVENT
    assert driver.capture_status(stream) == simulated.INVALIDATED


def test_a_graph_depends_on_nothing_outside_of_it(driver: SimulatedDriver) -> None:
    stream, outside, event = captured(driver), driver.create_stream(), driver.create_event()
    driver.record(event, outside)

    assert status_of(driver, "cuStreamWaitEvent", stream, event, 0) == simulated.CAPTURE_ISOLATION
    assert driver.capture_status(stream) == simulated.INVALIDATED


def test_two_captures_do_not_become_one(driver: SimulatedDriver) -> None:
    stream, another, event = captured(driver), captured(driver), driver.create_event()
    driver.record(event, another)

    assert status_of(driver, "cuStreamWaitEvent", stream, event, 0) == simulated.CAPTURE_MERGE


def test_a_capture_ends_where_it_began(driver: SimulatedDriver) -> None:
    stream, beside, event, graph = captured(driver), driver.create_stream(), driver.create_event(), simulated.HANDLE()

    def end(which: int) -> int:
        return status_of(driver, "cuStreamEndCapture", which, ctypes.byref(graph))

    driver.record(event, stream)
    driver.wait_event(beside, event)
    assert end(beside) == simulated.CAPTURE_UNMATCHED
    assert in_thread(as_job(driver, lambda: end(stream))) == simulated.CAPTURE_WRONG_THREAD
    driver.kernel(beside, MILLISECOND)  # and the first stream does not wait for it
    assert end(stream) == simulated.CAPTURE_UNJOINED
    assert driver.capture_status(beside) == simulated.NOT_CAPTURED


# threads and processes


def test_many_threads_share_the_device(driver: SimulatedDriver) -> None:
    threads, turns = 8, 300
    identities: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            driver.set_current(0)
            identities.append(threading.get_native_id())
            stream, start, end = driver.create_stream(), driver.create_event(), driver.create_event()
            for _ in range(turns):
                driver.record(start, stream)
                _, over = driver.kernel(stream, MILLISECOND)
                driver.record(end, stream)
                while not driver.query(end):
                    driver.advance(MILLISECOND // 2)
                before, after = driver.event_ns(start), driver.event_ns(end)
                assert before is not None
                assert after is not None
                assert after >= over  # later, if another thread let time pass
                assert driver.elapsed_ms(start, end) == ctypes.c_float((after - before) / MILLISECOND).value
            driver.call("cuEventDestroy_v2", start)
            driver.call("cuEventDestroy_v2", end)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert failures == []
    assert driver.live_events() == []
    assert len(driver.live_streams()) == threads
    assert driver.calls("cuEventRecord") == 2 * threads * turns
    assert sum(driver.calls("cuEventRecord", thread) for thread in identities) == 2 * threads * turns
    assert driver.calls("cuEventRecord", threading.get_native_id()) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_knows(driver: SimulatedDriver) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.hold("cuStreamQuery")
    threads = [
        threading.Thread(target=as_job(driver, lambda: status_of(driver, "cuStreamQuery", stream))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: driver.held_calls() == 2)

    def all_is_refused() -> bool:
        statuses = [
            status_of(driver, "cuEventQuery", event),
            status_of(driver, "cuEventRecord", event, stream),
            status_of(driver, "cuInit", 0),
        ]
        return statuses == [simulated.NOT_INITIALIZED] * 3 and driver.host_ns() == SECOND

    assert all(in_child(all_is_refused) for _ in range(3))
    driver.release("cuStreamQuery")
    for thread in threads:
        thread.join()

    assert driver.calls_in_children() == {"cuInit": 3, "cuEventRecord": 3, "cuEventQuery": 3}
    assert driver.calls("cuEventQuery") == 0
    assert driver.query(event)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_without_a_device_may_use_one(built_driver: SimulatedDriver) -> None:
    built_driver.reset()

    def computes() -> bool:
        built_driver.initialize()
        event = built_driver.create_event()
        built_driver.record(event, built_driver.create_stream())
        return built_driver.query(event)

    assert in_child(computes)
    assert built_driver.calls_in_children() == {}
    assert status_of(built_driver, "cuEventQuery", 1) == simulated.NOT_INITIALIZED


def test_another_program_finds_it_as_the_driver(driver: SimulatedDriver) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.path.parent)}
    program = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"

    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )

    assert printed.stdout == "0\n"


def test_each_function_of_the_table_is_in_the_library(driver: SimulatedDriver) -> None:
    missing = [name for name in simulated.DRIVER_FUNCTIONS if not hasattr(driver.library, name)]
    assert missing == []
    assert {"cuEventQuery", "cuEventRecordWithFlags", "cuGraphLaunch"} <= set(driver.functions())
    with pytest.raises(AssertionError, match="leave out _v2"):
        driver.calls("cuEventElapsedTime_v2")


def test_it_is_declared_as_the_real_one(built_driver: SimulatedDriver, tmp_path: Path) -> None:
    header = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include", "cuda.h")
    if not header.is_file():
        pytest.skip("no cuda.h is there to compare with: set CUDA_HOME")
    for source in simulated.SOURCES.iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    internal = "#define __CUDA_API_VERSION_INTERNAL 1"  # with older versions of functions
    (tmp_path / "cuda_types.h").write_text(f'{internal}\n#include "{header}"\n')
    compiler = simulated.compiler()
    assert compiler is not None

    command = [compiler, "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", *map(str, tmp_path.glob("*.c"))]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert compiled.stderr == ""


def test_without_a_compiler_tests_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    simulated.library_path.cache_clear()

    try:
        with pytest.raises(pytest.skip.Exception, match="no C compiler"):
            simulated.library_path()
    finally:
        simulated.library_path.cache_clear()
