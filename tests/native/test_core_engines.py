"""Both engines record the same of the same program, on a simulated GPU in scripted time."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commtrace import _native
from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.capture.recording import Recording, fake_backend
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda
from tests.capture.simulated_nccl import SimulatedNccl, options, tensor

pytestmark = pytest.mark.timeout(600)


class Collective(NamedTuple):
    group: int
    is_async: bool
    duration_ns: int
    is_aside: bool  # on a stream that does not compute

    def run(self, job: Job) -> None:
        job.nccl.duration_ns = self.duration_ns
        with job.stream(self.is_aside):
            work = job.groups[self.group].allreduce([tensor(32)], options(self.is_async))
            if work is not None and not self.is_async:
                work.wait()  # as torch.distributed does
            elif work is not None:
                job.works.append(work)


class Message(NamedTuple):
    name: str
    peer: int
    tag: int
    duration_ns: int
    is_aside: bool

    def run(self, job: Job) -> None:
        job.nccl.duration_ns = self.duration_ns
        with job.stream(self.is_aside):
            job.works.append(getattr(job.groups[0], self.name)([tensor(64)], self.peer, self.tag))


class Bracket(NamedTuple):
    peers: tuple[int, ...]
    is_aside: bool

    def run(self, job: Job) -> None:
        group = job.groups[0]
        with job.stream(self.is_aside):
            group._start_coalescing("cuda")
            for peer in self.peers:
                group.send([tensor(8)], peer, 0)
            job.works.append(group._end_coalescing("cuda"))


class Wait(NamedTuple):
    """For the work launched so many works ago; a second wait for it finds nothing."""

    age: int
    is_aside: bool

    def run(self, job: Job) -> None:
        if self.age < len(job.works):
            with job.stream(self.is_aside):
                job.works[-1 - self.age].wait()


class Compute(NamedTuple):
    duration_ns: int
    is_phase: bool

    def run(self, job: Job) -> None:
        tracer = job.recording.tracer
        span = tracer.enter(schema.FORWARD, "forward", microbatch=1) if self.is_phase else None
        job.cuda.current_stream().run(self.duration_ns)
        if span is not None:
            tracer.leave(span)


class Capture(NamedTuple):
    is_async: bool

    def run(self, job: Job) -> None:
        with job.cuda.graph() as graph:
            work = job.groups[0].allreduce([tensor(32)], options(self.is_async))
            if work is not None:
                work.wait()
        graph.replay()


class Pause(NamedTuple):
    is_over: bool

    def run(self, job: Job) -> None:
        tracer = job.recording.tracer
        tracer.pauses += self.is_over and not tracer.recording  # as a step does that begins the recording again
        tracer.recording = self.is_over


class Step(NamedTuple):
    def run(self, job: Job) -> None:
        job.recording.tracer.begin_step()


class Advance(NamedTuple):
    duration_ns: int

    def run(self, job: Job) -> None:
        job.cuda.advance(self.duration_ns)


class Flush(NamedTuple):
    def run(self, job: Job) -> None:
        job.recording.recorder.flush()


# Multiples of a quarter of a millisecond, which are exact in the driver's float32 milliseconds.
DURATIONS = st.integers(0, 12).map(lambda quarters: quarters * MILLISECOND // 4)
PROGRAMS = st.lists(
    st.one_of(
        st.builds(Collective, st.integers(0, 1), st.booleans(), DURATIONS, st.booleans()),
        st.builds(
            Message, st.sampled_from(["send", "recv"]), st.integers(1, 3), st.integers(0, 1), DURATIONS, st.booleans()
        ),
        st.builds(Bracket, st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.booleans()),
        st.builds(Wait, st.integers(0, 3), st.booleans()),
        st.builds(Compute, DURATIONS, st.booleans()),
        st.builds(Capture, st.booleans()),
        st.builds(Pause, st.booleans()),
        st.builds(Step),
        st.builds(Advance, DURATIONS),
        st.builds(Flush),
    ),
    max_size=25,
)  # fmt: skip


class Job:
    """A training process with a simulated GPU, recorded by one of the engines."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = SimulatedCuda()
        self.groups: list[Any] = [dist.group.WORLD, dist.new_group([0, 1])]
        self.nccl = SimulatedNccl(self.cuda, backend)
        self.nccl.take_the_place_of(dist.ProcessGroup, monkeypatch)
        self.aside = self.cuda.Stream()
        self.recording = Recording(cuda=self.cuda)
        self.works: list[Any] = []

    def stream(self, is_aside: bool) -> Any:
        return self.cuda.stream(self.aside if is_aside else self.cuda.current_stream())


def recorded(engine: str, backend: str, program: list[Any]) -> tuple[list[Row], dict[str, int]]:
    """Return the rows of a program, and how many were dropped, by kind."""
    with pytest.MonkeyPatch.context() as monkeypatch, fake_backend():
        monkeypatch.setattr(Recording, "engine", engine)
        job = Job(backend, monkeypatch)
        with job.recording.capturing():
            for action in program:
                action.run(job)
            job.cuda.advance(1_000 * MILLISECOND)
            job.recording.recorder.flush()
        job.recording.tracer.finish()
        rows = job.recording.rows()
        return rows, {**job.recording.recorder.dropped, "warnings": len(job.recording.warnings())}


def comparable(rows: list[Row]) -> Counter[Row]:
    """Return the rows with numbers of communications that say which one it is: by its time, group and number."""
    communications = sorted(
        (row for row in rows if row.id >= 0), key=lambda row: (row.start, row.end, row._replace(id=-1, stalled_on=-1))
    )
    numbers = {row.id: number for number, row in enumerate(communications)}
    assert len(numbers) == len(communications)
    return Counter(row._replace(id=numbers.get(row.id, -1), stalled_on=numbers.get(row.stalled_on, -1)) for row in rows)


def check(backend: str, program: list[Any]) -> None:
    python_rows, python_dropped = recorded("python", backend, program)
    native_rows, native_dropped = recorded("native", backend, program)
    of_python, of_native = comparable(python_rows), comparable(native_rows)

    assert list((of_python - of_native).elements()) == list((of_native - of_python).elements()), program
    assert python_dropped == native_dropped


@pytest.mark.skipif(_native.load()[0] is None, reason="the native part was not built")
@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
@settings(
    max_examples=int(os.environ.get("COMMTRACE_TEST_PROGRAMS", "60")), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(program=PROGRAMS)
def test_both_engines_record_the_same(backend: str, program: list[Any]) -> None:
    check(backend, program)
