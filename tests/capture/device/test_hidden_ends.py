"""True ends of communication that was over before anybody waited for it, on a simulated GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.capture.collectives.operations import LEGACY, NCCL2, NcclBackend
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.device.facts import Handed
from commtrace.capture.device.hidden_ends import (
    ANSWER_NS,
    HOLD_NS,
    CompletionTimes,
    DumpEntry,
    FlightRecorder,
    HiddenEnds,
    entries_of,
    match_durations,
)
from commtrace.trace import schema
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor

CUDA, NCCL, UNKNOWN = schema.CUDA_EVENT_TIMING, schema.NCCL_TIMING, schema.UNKNOWN_TIMING
MEASURED_STEPS = "1:9"


STANDING = pytest.mark.engine("python")
"""The scripted clock of the native part stands while operations are launched: their entries cannot be told apart."""


class Job:
    """A training process whose NCCL measures how long its operations take, captured from step 1 on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, steps: str = MEASURED_STEPS) -> None:
        self.cuda = SimulatedCuda()
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.recording = Recording(cuda=self.cuda, steps=steps)
        self.clock: Any = self.recording.device_clock
        self.tracer = self.recording.tracer
        self.group: Any = distributed_c10d._get_default_group()
        self.devices: Any = None

    def listen(self, devices: DeviceCalls) -> None:
        self.devices = devices
        times = FlightRecorder(self.nccl.dump)
        self.look_up(times)

    def look_up(self, times: CompletionTimes) -> None:
        resolved = self.devices.resolved
        resolved.hidden_ends = HiddenEnds(self.tracer, resolved.placement, times, self.nccl.host_ns, self.nccl.anchor)

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
        marks = [row for row in self.recording.sink.rows if row.kind == schema.MARK and row.name == "hidden_ends"]
        mark: dict[str, Any] = json.loads(marks[-1].detail or "")
        return mark


@pytest.fixture(params=["nccl", "nccl2"])
def job(world: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Job]:
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
        "compared": 0, "median_difference_ns": None, "largest_difference_ns": None,
        "took_ns": 2,  # readings of the clock
    }  # fmt: skip
    assert job.recording.warnings() == []


@STANDING
def test_operations_in_flight_together_start_when_the_durations_say(job: Job) -> None:
    """What was launched in other steps meanwhile waits too: its start is known with their ends."""
    job.stalling()
    works = [job.launch() for _ in range(3)]
    job.compute(2 * MILLISECOND + MILLISECOND // 4)
    job.tracer.begin_step(9)
    job.tracer.recording = True
    works.append(job.launch())
    for work in works:
        work.wait()
    job.answer()

    first, *in_flight, last = job.nccl.intervals
    assert job.times() == [
        (*first, CUDA),
        *((*times, NCCL) for times in in_flight[:2]),
        (*in_flight[2], CUDA),
        (*last, CUDA),
    ]
    rows = sorted(job.recording.communications(), key=lambda row: row.id)
    assert [row.start_exact for row in rows] == [False, True, True, True, True]  # what ran before the first one?
    assert all(row.end_exact for row in rows)


@STANDING
def test_an_end_that_a_stall_shows_is_compared_with_the_backends_duration(job: Job) -> None:
    job.stalling()
    for _ in range(3):
        job.stalling()
    number, created, interval = job.nccl.recorded[-1]
    assert interval is not None
    start, end = interval
    job.nccl.recorded[-1] = (number, created, (start, end - MILLISECOND // 4))
    job.answer()

    *intervals, (start, end) = job.nccl.intervals
    assert job.times() == [*((*interval, CUDA) for interval in intervals), (start + MILLISECOND // 4, end, CUDA)]
    mark = job.mark()
    assert (mark["hidden"], mark["compared"]) == (0, 3)
    assert (mark["median_difference_ns"], mark["largest_difference_ns"]) == (0, MILLISECOND // 4)


def test_the_first_recorded_operation_may_be_delayed_by_earlier_ones(job: Job) -> None:
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

    stalling, awaited, behind = job.times()
    assert (stalling[2], awaited) == (CUDA, (*job.nccl.intervals[1], NCCL))
    assert behind[2] == UNKNOWN
    assert behind[0] <= job.nccl.intervals[2][0]
    assert behind[1] >= job.nccl.intervals[2][1]


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


@STANDING
def test_a_duration_that_would_end_behind_the_wait_is_refused(job: Job) -> None:
    job.stalling()
    job.hidden(compute_ns=2 * MILLISECOND)
    number, created, interval = job.nccl.recorded[-1]
    assert interval is not None
    start, end = interval
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
    job.devices.give_up_all()
    job.cuda.advance(ANSWER_NS - 2 * MILLISECOND)
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)

    assert len(job.times()) == 2


def test_nothing_is_left_behind_at_the_end_of_the_recording(job: Job) -> None:
    job.stalling()
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    job.devices.give_up_all()
    assert job.times() == []
    job.cuda.advance(ANSWER_NS)

    assert [timing for _, _, timing in job.times()] == [CUDA, NCCL]
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    assert len(job.times()) == 3  # nobody will ask any more


def test_held_rows_are_written_in_the_last_pass(job: Job) -> None:
    job.stalling()
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    recorder = job.recording.recorder
    recorder._guarded_pass(last=True)

    rows = [row for row in job.recording.sink.rows if row.kind == schema.COLLECTIVE]
    assert [(row.start, row.end, row.timing) for row in rows] == [
        (*job.nccl.intervals[0], CUDA), (*job.nccl.intervals[1], NCCL),
    ]  # fmt: skip
    assert recorder.dropped == {}


def test_a_recording_that_ends_at_once_waits_for_the_durations(job: Job) -> None:
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)
    recorder = job.recording.recorder
    recorder.start()
    recorder.stop()

    assert len([row for row in job.recording.sink.rows if row.kind == schema.COLLECTIVE]) == 1
    assert recorder.dropped == {}


@pytest.mark.usefixtures("world")
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


def test_a_recorder_without_durations_is_reported_once(job: Job) -> None:
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

        def durations_ns(self, calls: Sequence[Handed]) -> dict[int, int]:
            raise RuntimeError("no dump")

    job.look_up(Failing())
    job.stalling()
    job.hidden()
    job.answer()
    job.hidden()
    job.cuda.advance(40 * MILLISECOND)

    assert [timing for _, _, timing in job.times()] == [CUDA, UNKNOWN, UNKNOWN]
    assert len(job.recording.warnings()) == 1


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("value", ["", "1"])
def test_only_where_nccl_measures_is_anything_held_back(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", value)
    job = Job(monkeypatch, "nccl2")

    assert (DeviceCalls(job.tracer, job.clock).resolved.hidden_ends is not None) == bool(value)


def call(
    number: int, launched: int, returned: int, batch: int | None = None, group: str = "0", nccl: NcclBackend = NCCL2
) -> Handed:
    return Handed(number, number if batch is None else batch, nccl.name, group, launched, returned)


def test_an_entry_belongs_to_the_call_during_which_it_was_made() -> None:
    entries = [
        DumpEntry(0, "0", 105, 7),
        DumpEntry(1, "0", 115, None),
        DumpEntry(2, "0", 125, 9),
        DumpEntry(3, "1", 126, 11),
    ]
    calls = [call(1, 100, 110), call(2, 111, 119), call(3, 120, 130), call(4, 120, 130, group="1"), call(5, 140, 150)]

    assert match_durations(calls, entries) == {1: 7, 3: 9, 4: 11}


def test_an_entry_of_torchs_hook_comes_right_before_the_call_by_our_clock() -> None:
    entries = [DumpEntry(0, "0", 90, 1), DumpEntry(1, "0", 98, 2), DumpEntry(2, "0", 118, 3)]
    calls = [call(1, 100, 110), call(2, 120, 130), call(3, 140, 150)]

    assert match_durations(calls, entries) == {1: 2, 2: 3}
    assert match_durations([call(4, 10_000_000, 10_000_010)], entries) == {}


def test_a_call_without_the_time_of_its_return_has_none() -> None:
    assert match_durations([call(1, 100, 0)], [DumpEntry(0, "0", 90, 1), DumpEntry(1, "0", 200, 2)]) == {}


def test_two_entries_during_one_call_are_both_left_out() -> None:
    assert match_durations([call(1, 100, 110)], [DumpEntry(0, "0", 102, 7), DumpEntry(1, "0", 104, 8)]) == {}


def test_members_of_a_bracket_share_its_one_duration() -> None:
    members = [call(1, 100, 130, batch=1), call(2, 110, 130, batch=1)]

    assert match_durations(
        members, [DumpEntry(0, "0", 105, None), DumpEntry(1, "0", 112, None), DumpEntry(2, "0", 125, 9)]
    ) == {1: 9, 2: 9}
    assert match_durations(members, [DumpEntry(0, "0", 105, 4), DumpEntry(1, "0", 112, 5)]) == {}


def test_entries_that_may_have_been_overwritten_are_unknown() -> None:
    assert match_durations([call(1, 100, 130)], [DumpEntry(5, "0", 120, 7)]) == {}
    assert match_durations([call(1, 100, 130)], [DumpEntry(4, "1", 90, 1), DumpEntry(5, "0", 120, 7)]) == {1: 7}


def test_each_backend_is_asked_for_its_own() -> None:
    def dump(backend: str) -> bytes:
        entry = {"record_id": 0, "process_group": ["0", ""], "time_created_ns": 105, "duration_ms": len(backend)}
        return json.dumps({"entries": [entry]}, separators=(",", ":")).encode()

    calls = [call(1, 100, 110, nccl=NCCL2), call(2, 100, 110, nccl=LEGACY)]

    assert FlightRecorder(dump).durations_ns(calls) == {1: 5_000_000, 2: 4_000_000}


@pytest.mark.parametrize("dump", [b"", b'{"version":"2.10"}', b'{"entries":[],"version":"2.10"}'])
def test_an_empty_dump_has_no_entries(dump: bytes) -> None:
    assert list(entries_of(dump)) == []


def test_a_torn_dump_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        list(entries_of(b'{"entries":['))


def test_torchs_own_recorder_is_read_and_its_clock_is_the_systems() -> None:
    c10d: Any = torch._C._distributed_c10d
    if torch.__version__ < "2.11":
        pytest.skip("this torch has no flight recorder for gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = time.time_ns()
        dist.all_reduce(torch.ones(2))
        after = time.time_ns()
        name = dist.distributed_c10d._get_default_group().group_name
    finally:
        dist.destroy_process_group()

    entries = [entry for entry in entries_of(bytes(c10d._dump_fr_trace_json(True, False))) if entry.group == name]
    assert [entry.duration_ns for entry in entries if before <= entry.created_ns <= after] == [None]


@pytest.mark.usefixtures("world")
def test_torchs_hook_makes_its_entry_during_the_call_and_right_before_a_hook_that_comes_later() -> None:
    c10d: Any = torch._C._distributed_c10d
    if torch.__version__ < "2.15":
        pytest.skip("this torch has no flight recorder of its own for each backend without one")
    group: Any = dist.distributed_c10d._get_default_group()
    handle = c10d.FlightRecorderHook.attach(group, list(range(4)))
    hooked: list[int] = []
    group.register_pre_hook(1 << 60, lambda _arguments: hooked.append(time.time_ns()))
    before = time.time_ns()
    dist.all_reduce(torch.ones(2))
    after = time.time_ns()
    group.unregister_pre_hook(1 << 60)
    handle.remove()

    (entry,) = [one for one in entries_of(c10d._dump_fr_trace_json(True, False, "fake")) if one.created_ns >= before]
    assert entry.group == group.group_name
    assert before <= entry.created_ns <= hooked[0] <= after
