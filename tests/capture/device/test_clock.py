"""The CUDA clock on a simulated GPU: exact times, no waiting, no contexts, no broken graphs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from commtrace.capture.device.clock import CudaClock, CudaDriver, CudaMark
from commtrace.trace import schema
from tests.capture.recording import Recording, cuda_clock
from tests.capture.simulated_cuda import MICROSECOND, MILLISECOND, SimulatedCuda

pytestmark = pytest.mark.engine("python")


@pytest.fixture
def cuda() -> SimulatedCuda:
    return SimulatedCuda()


@pytest.fixture
def clock(cuda: SimulatedCuda) -> CudaClock:
    return cuda_clock(cuda)


def anchor_error_ns(clock: CudaClock) -> int:
    return clock._anchors[0].bracket_ns // 2


def resolved(clock: CudaClock, mark: Any) -> int | None:
    clock.refresh()
    return clock.resolve(mark)


def test_a_mark_is_the_time_at_which_the_stream_gets_there(cuda: SimulatedCuda, clock: CudaClock) -> None:
    before = clock.mark()
    _, end = cuda.current_stream().run(3 * MILLISECOND)
    after = clock.mark()
    launched = cuda.now_ns

    assert resolved(clock, before) == launched
    assert resolved(clock, after) is None
    cuda.advance(3 * MILLISECOND - 1)
    assert resolved(clock, after) is None
    cuda.advance(1)
    assert resolved(clock, after) == end


def test_a_mark_before_the_anchor_lies_before_it(cuda: SimulatedCuda, clock: CudaClock) -> None:
    mark = clock.mark()
    marked = cuda.now_ns
    cuda.advance(5 * MILLISECOND)  # the anchor is taken now

    assert resolved(clock, mark) == marked


def test_a_resolved_mark_stays_what_it_is(cuda: SimulatedCuda, clock: CudaClock) -> None:
    mark = clock.mark()
    time_ns = resolved(clock, mark)
    clock.mark()  # takes the event out of the pool and records it again
    cuda.advance(MILLISECOND)
    clock.refresh()

    assert clock.resolve(mark) == time_ns


def test_nothing_resolves_before_there_is_an_anchor(clock: CudaClock) -> None:
    assert clock.resolve(clock.mark()) is None


def test_events_are_used_again(cuda: SimulatedCuda, clock: CudaClock) -> None:
    pooled = []
    for _ in range(100):
        marks = [clock.mark() for _ in range(10)]
        pooled.append(len(clock._pools[0]) + len(marks))
        for mark in marks:
            resolved(clock, mark)

    assert len(clock._pools[0]) == 10
    assert set(pooled) == {10}


def test_times_stay_exact_in_a_long_run(cuda: SimulatedCuda, clock: CudaClock) -> None:
    clock.mark()
    clock.refresh()
    cuda.advance(7 * 3600 * 1000 * MILLISECOND)
    mark = clock.mark()
    marked = cuda.now_ns
    cuda.advance(500 * MILLISECOND)

    time_ns = resolved(clock, mark)

    assert time_ns is not None
    assert abs(time_ns - marked) <= 100  # seven hours in float32 milliseconds are 2 ms coarse


def test_an_anchor_read_slowly_does_not_replace_a_good_one(cuda: SimulatedCuda, clock: CudaClock) -> None:
    clock.mark()
    cuda.reading_ns = 4 * MICROSECOND
    clock.refresh()
    assert anchor_error_ns(clock) == 2 * MICROSECOND

    cuda.reading_ns = 5 * MILLISECOND  # another thread held the GIL
    clock.refresh()
    assert anchor_error_ns(clock) == 2 * MICROSECOND

    cuda.reading_ns = 0
    cuda.advance(60_000 * MILLISECOND)  # by now the clocks may have run 6 ms apart
    cuda.reading_ns = 5 * MILLISECOND
    clock.refresh()
    assert anchor_error_ns(clock) == 2_500 * MICROSECOND


def test_the_anchors_stream_is_changed_when_it_is_busy(cuda: SimulatedCuda, clock: CudaClock) -> None:
    mark = clock.mark()
    clock.refresh()
    simulated: Any = clock._streams[0]
    simulated.run(50 * MILLISECOND)  # torch gave the same stream to somebody else

    clock.refresh()  # finds that out
    clock.refresh()
    mark = clock.mark()
    marked = cuda.now_ns
    cuda.advance(MILLISECOND)

    assert resolved(clock, mark) == marked


def test_each_device_has_its_own_axis() -> None:
    cuda = SimulatedCuda(0, 1)
    clock = cuda_clock(cuda)
    first = clock.mark()
    with cuda.device(1):
        cuda.current_stream().run(2 * MILLISECOND)
        second = clock.mark()
    third = clock.mark(1)  # from outside: on device 1's stream
    start = cuda.now_ns
    cuda.advance(10 * MILLISECOND)

    assert [resolved(clock, mark) for mark in (first, second, third)] == [
        start,
        start + 2 * MILLISECOND,
        start + 2 * MILLISECOND,
    ]


def test_before_cuda_is_initialised_the_host_is_asked(cuda: SimulatedCuda, clock: CudaClock) -> None:
    cuda.initialized = False

    mark = clock.mark()

    assert mark == cuda.now_ns
    assert cuda.events == []
    assert not clock.is_capturing()
    assert resolved(clock, mark) == mark


def test_no_context_is_created_on_a_device_that_the_job_does_not_use() -> None:
    cuda = SimulatedCuda(3)  # this rank computes on device 3 and never set its device: 0 is current
    clock = cuda_clock(cuda)

    assert clock.mark() == cuda.now_ns
    communication = clock.mark(3)
    assert isinstance(communication, CudaMark)
    phase = clock.mark()  # by now it is known which device the job uses

    assert isinstance(phase, CudaMark)
    assert phase.device == 3
    assert {event.device for event in cuda.events} == {3}


def test_a_mark_in_a_graph_capture_is_the_hosts_time(cuda: SimulatedCuda, clock: CudaClock) -> None:
    clock.mark()
    with cuda.graph():
        assert clock.is_capturing()
        assert clock.mark() == cuda.now_ns


def test_the_harvester_does_not_break_a_capture_of_the_training_thread(cuda: SimulatedCuda, clock: CudaClock) -> None:
    mark = clock.mark()
    failures: list[BaseException] = []

    def harvest() -> None:
        try:
            assert resolved(clock, mark) == cuda.now_ns
        except BaseException as error:
            failures.append(error)

    with cuda.graph():
        harvester = threading.Thread(target=harvest)
        harvester.start()
        harvester.join()

    assert failures == []


def test_a_harvester_that_would_break_captures_asks_nothing(cuda: SimulatedCuda, clock: CudaClock) -> None:
    cuda.can_spare = False
    mark = clock.mark()

    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        clock.refresh()
    clock.switch_off()

    assert clock.mark() == cuda.now_ns
    with pytest.raises(RuntimeError, match="switched off"):
        clock.resolve(mark)


def test_a_machine_without_a_driver_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)

    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        CudaDriver().spare_captures()


def test_phases_are_timed_on_the_stream(cuda: SimulatedCuda, clock: CudaClock) -> None:
    recording = Recording(clock)
    tracer = recording.tracer
    tracer.begin_step(0)
    forward = tracer.enter(schema.FORWARD, "forward")
    start, end = cuda.current_stream().run(8 * MILLISECOND)
    tracer.leave(forward)
    tracer.begin_step(1)

    assert recording.rows() == []  # the device has not done it yet
    cuda.advance(8 * MILLISECOND)

    step, phase = sorted(recording.rows(), key=lambda row: row.kind)
    assert (phase.kind, phase.start, phase.end) == (schema.FORWARD, start, end)
    assert (step.kind, step.start, step.end) == (schema.STEP, start, end)
    assert (phase.timing, step.timing) == (schema.CUDA_EVENT_TIMING, schema.CUDA_EVENT_TIMING)


def test_a_phase_that_began_before_the_device_was_used_is_timed_by_the_host(
    cuda: SimulatedCuda, clock: CudaClock
) -> None:
    recording = Recording(clock)
    cuda.initialized = False
    phase = recording.tracer.enter(schema.USER, "set up")
    cuda.initialized = True
    recording.tracer.leave(phase)

    assert [row.timing for row in recording.rows()] == [schema.HOST_TIMING]


def test_outside_the_window_no_events_are_recorded(cuda: SimulatedCuda, clock: CudaClock) -> None:
    recording = Recording(clock, steps="5:6")
    for step in range(4):
        recording.tracer.begin_step(step)
        recording.tracer.leave(recording.tracer.enter(schema.FORWARD, "forward"))

    assert cuda.events == []
