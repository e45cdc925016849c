"""Time communication of tensors on an accelerator by marks on streams (docs/gpu-validation.md).

The states of a call, and what takes it from one to the next::

    launch    launch(): the mark before it; in a coalescing bracket, the bracket's
      │
    bracket   a member, until ending_bracket() launches all of them together
      │
    handover  the backend has got it
      ├── end        record_submission(): it ran on the current stream, and stalled it
      ├── pending    record_submission(): it is kept with its Work
      │     └── end      end_wait(), or record_future_waits() for a future of the Work
      ├── unwaited   record_cpp_submission(): C++ has its Work
      │     └── end      record_cpp_stall()
      └── result     record_handover(): a functional collective has a tensor instead of a Work
            └── end      record_wait()

Whatever nobody waited for is given up: give_up(), give_up_work(), give_up_all(). Its row has a start and no end.

A wait has marks around it. A stream that stalled there did so until the operation ended; else that ended earlier, at an
unknown time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from commtrace.capture.collectives.dead_works import DeadWorks
from commtrace.capture.collectives.untraced_paths import CAPTURED_COMMUNICATION
from commtrace.capture.device.clock import CudaMark, DeviceTiming, Mark, is_on_device
from commtrace.capture.device.hidden_ends import FlightRecorder, HiddenEnds
from commtrace.capture.device.placement import Placement
from commtrace.capture.device.resolved_calls import ResolvedCalls
from commtrace.capture.graphs.stamps import CapturedCall
from commtrace.capture.hooks import Arguments, Keywords
from commtrace.capture.records import (
    DeviceCall,
    Launch,
    Queue,
    device_stall_rows,
    launch_of,
    marked_stall_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.metadata import measures_durations

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from commtrace.capture.collectives.groups import GroupState


PART: Final = "capture of device communication"

MOST_UNWAITED: Final = 1_000
"""Operations of C++ that wait, per queue, for a report of when C++ waited for them."""


PendingCalls: TypeAlias = "tuple[tuple[DeviceCall, ...], Callable[[], object]]"
"""The calls of a Work, and a weak reference to it."""


class DeviceCalls:
    """The device-timed half of :class:`~commtrace.capture.collectives.process_groups.ProcessGroupCapture`."""

    def __init__(self, tracer: Tracer, clock: DeviceTiming) -> None:
        self._tracer = tracer
        self._clock = clock
        # With a reference to the Work: see commtrace.capture.collectives.waits.PendingWorks.
        self._pending: dict[int, PendingCalls] = {}
        self._dead = DeadWorks(self._pending, _may_be_waited_for, self._give_up_entry)
        self._unwaited: dict[Queue, deque[DeviceCall]] = {}
        self._streams = StreamWaits(tracer, clock)
        placement = Placement()
        hidden_ends = HiddenEnds(tracer, placement, FlightRecorder()) if measures_durations(os.environ) else None
        self.resolved = ResolvedCalls(tracer, placement, hidden_ends)
        tracer.recorder.end_pass = self.resolved.end_pass

    @property
    def pending(self) -> Mapping[int, object]:
        """Return what waits to be waited for, by the id of its Work."""
        return self._pending

    @property
    def replacements(self) -> tuple[tuple[type, str, Callable[[Callable[..., object]], Callable[..., object]]], ...]:
        """Return the methods of events to replace: class, name, and a function that wraps the original."""
        events = self._clock.event_type
        return (events, "record", self._streams.recording), (events, "wait", self._streams.waiting)

    def launch(self, launch: Launch, device: int | None = None) -> DeviceCall | None:
        """Take the launch mark; return None for an operation in a bracket, or one that cannot be timed."""
        operation, state = launch.operation, launch.state
        clock = self._clock
        if state.graph is not None:
            return state.graph.add(launch, device)
        if clock.is_off:
            return None
        if clock.is_capturing():
            self._tracer.untraced_paths.add(CAPTURED_COMMUNICATION)  # by something else than torch's graphs
            return None
        if state.bracket is not None:
            is_first_to_run = not state.bracket and state.nccl.launches_in_brackets and not operation.is_p2p
            start = clock.mark(device) if is_first_to_run else None
            queue = state.queue(-1, -1 if device is None else device)
            call = self._call(launch_of((*launch[:-1], start)), device, queue)
            call.op_in_seq = len(state.bracket)
            state.bracket.append(call)
            return None
        start = clock.mark(device)
        peer = launch.peer if operation.is_p2p and state.nccl.has_stream_per_pair else -1
        queue = state.queue(peer, start.device if is_on_device(start) else -1)
        return self._call(launch_of((*launch[:-1], start)), device, queue)

    def _call(self, launch: Launch, device: int | None, queue: Queue) -> DeviceCall:
        call = DeviceCall(launch, self._clock, device, queue, queue.next_position(self._tracer.pauses))
        if self.resolved.hidden_ends is not None:
            self.resolved.hidden_ends.follow(call)
        return call

    def record_submission(self, call: DeviceCall, work: object) -> None:
        """Record that the backend has got ``call``: it ends on the current stream, or with the wait for its Work."""
        self._record_submission((call,), work)

    def record_cpp_submission(self, call: DeviceCall, _work: object) -> None:
        """Remember an operation that C++ launched, until :meth:`record_cpp_stall` reports its wait."""
        if isinstance(call, CapturedCall):
            call.stamps.launched(call)
            call.stamps.ends_here(call, has_run=False)
            return
        # Neither waited for here nor called back, which would give its end. Work.wait releases tensors that are in use.
        # A callback on the future runs on one of torch's 32 pooled streams, behind the operation: communicators and
        # streams of the job that are among them would wait for it, which can deadlock pipelines, and the outputs would
        # be recorded on that stream, which delays the reuse of their memory (Future::invokeCallback in torch's
        # ATen/core/ivalue_inl.h).
        self._record_handover((call,))
        unwaited = self._unwaited.setdefault(call.queue, deque())
        unwaited.append(call)
        if len(unwaited) > MOST_UNWAITED:
            self._record_call(unwaited.popleft())

    def record_cpp_stall(self, call: DeviceCall, start: Mark, end: Mark, *, is_last: bool = True) -> None:
        """Record a stall of C++ on ``call`` and all earlier calls on the same stream; the stall is the last one's."""
        if isinstance(call, CapturedCall):
            return
        tracer = self._tracer
        tracer.last_mark = end
        unwaited = self._unwaited.get(call.queue)
        earlier = []
        while unwaited and unwaited[0].id <= call.id:
            earlier.append(unwaited.popleft())
        for ended in reversed(earlier):  # The last one first: the others ended before it did.
            ended.waited_from, ended.end = start, end
            self._record_call(ended)
        if is_last:
            tracer.append((device_stall_rows, schema.STALL, call, tracer.coordinates, start, end))

    def note_future(self, work: object) -> None:
        """Note that the future of a Work was taken, probably to be waited for instead."""
        for call in self._calls_of(work) or ():
            call.has_future = True

    def _calls_of(self, work: object) -> tuple[DeviceCall, ...] | None:
        calls, reference = self._pending.get(id(work), _NO_CALLS)
        return calls if reference() is work else None

    def record_future_waits(self, first: int, start: Mark, end: Mark) -> None:
        """Record that C++ has waited for the futures of calls numbered from ``first`` on."""

        def is_waited_for(entry: PendingCalls) -> bool:
            return all(call.has_future and call.id >= first for call in entry[0])

        keys = [key for key, entry in list(self._pending.items()) if is_waited_for(entry)]
        alive = [self._pending.pop(key, _NO_CALLS) for key in keys]
        entries = (*alive, *self._dead.take_all(is_waited_for))
        calls = sorted((call for calls, _ in entries for call in calls), key=lambda call: call.id)
        for call in reversed(calls):  # The last one first: the others ended before it did.
            call.waited_from, call.end = start, end
            self._record_call(call)
        if calls:
            self._record_stall(calls[-1], start, end)

    def begin_wait(self, work: object) -> tuple[tuple[DeviceCall, ...] | None, Mark | None]:
        """Return the calls of this Work, and a mark before the wait for it; None if it is not ours."""
        calls = self._calls_of(work)
        return calls, None if calls is None else calls[0].clock.mark(calls[0].device)

    def end_wait(self, work: object, calls: tuple[DeviceCall, ...], start: Mark) -> None:
        """Record the return of the wait that :meth:`begin_wait` has marked."""
        first = calls[0]
        if isinstance(first, CapturedCall):
            self._pending.pop(id(work), None)
            first.stamps.waited(first, start)
            self._streams.captured(first)
            return
        end = self._clock.mark(first.device)
        if self._pending.pop(id(work), _NO_CALLS)[0] is calls:
            self._record_waits(calls, start, end)

    def synchronizing(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``Work.synchronize``: a wait of the current stream, as ``Work.wait`` is."""

        blocked, failed = self._tracer.blocked, self._tracer.failed

        def synchronize(work: object, /, *arguments: object, **keywords: object) -> object:
            calls: tuple[DeviceCall, ...] | None = None
            start: Mark | None = None
            try:
                calls, start = self.begin_wait(work)
                if calls is not None:
                    blocked[0] = calls[0]
            except Exception as error:
                failed(PART, error)
            if calls is None:
                return original(work, *arguments, **keywords)
            try:
                result = original(work, *arguments, **keywords)
            finally:
                try:
                    blocked[0] = None
                except Exception as error:
                    failed(PART, error)
            try:
                self.end_wait(work, calls, start)
            except Exception as error:
                failed(PART, error)
            return result

        return synchronize

    def record_side_wait(self, launch: Launch, number: int, position: int, waited_from: Mark, end: Mark) -> None:
        """Note that a stream that does not compute has run, or waited for, a communication of the native part."""
        call = self.call_of(launch, number, position)
        call.waited_from, call.end = waited_from, end
        self._streams.passes(end, call)

    def take_over(self, launch: Launch, number: int, position: int, work: object) -> None:
        """Go on with a communication of the native part, as something else than its Work is waited for."""
        self._keep_pending(work, (self.call_of(launch, number, position),))

    def call_of(self, launch: Launch, number: int, position: int) -> DeviceCall:
        """Return the call of a communication of the native part."""
        peer = launch.peer if launch.operation.is_p2p and launch.state.nccl.has_stream_per_pair else -1
        device: int = launch.start.device  # type: ignore[union-attr]  # it is a mark on a device
        call = DeviceCall(launch, self._clock, device, launch.state.queue(peer, device), position)
        call.id = call.batch = number
        return call

    def record_wait(self, call: DeviceCall, start: Mark, end: Mark) -> None:
        """Record a wait for ``call`` without its Work; each of several results has a wait."""
        if isinstance(call, CapturedCall):
            call.stamps.waited(call, start)
        elif call.end is None:
            self._record_waits((call,), start, end)
        else:
            self._record_stall(call, start, end)

    def record_handover(self, call: DeviceCall) -> None:
        """Note that the backend has got ``call``, whose Work will not be waited for."""
        if isinstance(call, CapturedCall):
            call.stamps.launched(call)
            return
        self._record_handover((call,))

    def give_up(self, call: DeviceCall) -> None:
        """Record a call that nobody waited for: it has no end."""
        if not isinstance(call, CapturedCall):  # that has its end when its graph is captured
            self._record_call(call)

    def mark(self, device: int | None = None) -> Mark:
        return self._clock.mark(device)

    def record_host_stall(self, launch: Launch, number: int, start: Mark, end: Mark) -> None:
        tracer = self._tracer
        tracer.last_mark = end
        tracer.append((marked_stall_rows, schema.STALL, launch, number, tracer.coordinates, self._clock, start, end))

    def give_up_work(self, work: object) -> None:
        """Give up an earlier Work with the id of this one, which is not ours."""
        for call in self._pending.pop(id(work), _NO_CALLS)[0]:
            self.give_up(call)

    def _give_up_entry(self, entry: PendingCalls) -> None:
        for call in entry[0]:
            self.give_up(call)

    def give_up_all(self) -> None:
        """Give up everything at the end of the recording: a call without a wait has no end."""
        entries = (*self._pending.values(), *self._dead.entries)
        self._pending.clear()
        self._dead.entries.clear()
        for calls in (*(calls for calls, _ in entries), *self._unwaited.values()):
            for call in calls:
                self.give_up(call)
        self._unwaited.clear()
        self._streams.forget()
        if self.resolved.hidden_ends is not None:
            self.resolved.hidden_ends.stop()

    def unfinished(self) -> list[Launch]:
        pending = [calls for calls, _ in (*list(self._pending.values()), *self._dead.unfinished())]
        unwaited = [tuple(calls) for calls in list(self._unwaited.values())]
        calls = [call for calls in (*pending, *unwaited) for call in calls]
        return [call.launch for call in calls if not isinstance(call, CapturedCall)]  # those are sent by replays

    def starting_bracket(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``_start_coalescing``, after which operations wait for ``_end_coalescing``."""
        tracer = self._tracer

        def start_coalescing(process_group: ProcessGroup, /, *arguments: object, **keywords: object) -> object:
            try:
                state = self._state(process_group)
                state.bracket, state.bracket_is_collective = [], False
            except Exception as error:
                tracer.failed(PART, error)
            return original(process_group, *arguments, **keywords)

        return start_coalescing

    def ending_bracket(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``_end_coalescing``, which launches the members together."""
        tracer = self._tracer

        def end_coalescing(process_group: ProcessGroup, /, *arguments: object, **keywords: object) -> object:
            calls: tuple[DeviceCall, ...] = ()
            try:
                calls = self._close_bracket(process_group)
            except Exception as error:
                tracer.failed(PART, error)
            work = original(process_group, *arguments, **keywords)
            try:
                if calls:
                    self._record_submission(calls, work)
            except Exception as error:
                tracer.failed(PART, error)
            return work

        return end_coalescing

    def _state(self, process_group: ProcessGroup) -> GroupState:
        state = self._tracer.groups.state(process_group)
        return self._tracer.captures.state(state) if self._tracer.captures.open else state

    def _close_bracket(self, process_group: ProcessGroup) -> tuple[DeviceCall, ...]:
        """Give the members of a bracket their common launch mark and, to collectives, their common number."""
        state = self._state(process_group)
        calls, state.bracket = tuple(state.bracket or ()), None
        # Counted also where nothing is recorded: members of the group must agree on the numbers that follow.
        collective_seq = next(state.collective_seq) if state.bracket_is_collective else -1
        if state.graph is not None:
            return state.graph.close_bracket(state, collective_seq)
        if not calls or self._clock.is_capturing():
            return ()
        start = calls[0].launch.start or self._clock.mark(calls[0].device)
        for call in calls:
            seq = call.launch.seq if call.launch.operation.is_p2p else collective_seq
            call.batch = calls[0].id
            call.launch = call.launch._replace(seq=seq, start=start)
        return calls

    def _record_submission(self, calls: tuple[DeviceCall, ...], work: object) -> None:
        first = calls[0]
        if isinstance(first, CapturedCall):
            self._stamp(first, calls, work)
            return
        self._record_handover(calls)
        if work is None:
            self._end_on_current_stream(calls)
        elif all(_runs_on_current_stream(call) for call in calls):
            # What had its id is gone. The wait for this one will find the stream behind it already.
            self.give_up_work(work)
            self._end_on_current_stream(calls)
        else:
            self._keep_pending(work, calls)

    def _stamp(self, first: CapturedCall, calls: tuple[DeviceCall, ...], work: object) -> None:
        """Stamp what was captured, of a bracket all members together."""
        first.stamps.launched(first)
        if work is not None and not all(_runs_on_current_stream(call) for call in calls):
            self._keep_pending(work, calls)
            return
        if work is not None:
            self.give_up_work(work)
        first.stamps.ends_here(first, has_run=True)
        self._streams.captured(first)

    def _record_handover(self, calls: tuple[DeviceCall, ...]) -> None:
        now = self._clock.host_ns()
        for call in calls:
            call.handed_on = now
        if self.resolved.hidden_ends is not None:
            self.resolved.hidden_ends.returned(calls)

    def _end_on_current_stream(self, calls: tuple[DeviceCall, ...]) -> None:
        first = calls[0]
        end = self._clock.mark(first.device)
        for call in calls:
            call.queue, call.end = call.queue.on_job_streams, end
            self._record_call(call)
        self._record_stall(first, first.launch.start, end)

    def _keep_pending(self, work: object, calls: tuple[DeviceCall, ...]) -> None:
        self.give_up_work(work)
        if self._dead.entries:
            self._dead.clear_away()
        self._pending[id(work)] = calls, self._dead.reference(work)

    def _record_waits(self, calls: tuple[DeviceCall, ...], start: Mark, end: Mark) -> None:
        for call in calls:
            call.waited_from, call.end = start, end
            self._record_call(call)
        self._record_stall(calls[0], start, end)

    def _record_stall(self, call: DeviceCall, start: Mark, end: Mark) -> None:
        if not self._streams.computes(end):  # it is no stall of the job
            self._streams.passes(end, call)
            return
        tracer = self._tracer
        tracer.last_mark = end
        tracer.append((device_stall_rows, schema.STALL, call, tracer.coordinates, start, end))

    def _record_call(self, call: DeviceCall) -> None:
        kind = schema.P2P if call.launch.operation.is_p2p else schema.COLLECTIVE
        self._tracer.append((self.resolved.resolve, kind, call))


_NO_CALLS: Final[PendingCalls] = (), lambda: None


def _may_be_waited_for(entry: PendingCalls) -> bool:
    """Return whether C++ may wait for what belongs to a Work that is gone: by its future, which C++ may hold."""
    return all(call.has_future for call in entry[0])


def _runs_on_current_stream(call: DeviceCall) -> bool:
    launch = call.launch
    return bool(launch.state.nccl.runs_on_current_stream(launch.operation, launch.is_async))


_DEFAULT_STREAM: Final = 0
"""torch's number of the stream on which work runs by default."""

_STANDS_FOR: Final = "_commtrace_stands_for"
"""Attribute of an event: the communication behind which it was recorded."""


class StreamWaits:
    """Find the stream that computes, and its waits for communication on another stream, as of FSDP and ZeRO 3.

    It waits for an event recorded behind the communication; marks around the wait are the stall, which includes the
    other stream's work between communication and event: a copy, a division of gradients.
    """

    def __init__(self, tracer: Tracer, clock: DeviceTiming) -> None:
        self._tracer = tracer
        self._clock = clock
        self._latest: dict[tuple[int, int], DeviceCall] = {}

    def computes(self, mark: Mark) -> bool:
        """Return whether the mark is on the stream that computes: that of the step's begin, or of an open phase."""
        return not is_on_device(mark) or self._is_computing(mark.device, mark.stream)

    def passes(self, mark: CudaMark, call: DeviceCall) -> None:
        """Note that the stream of ``mark`` has run ``call`` or waited for it."""
        self._passes(mark.device, mark.stream, call)

    def captured(self, call: CapturedCall) -> None:
        """Note that the current stream has captured ``call``, or a wait for it: others may wait for that stream."""
        if not call.is_awaited:
            stream = self._clock.current_stream()
            self._passes(stream.device_index, self._clock.stream_number(stream), call)

    def forget(self) -> None:
        self._latest.clear()

    def recording(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``torch.cuda.Event.record``."""
        latest, failed = self._latest, self._tracer.failed

        def record(event: object, /, *arguments: object, **keywords: object) -> object:
            result = original(event, *arguments, **keywords)
            try:
                if latest:
                    self._recorded(event, _stream_of(arguments, keywords))
            except Exception as error:
                failed(PART, error)
            return result

        return record

    def waiting(self, original: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement of ``torch.cuda.Event.wait``, which ``Stream.wait_event`` and ``wait_stream`` call."""
        failed = self._tracer.failed

        def wait(event: object, /, *arguments: object, **keywords: object) -> object:
            call: DeviceCall | None = None
            start: CudaMark | None = None
            try:
                call = getattr(event, _STANDS_FOR, None)
                if call is not None:
                    start = self._about_to_wait(call, _stream_of(arguments, keywords))
            except Exception as error:
                failed(PART, error)
            result = original(event, *arguments, **keywords)
            try:
                if call is not None and start is not None:
                    self._waited(call, start)
            except Exception as error:
                failed(PART, error)
            return result

        return wait

    def _recorded(self, event: object, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            stream = self._clock.current_stream()
        call = self._latest.get((stream.device_index, self._clock.stream_number(stream)))
        if call is not None and not _is_joined(call):
            setattr(event, _STANDS_FOR, call)
        elif getattr(event, _STANDS_FOR, None) is not None:
            setattr(event, _STANDS_FOR, None)

    def _is_computing(self, device: int, stream: int) -> bool:
        step = self._tracer.step_start
        marks = [step] if is_on_device(step) and step.device == device else []
        has_step = bool(marks)
        starts = (span.start for span in self._tracer.open_computing_spans())
        marks += [start for start in starts if is_on_device(start) and start.device == device]
        return any(mark.stream == stream for mark in marks) or (stream == _DEFAULT_STREAM and not has_step)

    def _passes(self, device: int, stream: int, call: DeviceCall) -> None:
        latest = self._latest.get((device, stream))
        if latest is None or latest.id < call.id:
            self._latest[device, stream] = call

    def _about_to_wait(self, call: DeviceCall, stream: torch.cuda.Stream | None) -> CudaMark | None:
        """Return a mark before a wait of the computing stream; None for a wait of another one."""
        if _is_joined(call) or not self._tracer.recording or self._clock.is_off:
            return None
        if stream is None:
            stream = self._clock.current_stream()
        device, number = stream.device_index, self._clock.stream_number(stream)
        if isinstance(call, CapturedCall):
            is_current = self._clock.stream_number(self._clock.current_stream()) == number
            return call.clock.mark(device) if is_current else None
        if not self._is_computing(device, number):
            self._passes(device, number, call)
            return None
        start = self._clock.mark(device)
        return start if is_on_device(start) and start.stream == number else None

    def _waited(self, call: DeviceCall, start: CudaMark) -> None:
        if isinstance(call, CapturedCall):
            call.stamps.waited(call, start)
            call.is_joined = call.is_awaited
            self.captured(call)
            return
        tracer = self._tracer
        call.is_joined = True
        tracer.last_mark = end = self._clock.mark(start.device)
        tracer.append((device_stall_rows, schema.STALL, call, tracer.coordinates, start, end))


def _is_joined(call: DeviceCall) -> bool:
    """Return whether no wait for ``call`` is of interest any more.

    What a capture has left without stamps, as one that was refused, is not waited for once the capture is over.
    """
    return call.is_joined or (isinstance(call, CapturedCall) and not call.stamps.is_capturing)


def _stream_of(arguments: Arguments, keywords: Keywords) -> torch.cuda.Stream | None:
    return arguments[0] if arguments else keywords.get("stream")
