"""True ends of communication that was over before anybody waited for it, on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.capture.device.cuda_clock import CudaClock
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.device.flight_recorder import FlightRecorder
from commtrace.capture.device.hidden_ends import ANSWER_NS, HOLD_NS, HiddenEnds
from commtrace.capture.records import DeviceCall
from commtrace.trace import schema
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor

pytestmark = pytest.mark.usefixtures("world")
CUDA, NCCL, UNKNOWN = schema.CUDA_EVENT_TIMING, schema.NCCL_TIMING, schema.UNKNOWN_TIMING
MEASURED_STEPS = "1:9"


class Job:
    """A training process whose NCCL measures how long its operations take, captured from step 1 on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, steps: str = MEASURED_STEPS) -> None:
        self.cuda = SimulatedCuda()
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.clock = CudaClock(self.cuda, self.cuda, self.cuda.host_ns)
        self.recording = Recording(self.clock, steps=steps)
        self.tracer = self.recording.tracer
        self.group: Any = distributed_c10d._get_default_group()
        self.devices: Any = None

    def listen(self, devices: DeviceCalls) -> None:
        self.devices = devices
        times = FlightRecorder(self.nccl.dump)
        devices.hidden_ends = HiddenEnds(self.tracer, times, lambda: self.cuda.now_ns, self.nccl.system_ns)

    def launch(self) -> Any:
        return self.group.allreduce([tensor(8)], options(True))

    def compute(self, duration_ns: int) -> None:
        self.cuda.current_stream().run(duration_ns)

    def hidden(self, compute_ns: int = 8 * MILLISECOND) -> None:
        """An operation of 1 ms behind compute that takes longer."""
        work = self.launch()
        self.compute(compute_ns)
        work.wait()

    def stalling(self) -> None:
        """An operation that is waited for at once: after it the queue is known to be empty."""
        self.launch().wait()

    def answer(self) -> None:
        """Let the device do all its work, and so much time pass that durations are asked for."""
        self.cuda.advance(40 * MILLISECOND)
        self.recording.rows()
        self.cuda.advance(HOLD_NS)
        self.recording.rows()

    def times(self) -> list[tuple[int, int, int]]:
        rows = sorted(self.recording.communications(), key=lambda row: row.id)
        return [(row.start, row.end, row.timing) for row in rows]

    def mark(self) -> dict[str, Any]:
        details = [row[-1] for row in self.recording.sink.rows if row[0] == schema.MARK and row[1] == "hidden_ends"]
        mark: dict[str, Any] = json.loads(details[-1])
        return mark


@pytest.fixture(params=["nccl", "nccl2"])
def job(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(monkeypatch, request.param)
    with job.recording.capturing(job.clock) as capture:
        assert capture.devices is not None
        job.listen(capture.devices)
        job.tracer.begin_step(1)
        yield job


def test_hidden_operations_end_when_their_backend_says(job: Job) -> None:
    job.stalling()
    job.hidden()
    works = [job.launch(), job.launch()]
    job.compute(8 * MILLISECOND)
    for work in works:
        work.wait()
    job.answer()

    assert job.times() == [
        (*job.nccl.intervals[0], CUDA), *((*interval, NCCL) for interval in job.nccl.intervals[1:])
    ]  # fmt: skip
    assert job.mark() == {
        "source": "flight recorder", "hidden": 3, "known": 3, "refused": 0,
        "compared": 0, "median_difference_ns": None, "largest_difference_ns": None, "took_ns": 0,
    }  # fmt: skip
    assert job.recording.warnings() == []


def test_an_end_that_a_stall_shows_is_compared_with_the_backends_duration(job: Job) -> None:
    job.stalling()
    for _ in range(3):
        job.stalling()
    number, created, (start, end) = job.nccl.recorded[-1]  # type: ignore[misc]
    job.nccl.recorded[-1] = (number, created, (start, end - MILLISECOND // 4))
    job.answer()

    assert job.times() == [(*interval, CUDA) for interval in job.nccl.intervals]
    mark = job.mark()
    assert (mark["hidden"], mark["compared"]) == (0, 3)
    assert (mark["median_difference_ns"], mark["largest_difference_ns"]) == (0, MILLISECOND // 4)


def test_what_ran_before_the_first_recorded_operation_may_delay_it(job: Job) -> None:
    job.tracer.recording = False
    before = [job.launch() for _ in range(4)]
    job.tracer.recording = True
    job.hidden()
    for work in before:
        work.wait()
    job.hidden()
    job.answer()

    _, bound, timing = job.times()[0]
    assert timing == UNKNOWN
    assert bound >= job.nccl.intervals[4][1]
    assert job.times()[1] == (*job.nccl.intervals[5], NCCL)


def test_behind_an_operation_that_nobody_has_waited_for_nothing_is_certain(job: Job) -> None:
    job.stalling()
    late = job.launch()
    job.hidden()
    job.answer()
    late.wait()
    job.answer()

    assert [timing for _, _, timing in job.times()] == [CUDA, UNKNOWN, UNKNOWN]
    assert all(end >= interval[1] for (_, end, _), interval in zip(job.times(), job.nccl.intervals, strict=True))


def test_a_later_operation_bounds_those_before_it_on_the_stream(job: Job) -> None:
    job.stalling()
    first, second = job.launch(), job.launch()
    job.nccl.recorded.clear()  # overwritten
    second.wait()
    job.compute(9 * MILLISECOND)
    first.wait()
    job.answer()

    assert [(end, timing) for _, end, timing in job.times()][1:] == [
        (job.nccl.intervals[2][1], UNKNOWN), (job.nccl.intervals[2][1], CUDA),
    ]  # fmt: skip


def test_a_duration_that_would_end_behind_the_wait_is_refused(job: Job) -> None:
    job.stalling()
    job.hidden(compute_ns=2 * MILLISECOND)
    number, created, (start, end) = job.nccl.recorded[-1]  # type: ignore[misc]
    job.nccl.recorded[-1] = (number, created, (start, end + 5 * MILLISECOND))
    job.answer()

    start, end = job.nccl.intervals[1]
    assert job.times()[1] == (start, end + MILLISECOND, UNKNOWN)
    assert (job.mark()["hidden"], job.mark()["known"], job.mark()["refused"]) == (1, 0, 1)


def test_a_bracket_has_one_end(job: Job) -> None:
    device = torch.device("cuda")
    job.stalling()
    job.group._start_coalescing(device)
    job.group.send([tensor(8)], 2, 0)
    job.group.recv([tensor(8)], 2, 0)
    work = job.group._end_coalescing(device)
    job.compute(9 * MILLISECOND)
    work.wait()
    job.hidden()
    job.answer()

    assert job.times()[1:] == [
        (*job.nccl.intervals[1], NCCL), (*job.nccl.intervals[1], NCCL), (*job.nccl.intervals[2], NCCL),
    ]  # fmt: skip
    assert job.mark()["hidden"] == 2


def test_synchronous_operations_are_on_another_stream(job: Job) -> None:
    job.stalling()
    job.group.allreduce([tensor(8)], options(False))
    job.hidden()
    job.answer()

    assert [timing for _, _, timing in job.times()] == [CUDA, CUDA, NCCL]


def test_rows_are_held_back_for_some_seconds_and_at_most_until_the_recording_ends(job: Job) -> None:
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    assert job.times() == []
    job.cuda.advance(HOLD_NS - MILLISECOND)
    assert job.times() == []
    job.devices.forget_all()
    job.cuda.advance(ANSWER_NS - 2 * MILLISECOND)
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)

    assert len(job.times()) == 2


def test_at_the_end_of_the_recording_nothing_is_left_behind(job: Job) -> None:
    job.stalling()
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    job.devices.forget_all()
    assert job.times() == []
    job.cuda.advance(ANSWER_NS)

    assert [timing for _, _, timing in job.times()] == [CUDA, NCCL]
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    assert len(job.times()) == 3  # nobody will ask any more


def test_other_steps_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "nccl2", steps="1:2")
    with job.recording.capturing(job.clock) as capture:
        assert capture.devices is not None
        job.listen(capture.devices)
        job.tracer.begin_step(3)
        job.tracer.recording = True
        job.hidden()
        job.cuda.advance(40 * MILLISECOND)

        assert [timing for _, _, timing in job.times()] == [UNKNOWN]


def test_a_recorder_without_durations_is_told_once(job: Job) -> None:
    for _ in range(2):
        job.hidden()
        job.nccl.recorded.clear()
        job.answer()

    (warning,) = job.recording.warnings()
    assert "upper bounds" in warning
    assert [timing for _, _, timing in job.times()] == [UNKNOWN, UNKNOWN]


def test_a_source_that_fails_costs_no_row(job: Job) -> None:
    class Failing:
        name = "failing"

        def durations_ns(self, calls: Sequence[DeviceCall]) -> dict[int, int]:
            raise RuntimeError("no dump")

    assert job.devices.hidden_ends is not None
    job.devices.hidden_ends = HiddenEnds(job.tracer, Failing(), lambda: job.cuda.now_ns, job.nccl.system_ns)
    job.stalling()
    job.hidden()
    job.answer()
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)

    assert [timing for _, _, timing in job.times()] == [CUDA, UNKNOWN, UNKNOWN]
    assert len(job.recording.warnings()) == 1


@pytest.mark.parametrize("value", ["", "1"])
def test_only_where_nccl_measures_is_anything_held_back(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", value)
    job = Job(monkeypatch, "nccl2")

    assert (DeviceCalls(job.tracer, job.clock).hidden_ends is not None) == bool(value)
