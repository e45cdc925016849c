"""Issue the communication of a recorded run again, with its gaps, and time it.

A gap is slept. On a GPU the host waits for the device where the recorded rank waited for a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from commtrace.benchmarks.job import BenchmarkError, BenchmarkJob
from commtrace.benchmarks.operations import make_call, tensor_elements
from commtrace.benchmarks.replay_program import MESSAGES, CallEvent, CallProgram, Programs, ReplayedCall, Step
from commtrace.trace.json_values import JsonObject, fields_to_json

_T = TypeVar("_T")

Issue = Callable[[], Any]
"""Returns the handle to wait for."""

_SPUN_NS: Final = 100_000
"""The end of a gap is spun: sleeping is not more exact than this."""


class Waited(NamedTuple):
    """How long a rank stood still for one call in one step, ns."""

    call: int
    recorded_ns: int
    replayed_ns: int


class Replayed(NamedTuple):
    """What one rank measured."""

    step_ns: tuple[int, ...]
    waited: tuple[Waited, ...]


@dataclass(frozen=True, slots=True)
class ComparedCalls:
    """The calls of one role and operation, on all ranks and in all replayed steps."""

    role: str
    operation: str
    calls: int
    num_bytes: int
    recorded_ns: int  # that ranks stood still for them
    replayed_ns: int

    def to_json(self) -> JsonObject:
        return fields_to_json(self)


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """A replay beside the run."""

    steps: int
    recorded_step_ns: int  # mean over ranks and steps
    replayed_step_ns: int
    rows: tuple[ComparedCalls, ...]
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.replayed_step_ns / max(self.recorded_step_ns, 1)

    def to_json(self) -> JsonObject:
        return {**fields_to_json(self), "ratio": self.ratio}


def share(job: BenchmarkJob, value: _T | None) -> _T:
    """Return the value of rank 0 on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=job.control)
    assert values[0] is not None
    return values[0]


def replay(job: BenchmarkJob, programs: Programs) -> ReplayComparison | None:
    """Replay the programs, each on its rank; return the comparison on rank 0.

    Raises:
        BenchmarkError: a rank or the network failed.
    """
    # All ranks make all groups: torch numbers them by the order of the calls.
    groups = {ranks: dist.new_group(list(ranks)) for ranks in programs.groups}
    program = programs.ranks[job.rank]
    try:
        measured = _Player(job, program, groups).play()
    except (RuntimeError, ValueError) as error:
        raise BenchmarkError(f"rank {job.rank} failed in the replay: {error}") from error
    everyone = job.gather(measured)
    return _compare(programs, everyone) if job.rank == 0 else None


class _Player:
    def __init__(
        self, job: BenchmarkJob, program: CallProgram, groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        self._job, self._program, self._groups = job, program, groups
        self._issues: dict[ReplayedCall, Issue] = {}
        self._tensors: dict[ReplayedCall, torch.Tensor] = {}
        self._pending: dict[int, Any] = {}
        self._waited: list[Waited] = []
        for call in program.calls:  # memory is not part of what is timed
            self._issue_of(call)

    def play(self) -> Replayed:
        dist.barrier(group=self._job.control)
        times = [self._step(step) for step in self._program.steps]
        for call in list(self._pending):
            self._wait(call)
        return Replayed(tuple(times), tuple(self._waited))

    def _step(self, step: Step) -> int:
        begin = time.perf_counter_ns()
        for events in _batches(step.events, self._program.calls):
            _pass(events[0].gap_ns)
            if len(events) > 1:
                self._messages(events)
            else:
                self._event(events[0])
        _pass(step.rest_ns)
        return time.perf_counter_ns() - begin

    def _event(self, event: CallEvent) -> None:
        call = self._program.calls[event.call]
        start = time.perf_counter_ns()
        if not event.is_wait:
            self._pending[event.call] = self._issue_of(call)()
        if event.is_wait or not call.is_async:
            self._wait(event.call)
            self._waited.append(Waited(event.call, event.recorded_ns, time.perf_counter_ns() - start))

    def _messages(self, events: Sequence[CallEvent]) -> None:
        """Issue messages together, as they were: with NCCL, two ranks that both send first would wait for ever."""
        operations = []
        for event in events:
            call = self._program.calls[event.call]
            issue = dist.isend if call.operation == "send" else dist.irecv
            operations.append(dist.P2POp(issue, self._tensors[call], call.peer, self._groups[call.ranks]))
        works = dist.batch_isend_irecv(operations)
        for position, event in enumerate(events):  # NCCL has one handle for all of them
            self._pending[event.call] = works[position] if len(works) == len(events) else works[0]

    def _wait(self, call: int) -> None:
        work = self._pending.pop(call, None)
        if work is None:
            return  # waited for already: a rank may stall twice for the same call
        work.wait()
        if self._job.device.type == "cuda":
            torch.cuda.current_stream(self._job.device).synchronize()

    def _issue_of(self, call: ReplayedCall) -> Issue:
        if call not in self._issues:
            self._issues[call] = self._make(call)
        return self._issues[call]

    def _make(self, call: ReplayedCall) -> Issue:
        group, device = self._groups[call.ranks], self._job.device
        if call.operation == "barrier":
            return lambda: dist.barrier(group=group, async_op=True)
        dtype = _dtype(call.dtype)
        ranks = _first(call)
        if call.operation in MESSAGES:
            elements = tensor_elements("send", call.num_bytes, 2, dtype.itemsize)
            tensor = self._tensors[call] = torch.ones(elements, dtype=dtype, device=device)
            issue = dist.isend if call.operation == "send" else dist.irecv
            return lambda: issue(tensor, call.peer, group=group)
        elements = tensor_elements(call.operation, call.num_bytes, len(call.ranks), dtype.itemsize)
        return make_call(call.operation, elements, ranks, group, dtype, device, is_async=True)


def _batches(events: Sequence[CallEvent], calls: Sequence[ReplayedCall]) -> Iterator[Sequence[CallEvent]]:
    """Yield events that are issued together: asynchronous messages in one group right behind one another."""
    batch: list[CallEvent] = []
    for event in events:
        call = calls[event.call]
        is_message = call.is_async and call.operation in MESSAGES and not event.is_wait
        follows = batch and is_message and event.gap_ns <= _SPUN_NS and calls[batch[-1].call].ranks == call.ranks
        if batch and not follows:
            yield batch
            batch = []
        if is_message:
            batch.append(event)
        else:
            yield [event]
    if batch:
        yield batch


def _first(call: ReplayedCall) -> Sequence[int]:
    """Return the ranks of a call with the root in front."""
    if call.peer in call.ranks:
        return (call.peer, *(rank for rank in call.ranks if rank != call.peer))
    return call.ranks


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # the bytes count, not the numbers: types that cannot be added are sent as bytes
    if not isinstance(dtype, torch.dtype) or dtype is torch.bool or "float8" in name:
        return torch.uint8
    return dtype


def _pass(gap_ns: int) -> None:
    end = time.perf_counter_ns() + gap_ns
    if gap_ns > _SPUN_NS:
        time.sleep((gap_ns - _SPUN_NS) / 1e9)
    while time.perf_counter_ns() < end:
        pass


def _compare(programs: Programs, everyone: Sequence[Replayed]) -> ReplayComparison:
    calls: dict[tuple[str, str], list[int]] = {}
    for program in programs.ranks:
        for call in program.calls:
            sums = calls.setdefault((call.role, call.operation), [0, 0, 0, 0])
            sums[0] += 1
            sums[1] += call.num_bytes
    for program, replayed in zip(programs.ranks, everyone, strict=True):
        for waited in replayed.waited:
            call = program.calls[waited.call]
            sums = calls[call.role, call.operation]
            sums[2] += waited.recorded_ns
            sums[3] += waited.replayed_ns
    recorded = [step.recorded_ns for program in programs.ranks for step in program.steps]
    measured = [time_ns for replayed in everyone for time_ns in replayed.step_ns]
    return ReplayComparison(
        max(len(program.steps) for program in programs.ranks),
        sum(recorded) // len(recorded),
        sum(measured) // len(measured),
        tuple(ComparedCalls(*key, *sums) for key, sums in sorted(calls.items(), key=lambda item: -item[1][2])),
        programs.notes,
    )
