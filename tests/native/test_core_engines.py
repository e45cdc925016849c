"""Both engines record the same of the same program, on a simulated GPU in scripted time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from commtrace import _native
from commtrace.capture.collectives import ddp_reducer
from commtrace.capture.collectives.cpp_communication import (
    HookedOperation,
    OwnRank,
    ProcessGroupHooks,
    capture_of_cpp,
)
from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.collectives.functional import FUNCTIONAL, FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.operations import HOOKED_OPERATIONS
from commtrace.capture.collectives.operator_calls import OperatorCalls
from commtrace.capture.device.device_calls import DeviceCalls
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


class Functional(NamedTuple):
    """A functional all_reduce or all_gather."""

    name: str
    group: int
    duration_ns: int
    is_aside: bool

    def run(self, job: Job) -> None:
        job.nccl.duration_ns = self.duration_ns
        with job.stream(self.is_aside):
            arguments = (tensor(48), "sum" if self.name == "all_reduce" else 4, job.groups[self.group])
            job.results.append(job.functional[self.name](*arguments))


class FunctionalWait(NamedTuple):
    """For the result of so many functional collectives ago; a second wait for it finds nothing."""

    age: int
    is_aside: bool

    def run(self, job: Job) -> None:
        if self.age < len(job.results):
            with job.stream(self.is_aside):
                job.functional["wait_tensor"](job.results[-1 - self.age])


class Backward(NamedTuple):
    """A backward pass whose reducer sends buckets of so many bytes; 0: two tensors, which Python handles."""

    group: int
    sizes: tuple[int, ...]
    duration_ns: int

    def run(self, job: Job) -> None:
        job.nccl.duration_ns = self.duration_ns
        job.reduce(self.group, self.sizes)


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
        st.builds(
            Functional, st.sampled_from(["all_reduce", "all_gather_into_tensor"]), st.integers(0, 1), DURATIONS,
            st.booleans(),
        ),
        st.builds(FunctionalWait, st.integers(0, 3), st.booleans()),
        st.builds(
            Backward, st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), DURATIONS
        ),
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
        self.results: list[Any] = []
        self.functional: dict[str, Any] = {}
        self._monkeypatch = monkeypatch
        self._task, self._num_operations = -1, 0
        self._callbacks: list[Callable[[], None]] = []

    def capture_cpp(self, devices: DeviceCalls) -> Callable[[], None]:
        """Capture what C++ starts, by stand-ins for torch's operators and hooks; return what ends that."""
        tracer, native = self.recording.tracer, self.recording.native
        waits, issued = FunctionalWaits(tracer, devices), CppCalls(tracer, devices)
        capture, reducer = FunctionalCapture(tracer, waits, devices), ReducerCapture(tracer, issued, by_kernels=False)
        calls = OperatorCalls(None if native is None else native.core)
        works: dict[int, Any] = {}

        def launch(*_arguments: object) -> Any:
            result = tensor(48)
            works[id(result)] = self.nccl.launch(True, -1)
            return result

        def wait(result: Any) -> Any:
            works[id(result)].wait_for_stream()
            return result

        for name in ("all_reduce", "all_gather_into_tensor"):
            overload: Any = getattr(torch.ops._c10d_functional, name).default
            capturing = capture._collective_capture(overload, FUNCTIONAL[name], lambda _tensor: True, from_python=False)
            common = capture._common(name, overload)
            self.functional[name] = calls._standing_for(launch, capturing, common)
        waiting = waits._wait_capture(lambda _tensor: True)
        self.functional["wait_tensor"] = calls._standing_for(wait, waiting, {"is_wait": True, "num_arguments": 1})
        if native is not None:
            native.core.configure_operators(
                failed=tracer.failed, resolve_group=str, has_function=lambda _tensor: False, num_modes=lambda: 0,
                is_transformed=lambda _tensor: False, pending=waits._pending, forget_result=waits._forget_result,
            )  # fmt: skip

        self._monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: self._task)
        self._monkeypatch.setattr(torch._C, "_current_autograd_node", lambda: None)
        self._monkeypatch.setattr(ddp_reducer, "_queue_callback", self._callbacks.append)
        hooks = ProcessGroupHooks(tracer, issued, waits, reducer)
        operation = HOOKED_OPERATIONS["ALLREDUCE"]
        hooks._operations = {7: HookedOperation(operation, operation.measure, has_outputs=False, has_peer=False)}
        hooks._active = True
        if native is not None:
            hooks._configure(native, 7)
        reducer.has_seen_ddp = True
        reducer._tell_native()
        states = [tracer.groups.state(group) for group in self.groups]
        self._hooks = [hooks._hooks_of(state, OwnRank(0)) for state in states]

        def uninstall() -> None:
            hooks._deactivate()
            reducer.uninstall()
            waits.uninstall()

        return uninstall

    def reduce(self, group: int, sizes: Sequence[int]) -> None:
        """Run a backward pass, as autograd and the reducer do."""
        self._task = self._num_operations
        pre, post = self._hooks[group]
        works = []
        for size in sizes:
            self._num_operations += 1
            tensors = [tensor(8 * size)] if size else [tensor(8), tensor(16)]
            known = {"name": 7, "op_id": self._num_operations, "root": -1}
            pre(SimpleNamespace(**known, input_tensors=tensors, output_tensors=[]))
            works.append(self.nccl.launch(True, -1))
            post(SimpleNamespace(**known, work=works[-1]))
        callbacks, self._callbacks[:] = list(self._callbacks), []
        for callback in callbacks:
            callback()
        for work in works:
            work.wait_for_stream()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()
        self._task = -1

    def stream(self, is_aside: bool) -> Any:
        return self.cuda.stream(self.aside if is_aside else self.cuda.current_stream())


def recorded(engine: str, backend: str, program: list[Any]) -> tuple[list[Row], dict[str, int]]:
    """Return the rows of a program, and how many were dropped, by kind."""
    with pytest.MonkeyPatch.context() as monkeypatch, fake_backend():
        monkeypatch.setattr(Recording, "engine", engine)
        job = Job(backend, monkeypatch)
        with job.recording.capturing() as capture:
            assert capture.devices is not None
            uninstall = job.capture_cpp(capture.devices)
            for action in program:
                action.run(job)
            job.cuda.advance(1_000 * MILLISECOND)
            uninstall()
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


def on_the_host(monkeypatch: pytest.MonkeyPatch, engine: str) -> tuple[Counter[tuple[object, ...]], list[str]]:
    """Return what torch's own operators, hooks and reducer make one engine record, without times."""
    monkeypatch.setattr(Recording, "engine", engine)
    recording = Recording()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    captured = capture_of_cpp(recording.tracer)
    functions: Any = torch.ops._c10d_functional
    with recording.capturing():
        captured.install()
        try:
            name = dist.distributed_c10d._get_default_group().group_name
            layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=8 * 8 * 4 / 2**20 * 0.9)
            for step in range(3):
                recording.tracer.begin_step()
                model(torch.ones(1, 8)).sum().backward()
                results = [
                    functions.all_reduce(torch.ones(2), "sum", name),
                    functions.all_gather_into_tensor.default(torch.ones(3), 1, name),
                    functions.reduce_scatter_tensor(torch.ones(4, dtype=torch.int64), "sum", 1, group_name=name),
                    functions.broadcast(torch.ones(5), 0, name),
                    functions.all_to_all_single(torch.ones(6), [6], [6], name),
                    *functions.all_reduce_coalesced([torch.ones(7), torch.ones(8)], "sum", name),
                ]
                recording.tracer.begin_step()
                for result in results[: len(results) - step]:
                    functions.wait_tensor(result)
                with pytest.raises(RuntimeError):
                    functions.all_reduce(torch.ones(2), "no such reduction", name)
                dist.all_reduce(torch.ones(9))
            recording.tracer.completions.wait(5)
        finally:
            captured.uninstall()
    recording.tracer.finish()
    dist.destroy_process_group()
    rows = recording.rows()
    numbers = {row.id: (row.seq, row.op_in_seq) for row in rows if row.id >= 0}
    # Whether the last bucket was over before the wait for it is chance: then nothing was stalled.
    buckets = {row.id for row in rows if row.bytes >= 8 * 8 * 4}
    cleared = {"start": 0, "end": 0, "end_exact": True, "id": -1, "stalled_on": -1}
    comparable = [row for row in rows if row.kind != schema.STEP and row.stalled_on not in buckets]
    return Counter((numbers.get(row.stalled_on), *row._replace(**cleared)) for row in comparable), recording.warnings()


@pytest.mark.skipif(_native.load()[0] is None, reason="the native part was not built")
def test_both_engines_record_the_same_of_torch_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    python_rows, python_warnings = on_the_host(monkeypatch, "python")
    native_rows, native_warnings = on_the_host(monkeypatch, "native")

    assert list((python_rows - native_rows).elements()) == list((native_rows - python_rows).elements()) == []
    assert (python_warnings, native_warnings) == ([], [])
    assert python_rows.total() > 3 * 10
