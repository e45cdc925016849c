"""Communication of a simulated GPU: the true interval on its stream, and the stall at each wait."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.capture.collectives import dead_works
from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.collectives.functional import FUNCTIONAL, FunctionalCapture, FunctionalWaits, storage_of
from commtrace.capture.collectives.operations import OPERATIONS
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.collectives.untraced_paths import CAPTURED_COMMUNICATION
from commtrace.capture.device.clock import CudaClock
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.device.facts import CallFacts
from commtrace.capture.device.placement import DeviceOperations, PlacedTimes
from commtrace.capture.records import Launch, next_id
from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MICROSECOND, MILLISECOND, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl, SimulatedWork, options, tensor

pytestmark = pytest.mark.usefixtures("world")
CUDA, HOST, UNKNOWN = schema.CUDA_EVENT_TIMING, schema.HOST_TIMING, schema.UNKNOWN_TIMING


class Job:
    """A training process with a simulated GPU, captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> None:
        self.cuda = SimulatedCuda()
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.recording = Recording(cuda=self.cuda)
        self.clock: Any = self.recording.device_clock
        self.group: Any = distributed_c10d._get_default_group()
        self.capture: ProcessGroupCapture | None = None

    @property
    def devices(self) -> DeviceCalls:
        assert self.capture is not None
        assert self.capture.devices is not None
        return self.capture.devices

    def compute(self, duration_ns: int) -> None:
        self.cuda.current_stream().run(duration_ns)

    def all_reduce(self, *, asynchronous: bool, num_bytes: int = 32) -> Any:
        return self.group.allreduce([tensor(num_bytes)], options(asynchronous))

    def finish(self) -> None:
        """Let the device do all its work."""
        self.cuda.advance(20 * MILLISECOND)

    def intervals(self) -> list[tuple[int, int]]:
        return [(row.start, row.end) for row in self.recording.communications()]

    def timings(self) -> list[int]:
        return [row.timing for row in self.recording.communications()]


@pytest.fixture
def backend() -> str:
    """The old one; tests of the differences ask for another."""
    return "nccl"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, backend: str) -> Iterator[Job]:
    job = Job(monkeypatch, backend)
    with job.recording.capturing(job.clock) as capture:
        job.capture = capture
        yield job
    assert job.recording.warnings() == []


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_synchronous_operation_lies_between_its_marks_and_stalls_its_stream(job: Job) -> None:
    job.compute(5 * MILLISECOND)
    work = job.all_reduce(asynchronous=False, num_bytes=64)
    if work is not None:
        work.wait()  # as torch.distributed does
    job.finish()

    (row,) = job.recording.communications()
    assert (row.start, row.end) == job.nccl.intervals[0]
    assert (row.name, row.bytes, row.seq, row.is_async, row.timing) == ("all_reduce", 64, 0, False, CUDA)
    (stall,) = job.recording.stalls()
    assert (stall.stalled_on, stall.start, stall.end, stall.timing) == (row.id, row.start, row.end, CUDA)


def stalls(job: Job) -> list[tuple[int, int]]:
    """Those that took time."""
    return [(row.start, row.end) for row in job.recording.stalls() if row.end > row.start]


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_beside_the_stream_that_computes_nothing_stalls_but_where_it_waits(job: Job) -> None:
    """As FSDP does it: a prefetched all_gather runs on a stream of its own."""
    beside = job.cuda.Stream()
    job.compute(MILLISECOND)
    with job.cuda.stream(beside):
        job.all_reduce(asynchronous=False)
    behind = beside.record_event()
    start = job.cuda.now_ns
    _, computed = job.cuda.current_stream().run(MILLISECOND // 4)
    job.cuda.current_stream().wait_event(behind)
    job.cuda.current_stream().wait_event(behind)
    job.finish()

    assert job.intervals() == [(start, start + MILLISECOND)]
    assert job.timings() == [CUDA]
    assert stalls(job) == []  # the communication was over before the compute was
    assert computed > start + MILLISECOND


def test_the_stream_that_computes_stalls_for_communication_beside_it(job: Job) -> None:
    beside, after = job.cuda.Stream(), job.cuda.Stream()
    start = job.cuda.now_ns
    with job.cuda.stream(beside):
        job.all_reduce(asynchronous=False)
    after.wait_stream(beside)  # neither of them computes
    _, computed = job.cuda.current_stream().run(MILLISECOND // 4)
    job.cuda.current_stream().wait_stream(after)
    job.cuda.current_stream().wait_stream(beside)
    job.finish()

    (communication,) = job.recording.communications()
    assert (communication.start, communication.end) == (start, start + MILLISECOND)
    assert stalls(job) == [(computed, start + MILLISECOND)]
    (stall,) = job.recording.stalls()
    assert stall.stalled_on == communication.id


def test_a_wait_beside_the_stream_that_computes_is_no_stall(job: Job) -> None:
    """As ZeRO 3 does it: the gathering stream waits for its all_gathers, the computing stream for that one."""
    beside = job.cuda.Stream()
    with job.cuda.stream(beside):
        work = job.all_reduce(asynchronous=True)
        work.wait()
    start = job.cuda.now_ns
    job.cuda.current_stream().wait_stream(beside)
    job.finish()

    assert job.intervals() == stalls(job) == [(start, start + MILLISECOND)]
    assert job.timings() == [CUDA]


def test_the_stream_of_the_step_or_of_its_phase_computes(job: Job) -> None:
    own = job.cuda.Stream()
    with job.cuda.stream(own):
        job.recording.tracer.begin_step()
        job.all_reduce(asynchronous=False)
    job.all_reduce(asynchronous=False)
    phases = job.cuda.Stream()
    with job.cuda.stream(phases):
        phase = job.recording.tracer.enter(schema.BACKWARD, "backward")
        job.all_reduce(asynchronous=False)
        job.recording.tracer.leave(phase)
        job.all_reduce(asynchronous=False)
    job.finish()

    numbers = [row.seq for row in job.recording.stalls()]
    assert numbers == [0, 2]
    assert [row.seq for row in job.recording.communications()] == [0, 1, 2, 3]


def test_an_event_recorded_again_stands_for_what_is_behind_it_then(job: Job) -> None:
    beside, copies = job.cuda.Stream(), job.cuda.Stream()
    event = job.cuda.Event()
    with job.cuda.stream(beside):
        job.all_reduce(asynchronous=False)
        event.record()
    copies.run(5 * MILLISECOND)
    event.record(copies)
    event.wait()
    job.finish()

    assert stalls(job) == []


def test_a_stream_that_is_captured_waits_unmeasured(job: Job) -> None:
    beside = job.cuda.Stream()
    with job.cuda.stream(beside):
        job.all_reduce(asynchronous=False)
    capturing = job.cuda.Stream()
    with job.cuda.stream(capturing), job.cuda.graph():
        beside.wait_event(capturing.record_event())
        capturing.wait_event(beside.record_event())
    job.finish()

    assert stalls(job) == []


def test_rows_come_when_the_device_has_got_there(job: Job) -> None:
    job.all_reduce(asynchronous=False)
    assert job.recording.rows() == []

    job.cuda.advance(MILLISECOND)
    assert len(job.recording.rows()) == 2


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_stalled_wait_ends_when_the_operation_does(job: Job) -> None:
    work = job.all_reduce(asynchronous=True)
    job.compute(250 * MICROSECOND)  # 0.25 ms: exact in float32
    waits_from = job.cuda.current_stream().position_ns()
    work.wait()
    job.finish()

    assert job.intervals() == job.nccl.intervals
    assert job.timings() == [CUDA]
    (stall,) = job.recording.stalls()
    assert (stall.start, stall.end) == (waits_from, job.nccl.intervals[0][1])


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_an_operation_hidden_behind_compute_has_no_known_end(job: Job) -> None:
    work = job.all_reduce(asynchronous=True)
    job.compute(5 * MILLISECOND)
    work.wait()
    waited = job.cuda.current_stream().position_ns()
    job.finish()

    (row,) = job.recording.communications()
    assert (row.start, row.end, row.timing) == (job.nccl.intervals[0][0], waited, UNKNOWN)
    assert (row.start_exact, row.end_exact) == (False, False)  # What ran before the first one is not known.
    (stall,) = job.recording.stalls()
    assert stall.start == stall.end


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_operations_of_one_stream_start_when_the_one_before_ends(job: Job) -> None:
    works = [job.all_reduce(asynchronous=True) for _ in range(3)]
    for work in works:
        work.wait()
    job.finish()

    first, second, third = job.nccl.intervals
    assert first[1] == second[0]
    assert second[1] == third[0]
    assert job.intervals() == job.nccl.intervals
    assert job.timings() == [CUDA] * 3


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_an_operation_launched_behind_a_hidden_one_has_no_exact_start(job: Job) -> None:
    """Three at once, hidden but for the last."""
    job.all_reduce(asynchronous=False)
    works = [job.all_reduce(asynchronous=True) for _ in range(3)]
    job.compute(2 * MILLISECOND + MILLISECOND // 4)
    for work in works:
        work.wait()
    job.all_reduce(asynchronous=False)
    job.finish()

    rows = job.recording.communications()
    assert [(row.start_exact, row.end_exact, row.timing) for row in rows] == [
        (False, True, CUDA),  # nobody knows what the communicator did before
        (True, False, UNKNOWN), (False, False, UNKNOWN), (False, True, CUDA), (True, True, CUDA),
    ]  # fmt: skip
    for row, (start, end) in zip(rows, job.nccl.intervals, strict=True):
        assert row.start == start if row.start_exact else row.start <= start
        assert row.end == end if row.end_exact else row.end >= end
    assert rows[3].start < job.nccl.intervals[3][0], "two milliseconds early"


def test_behind_a_pause_of_the_recording_no_start_is_exact(job: Job) -> None:
    tracer = job.recording.tracer
    for _ in range(2):
        job.all_reduce(asynchronous=False)
    tracer.recording = False
    job.all_reduce(asynchronous=True)
    tracer.begin_step()
    for _ in range(2):
        job.all_reduce(asynchronous=False)
    job.finish()

    assert [row.start_exact for row in job.recording.communications()] == [False, True, False, True]


def test_operations_that_cannot_be_placed_count_as_dropped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_calls: DeviceOperations) -> Any:
        raise ArithmeticError

    job.all_reduce(asynchronous=False)
    job.group.send([tensor(8)], 2, 0).wait()
    job.finish()
    with monkeypatch.context() as patched:
        patched.setattr(job.devices.resolved.placement, "place", fail)
        assert [row.kind for row in job.recording.rows()] == [schema.STALL] * 2
    job.all_reduce(asynchronous=False)
    job.finish()

    assert len(job.recording.communications()) == 1
    assert job.recording.recorder.dropped == {"collective": 1, "p2p": 1}


@pytest.mark.engine("python")
def test_whole_columns_are_placed_together_with_the_calls_of_the_pass(job: Job) -> None:
    """Another source knows of the operation that the communicator ran right before."""

    class Facts(CallFacts):
        def rows(self, placed: PlacedTimes) -> list[Row]:
            ((start, end),) = zip(placed.start.tolist(), placed.end.tolist(), strict=True)
            return [Row(schema.COLLECTIVE, "of_columns", schema.COMMUNICATION, start, end)]

    work = job.all_reduce(asynchronous=True)
    ((call,), _) = job.devices._pending[id(work)]
    call.position = 1
    work.wait()
    job.finish()
    launch = job.nccl.intervals[0][0] - 9
    columns = (call.id - 1, call.id - 1, call.queue.number, 0, launch, launch, launch + 5, 0, 1, 0, -1)
    job.devices.resolved.add(DeviceOperations(*(np.array([value]) for value in columns)), Facts([call]))

    rows = job.recording.communications()
    assert [(row.name, row.start, row.end, row.start_exact) for row in rows] == [
        ("of_columns", launch, launch + 5, True), ("all_reduce", *job.nccl.intervals[0], True),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_operations_of_a_communicator_run_one_after_another_on_whichever_streams(job: Job) -> None:
    """As FSDP's backward does it: it gathers on one stream while it reduces on another."""
    gathering, reducing = job.cuda.Stream(), job.cuda.Stream()
    for stream in (gathering, reducing, gathering):
        with job.cuda.stream(stream):
            job.all_reduce(asynchronous=False)
    job.finish()

    assert job.intervals() == job.nccl.intervals
    assert [start for start, _ in job.nccl.intervals[1:]] == [end for _, end in job.nccl.intervals[:-1]]
    assert job.timings() == [CUDA] * 3


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_wait_that_stalls_gives_the_end_although_a_later_operation_runs_on_another_stream(job: Job) -> None:
    """As ZeRO 3's backward does it: it waits for a gather that was launched before a reduction on another stream."""
    reducing = job.cuda.Stream()
    works = [job.all_reduce(asynchronous=True) for _ in range(2)]
    with job.cuda.stream(reducing):
        job.all_reduce(asynchronous=False)
    for work in works:
        work.wait()
    job.finish()

    rows = sorted(job.recording.communications(), key=lambda row: row.id)
    assert [(row.start, row.end, row.timing) for row in rows[:2]] == [(*one, CUDA) for one in job.nccl.intervals[:2]]
    assert (rows[2].end, rows[2].timing) == (job.nccl.intervals[2][1], CUDA)


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
@pytest.mark.parametrize("first_is_asynchronous", [True, False])
def test_an_operation_starts_behind_a_known_one_of_the_other_kind(job: Job, first_is_asynchronous: bool) -> None:
    """One runs on the communicator's own stream, the other on a stream of the job, beside which the host goes on."""
    beside = job.cuda.Stream()
    job.nccl.duration_ns = 5 * MILLISECOND
    for is_asynchronous in (first_is_asynchronous, not first_is_asynchronous):
        if is_asynchronous:
            job.all_reduce(asynchronous=True).wait()
        else:
            with job.cuda.stream(beside):
                job.all_reduce(asynchronous=False)
    job.finish()

    assert job.nccl.intervals[1][0] == job.nccl.intervals[0][1]
    assert sorted(job.intervals()) == job.nccl.intervals
    assert job.timings() == [CUDA] * 2


def test_every_device_has_a_communicator_of_its_own(job: Job) -> None:
    job.cuda.contexts.add(1)
    job.nccl.duration_ns = 5 * MILLISECOND
    for device in (0, 1):
        job.nccl._free_at_ns.clear()
        with job.cuda.device(device):
            job.group.allreduce([tensor(8, f"cuda:{device}")], options(False))
    job.finish()

    assert job.nccl.intervals[0] == job.nccl.intervals[1]
    assert job.intervals() == job.nccl.intervals


def test_a_job_that_never_set_its_device_has_one_communicator(job: Job) -> None:
    """A barrier names no device, and the current one is not the one in use."""
    job.cuda.contexts.clear()
    job.cuda.contexts.add(1)
    job.group.allreduce([tensor(8, "cuda:1")], options(True)).wait()
    job.group.barrier(opts=SimpleNamespace(asyncOp=False, device=None)).wait()
    job.finish()

    assert len(job.recording.communications()) == 2
    (state,) = job.recording.tracer.groups.states.values()
    assert list(state.queues) == [(-1, 1)]


def test_a_host_that_is_late_within_the_wait_gives_no_exact_end(job: Job) -> None:
    """The stream is idle, and passes the mark behind the wait when the host has taken it: that is no stall."""
    works = [job.all_reduce(asynchronous=True) for _ in range(2)]
    job.cuda.advance(5 * MILLISECOND)
    stream: Any = job.cuda.current_stream()
    wait_until = stream.wait_until

    def late(time_ns: int) -> None:
        wait_until(time_ns)
        job.cuda.advance(MILLISECOND // 3)

    stream.wait_until = late
    works[0].wait()
    del stream.wait_until
    works[1].wait()
    job.finish()

    rows = sorted(job.recording.communications(), key=lambda row: row.id)
    assert [row.timing for row in rows] == [UNKNOWN] * 2
    assert min(row.end for row in rows) >= max(end for _, end in job.nccl.intervals), "upper bounds"


def test_calls_in_flight_when_the_clock_is_switched_off_are_dropped_and_keep_nothing_up(job: Job) -> None:
    for _ in range(300):
        job.all_reduce(asynchronous=False)
    recorder = job.recording.recorder
    job.cuda.advance(10 * MILLISECOND)
    recorder.flush()
    job.clock.switch_off()
    for _ in range(3):
        recorder.flush()

    assert not recorder.unresolved()
    assert not recorder.buffer
    assert recorder.dropped["collective"] > 250


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_an_operation_on_the_current_stream_follows_one_on_the_stream_of_the_group(job: Job) -> None:
    work = job.all_reduce(asynchronous=True)
    job.compute(3 * MILLISECOND)
    job.nccl.duration_ns = 5 * MILLISECOND
    started = job.cuda.current_stream().position_ns()
    job.all_reduce(asynchronous=False)
    work.wait()
    job.finish()

    rows = sorted(job.recording.communications(), key=lambda row: row.id)
    assert (rows[1].start, rows[1].end, rows[1].timing) == (started, started + 5 * MILLISECOND, CUDA)
    assert rows[0].timing == UNKNOWN
    assert rows[0].end >= job.nccl.intervals[0][1], "an upper bound"


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_later_operation_that_is_waited_for_first_bounds_the_earlier_one(job: Job) -> None:
    first = job.all_reduce(asynchronous=True)
    second = job.all_reduce(asynchronous=True)
    second.wait()
    job.compute(5 * MILLISECOND)
    first.wait()
    job.finish()

    earlier, later = sorted(job.recording.communications(), key=lambda row: row.seq)
    assert (later.seq, later.end, later.timing) == (1, job.nccl.intervals[1][1], CUDA)
    assert (earlier.seq, earlier.start, earlier.timing) == (0, job.nccl.intervals[0][0], UNKNOWN)
    assert earlier.end == later.end  # it ended then at the latest


@pytest.mark.engine("python")
def test_the_order_on_a_stream_holds_when_the_device_moves_on_between_two_questions(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in [job.all_reduce(asynchronous=True) for _ in range(2)]:
        work.wait()
    job.cuda.advance(MILLISECOND - 1)
    job.recording.rows()  # takes an anchor
    resolve = CudaClock.resolve

    def and_time_passes(clock: CudaClock, mark: Any) -> int | None:
        time_ns = resolve(clock, mark)
        job.cuda.advance(MILLISECOND // 2)
        return time_ns

    monkeypatch.setattr(CudaClock, "resolve", and_time_passes)

    for _ in range(5):
        job.recording.rows()
    assert job.intervals() == job.nccl.intervals


def test_pairs_of_ranks_have_streams_of_their_own(job: Job) -> None:
    job.nccl.duration_ns = 2 * MILLISECOND
    first = job.group.send([tensor(8)], 2, 0)
    job.nccl.duration_ns = MILLISECOND
    second = job.group.recv([tensor(8)], 3, 0)
    second.wait()
    first.wait()
    job.finish()

    rows = sorted(job.recording.communications(), key=lambda row: row.name)
    assert [(row.name, row.peer, (row.start, row.end)) for row in rows] == [
        ("recv", 3, job.nccl.intervals[1]),
        ("send", 2, job.nccl.intervals[0]),
    ]
    assert all(row.is_async for row in rows)


@pytest.mark.parametrize("backend", ["nccl2"])
def test_nccl2_has_one_stream_for_all_peers(job: Job) -> None:
    works = [job.group.send([tensor(8)], 2, 0), job.group.recv([tensor(8)], 3, 0), job.all_reduce(asynchronous=True)]
    for work in works:
        work.wait()
    job.finish()

    assert [row.name for row in job.recording.communications()] == ["send", "recv", "all_reduce"]
    assert job.intervals() == job.nccl.intervals
    assert job.timings() == [CUDA] * 3


@pytest.mark.parametrize("backend", ["nccl2"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_in_a_bracket_of_nccl2_run_where_they_are_called(job: Job, asynchronous: bool) -> None:
    device = torch.device("cuda")
    job.group._start_coalescing(device)
    for _ in range(2):
        job.all_reduce(asynchronous=asynchronous)
    job.group._end_coalescing(device).wait()
    job.finish()

    (first, _), (_, last) = job.nccl.intervals
    rows = job.recording.communications()
    assert [(row.seq, row.op_in_seq, row.start, row.end, row.timing) for row in rows] == [
        (0, 0, first, last, CUDA), (0, 1, first, last, CUDA),
    ]  # fmt: skip
    assert [(stall.start, stall.end) for stall in job.recording.stalls()] == [(first, last)]


@pytest.mark.parametrize("backend", ["nccl2"])
def test_a_work_of_a_synchronous_operation_takes_the_place_of_a_forgotten_one(job: Job) -> None:
    devices = job.devices
    forgotten = job.all_reduce(asynchronous=True)
    calls, reference = devices._pending.pop(id(forgotten))
    work = job.nccl.launch(False, -1)
    devices._pending[id(work)] = calls, reference
    call = devices.launch(calls[0].launch._replace(is_async=False))
    assert call is not None
    devices.record_submission(call, work)
    job.finish()

    rows = job.recording.communications()
    assert [json.loads(row.detail or "{}") for row in rows] == [{"unfinished": True}, {}]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_bracket_shares_its_times_and_takes_one_number(job: Job, recorded: bool) -> None:
    device = torch.device("cuda")
    job.recording.tracer.recording = recorded
    job.group._start_coalescing(device)
    for num_bytes in (8, 16, 32):
        assert job.all_reduce(asynchronous=True, num_bytes=num_bytes) is None
    work = job.group._end_coalescing(device)
    work.wait()
    job.recording.tracer.recording = True
    job.all_reduce(asynchronous=False)
    job.finish()

    *members, after = job.recording.communications()
    assert after.seq == 1
    if recorded:
        assert [(row.seq, row.op_in_seq, row.bytes) for row in members] == [(0, 0, 8), (0, 1, 16), (0, 2, 32)]
        assert {(row.start, row.end, row.timing) for row in members} == {(*job.nccl.intervals[0], CUDA)}
        stall = job.recording.stalls()[0]
        assert (stall.stalled_on, stall.op_in_seq, stall.end) == (members[0].id, 0, job.nccl.intervals[0][1])
    else:
        assert members == []


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_point_to_point_in_a_bracket_keeps_its_numbers_and_takes_none_of_the_collectives(job: Job) -> None:
    device = torch.device("cuda")
    for _ in range(2):
        job.group._start_coalescing(device)
        job.group.send([tensor(8)], 2, 0)
        job.group.recv([tensor(8)], 2, 0)
        job.group._end_coalescing(device).wait()
    job.all_reduce(asynchronous=False)
    job.finish()

    rows = job.recording.communications()
    assert [(row.name, row.seq, row.op_in_seq) for row in rows] == [
        ("send", 0, 0), ("recv", 0, 1), ("send", 1, 0), ("recv", 1, 1), ("all_reduce", 0, 0),
    ]  # fmt: skip


def test_an_empty_bracket_is_nothing(job: Job) -> None:
    device = torch.device("cuda")
    job.group._start_coalescing(device)
    job.group._end_coalescing(device)
    job.finish()

    assert job.recording.rows() == []


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_barrier_of_the_device_is_timed_on_its_stream(job: Job) -> None:
    job.compute(4 * MILLISECOND)
    work = job.group.barrier(opts=SimpleNamespace(asyncOp=False, device=torch.device("cuda")))
    work.wait()
    job.finish()

    assert job.intervals() == job.nccl.intervals
    assert job.timings() == [CUDA]


def test_marks_are_taken_on_the_device_of_the_tensor(job: Job) -> None:
    job.cuda.contexts.add(2)
    with job.cuda.device(2):
        job.compute(3 * MILLISECOND)
    job.group.allreduce([tensor(8, "cuda:2")], options(True)).wait()
    job.finish()

    (row,) = job.recording.communications()
    assert row.start == 1_003 * MILLISECOND
    if job.recording.native is None:
        assert {event.device for event in job.cuda.events} == {2}
    assert job.clock.used_device == 2


def test_a_graph_capture_is_stepped_around_and_noted(job: Job) -> None:
    job.all_reduce(asynchronous=False)
    work = job.all_reduce(asynchronous=True)
    with job.cuda.graph():
        job.all_reduce(asynchronous=False)
        job.all_reduce(asynchronous=True).wait()
    job.recording.rows()
    assert job.recording.tracer.untraced_paths == {CAPTURED_COMMUNICATION}
    work.wait()
    job.all_reduce(asynchronous=False)
    job.finish()

    assert [row.seq for row in job.recording.communications()] == [0, 1, 4]


def test_an_operation_that_nobody_waits_for_is_unfinished(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job.all_reduce(asynchronous=True)
    assert [launch.seq for launch in job.devices.unfinished()] == [0]
    del work
    job.devices.give_up_all()
    job.finish()

    (row,) = job.recording.communications()
    assert row.start == row.end
    assert json.loads(row.detail) == {"unfinished": True}
    assert job.devices.unfinished() == []


def test_works_that_are_never_waited_for_do_not_pile_up(job: Job) -> None:
    for _ in range(500):
        job.all_reduce(asynchronous=True)  # its Work is gone at once

    assert len(job.devices._pending) < 10


@pytest.mark.engine("python")
def test_works_that_died_are_given_up_whatever_has_their_memory(job: Job) -> None:
    kept = []
    for _ in range(500):
        job.all_reduce(asynchronous=True)
        kept.append(SimulatedWork(job.nccl, 0))  # lives on, where the Work was
        assert job.devices.unfinished() == []
    job.finish()

    assert len(job.devices._pending) == 0
    rows = job.recording.communications()
    assert len(rows) == 499  # of the last one at the next launch
    assert {row.detail for row in rows} == {'{"unfinished":true}'}
    job.devices.give_up_all()
    assert len(job.recording.communications()) == 500


@pytest.mark.engine("python")
def test_a_future_is_waited_for_although_its_work_died(job: Job) -> None:
    first, kept = next_id(), []
    for _ in range(3):
        work = job.all_reduce(asynchronous=True)
        job.devices.note_future(work)
        end = work.end_ns
        del work
        kept.append(SimulatedWork(job.nccl, 0))
    assert [launch.seq for launch in job.devices.unfinished()] == [0, 1, 2]
    start = job.clock.mark()
    job.cuda.current_stream().wait_until(end)
    job.devices.record_future_waits(first, start, job.clock.mark())
    job.finish()

    assert job.devices.unfinished() == []
    last = job.nccl.intervals[-1][1]
    assert sorted((row.seq, row.end, row.timing) for row in job.recording.communications()) == [
        (0, last, UNKNOWN), (1, last, UNKNOWN), (2, last, CUDA),
    ]  # fmt: skip


@pytest.mark.engine("python")
def test_futures_that_nobody_waits_for_do_not_pile_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_works, "MOST_DEAD", 10)
    kept = []
    for _ in range(50):
        job.devices.note_future(job.all_reduce(asynchronous=True))
        kept.append(SimulatedWork(job.nccl, 0))

    assert len(job.devices.unfinished()) == 10 + 1


def test_a_work_that_nobody_saw_has_no_wait_for_one_that_had_its_address(job: Job) -> None:
    address = id(job.all_reduce(asynchronous=True))  # its Work dies at once
    unseen = [SimulatedWork(job.nccl, 0) for _ in range(100)]
    assert address in map(id, unseen)
    for work in unseen:
        work.wait()
    job.finish()
    assert (job.recording.communications(), job.recording.stalls()) == ([], [])

    assert job.capture is not None
    job.capture.uninstall()
    (row,) = job.recording.communications()
    assert "unfinished" in row.detail


class HostWork(dist.Work):
    """Of a communication of the host's tensors, which takes 6 ms from the wait for it on."""

    def __init__(self, job: Job, source: int = 0) -> None:
        super().__init__()
        self.job = job
        self.source = source

    def wait(self, *_arguments: Any) -> bool:
        self.job.cuda.advance(6 * MILLISECOND)
        return True

    def _source_rank(self) -> int:
        return self.source


def of_the_host(job: Job, work: HostWork, method: str, seq: int, peer: int) -> None:
    """Have ``work`` captured, as the message that it is."""
    assert job.capture is not None
    job.capture.uninstall()
    job.capture.install()  # meets the new class
    state = job.recording.tracer.groups.state(job.group)
    coordinates = job.recording.tracer.coordinates
    launch = Launch(OPERATIONS[method], state, seq, 8, -1, torch.float32, peer, True, coordinates, None, 5)
    job.capture.pending[id(work)] = (launch, None, weakref.ref(work))


def test_communication_of_the_host_stalls_the_device_only_while_that_is_idle(job: Job) -> None:
    work = HostWork(job)
    of_the_host(job, work, "send", 0, 2)
    job.compute(4 * MILLISECOND)
    busy_until = job.cuda.current_stream().position_ns()
    work.wait()
    job.finish()

    (row,) = job.recording.communications()
    assert (row.start, row.timing) == (5, HOST)
    (stall,) = job.recording.stalls()
    assert (stall.stalled_on, stall.start, stall.timing) == (row.id, busy_until, CUDA)
    assert stall.end - stall.start == 2 * MILLISECOND


def test_the_sender_of_a_receive_from_anybody_is_known_after_the_wait(job: Job) -> None:
    first, second = HostWork(job, source=3), HostWork(job, source=3)
    for work in (first, second):
        of_the_host(job, work, "recv_anysource", -1, -1)
        work.wait()
    job.finish()

    assert [(row.peer, row.seq) for row in job.recording.communications()] == [(3, 0), (3, 1)]
    assert [(stall.peer, stall.seq) for stall in job.recording.stalls()] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_launches_of_the_reducer_end_with_its_wait(job: Job) -> None:
    issued = CppCalls(job.recording.tracer, job.devices)
    on_device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    payload = (8, -1, torch.float32, on_device, None)
    calls = []
    for _ in range(3):
        state = job.recording.tracer.groups.state(job.group)
        call = issued.launch(OPERATIONS["allreduce"], state, next(state.collective_seq), payload, None)
        assert call is not None
        work = job.nccl.launch(True, -1)
        issued.complete(call, work, stalls_until_end=False)
        calls.append((call, work))
    start = issued.mark(calls[-1][0])
    for _, work in calls:
        work.wait()
    issued.stalled(calls[-1][0], start, issued.mark(calls[-1][0]))
    job.finish()

    rows = sorted(job.recording.communications(), key=lambda row: row.seq)
    last = job.nccl.intervals[-1][1]
    assert [(row.seq, row.end, row.timing) for row in rows] == [(0, last, UNKNOWN), (1, last, UNKNOWN), (2, last, CUDA)]
    assert [stall.seq for stall in job.recording.stalls()] == [2]
    assert job.devices.unfinished() == []


def test_communication_inside_a_function_of_cpp_ends_with_its_return(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP's first generation gives all ranks the same model: no reducer is there that would wait."""
    monkeypatch.setattr(dist.Work, "unbox", staticmethod(lambda work: work))
    issued = CppCalls(job.recording.tracer, job.devices)
    reducer = ReducerCapture(job.recording.tracer, issued)
    on_device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    payload = (8, -1, torch.float32, on_device, None)

    def broadcast_twice() -> None:
        for _ in range(2):
            state = job.recording.tracer.groups.state(job.group)
            call = issued.launch(OPERATIONS["broadcast"], state, next(state.collective_seq), payload, 0)
            assert call is not None
            work = job.nccl.launch(True, -1)
            reducer.sent(call, work, -1)
            work.wait()

    reducer._communicating_in_cpp(broadcast_twice)()
    reducer.uninstall()
    job.finish()

    assert [row.end for row in job.recording.communications()] == [job.nccl.intervals[1][1]] * 2
    assert [stall.seq for stall in job.recording.stalls()] == [1]
    assert job.devices.unfinished() == []


def test_launches_of_a_communication_hook_end_with_the_reducers_wait_for_its_future(job: Job) -> None:
    kept = job.all_reduce(asynchronous=True)
    before = next_id()
    works = [job.all_reduce(asynchronous=True) for _ in range(2)]
    assert job.capture is not None
    for work in works:
        job.capture.surrendered(work)
        job.devices.note_future(work)
    own = job.all_reduce(asynchronous=True)
    start = job.clock.mark()
    job.cuda.current_stream().wait_until(works[-1].end_ns)
    job.devices.record_future_waits(before, start, job.clock.mark())
    own.wait()
    kept.wait()
    job.finish()

    rows = {row.seq: row for row in job.recording.communications()}
    assert (rows[2].end, rows[2].timing) == (job.nccl.intervals[2][1], CUDA)
    assert (rows[1].end, rows[1].timing) == (rows[2].end, UNKNOWN)
    assert rows[3].end == job.nccl.intervals[3][1]
    assert sorted(row.seq for row in job.recording.stalls()) == [0, 2, 3]
    assert job.devices.unfinished() == []


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_a_functional_collective_is_timed_between_the_marks_around_its_wait(job: Job) -> None:
    waits = FunctionalWaits(job.recording.tracer, job.devices)
    functional = FunctionalCapture(job.recording.tracer, waits, job.devices)
    device = SimpleNamespace(device=torch.device("cuda:0"))
    operation = FUNCTIONAL["all_reduce"]._replace(measure=lambda *_: (8, -1, torch.float32, None))
    arguments = [device] * (operation.group_argument + 1)
    arguments[operation.group_argument] = job.group
    result = torch.ones(2)

    state = job.recording.tracer.groups.state(job.group)
    pending = functional._launching(operation)(tuple(arguments), job.group, state, next(state.collective_seq))
    assert pending is not None
    work = job.nccl.launch(True, -1)
    waits.remember(pending, [storage_of(result)])
    waits._wait_capture(lambda tensor: True)(lambda tensor: work.wait(), (result,), {})
    job.finish()

    assert job.intervals() == job.nccl.intervals
    assert job.timings() == [CUDA]
    (stall,) = job.recording.stalls()
    assert (stall.start, stall.end, stall.timing) == (*job.nccl.intervals[0], CUDA)


@pytest.mark.engine("native")
def test_a_driver_that_fails_costs_spans_and_nothing_else(job: Job) -> None:
    work = job.all_reduce(asynchronous=True)
    job.all_reduce(asynchronous=False)
    job.cuda.driver.fail("cuEventRecord", 700)

    assert work.wait()
    assert job.all_reduce(asynchronous=False) is None
    assert job.clock.is_off
    with pytest.raises(RuntimeError, match="700"):
        job.clock.refresh()
    assert job.all_reduce(asynchronous=True).wait()


@pytest.mark.engine("python")
def test_a_device_that_fails_costs_spans_and_nothing_else(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    work = job.all_reduce(asynchronous=True)
    monkeypatch.setattr(CudaClock, "mark", fail)

    assert work.wait()
    assert job.all_reduce(asynchronous=False) is None
    assert len(job.recording.warnings()) == 1  # once


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_an_aborted_group_raises_what_it_would_and_what_came_before_is_recorded(job: Job) -> None:
    job.all_reduce(asynchronous=False)
    finished = job.all_reduce(asynchronous=True)
    finished.wait()
    job.finish()
    outstanding = job.all_reduce(asynchronous=True)
    job.nccl.abort()

    for call in (outstanding.wait, lambda: job.all_reduce(asynchronous=True)):
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            call()
    assert job.recording.tracer.blocked == [None]
    assert [row.seq for row in job.recording.communications()] == [0, 1]
    job.nccl.is_aborted = False  # its successor
    job.all_reduce(asynchronous=False)
    job.finish()
    job.recording.recorder._guarded_pass(last=True)

    assert [row.seq for row in job.recording.communications() if row.timing == CUDA] == [0, 1, 3]
