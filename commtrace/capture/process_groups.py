"""Captures every communication that Python code hands to a process group.

The methods of the class ``torch.distributed.ProcessGroup`` are replaced, not the functions of ``torch.distributed``:
frameworks bind those functions when they are imported, but all of them end in a method of the class. ``Work.wait`` is
replaced for the stalls. Originals are taken from, and put back into, the class dictionaries: reading a method as an
attribute and assigning it back would lose its binding.

The order of events around one operation::

    launch mark → original method → (completion callback: end mark) → wait: mark → original wait → mark

A failure in our code must not reach training, hence the try around everything that is ours; a failure in the original
must, hence nothing around that.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.clock import DeviceClock, HostClock, Mark, now_ns
from commtrace.capture.operations import OPERATIONS, Operation
from commtrace.capture.records import Call, Stall, WaitedCall
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of communication"
_SYNCHRONOUS_P2P: Final = frozenset({"send", "recv"})


class ProcessGroupCapture:
    """Patches ``ProcessGroup`` and ``Work`` and turns their calls into records.

    Args:
        tracer: where records go and coordinates come from.
        device_clock: times communication of tensors on an accelerator; None where there is no accelerator.
    """

    def __init__(self, tracer: Tracer, device_clock: DeviceClock | None = None) -> None:
        self._tracer = tracer
        self._host_clock = HostClock()
        self._device_clock = device_clock
        self._ids = itertools.count()
        self._pending: dict[int, tuple[Call, ...]] = {}
        self._originals: list[tuple[type, str, Any, Any]] = []

    def install(self) -> None:
        """Replace the methods. Idempotent."""
        from torch.distributed import ProcessGroup, Work

        if self._originals:
            return
        for name, operation in OPERATIONS.items():
            if name in ProcessGroup.__dict__:
                self._replace(ProcessGroup, name, self._captured(name, ProcessGroup.__dict__[name], operation))
        for name, wrap in (("_start_coalescing", self._starting), ("_end_coalescing", self._ending)):
            if name in ProcessGroup.__dict__:
                self._replace(ProcessGroup, name, wrap(ProcessGroup.__dict__[name]))
        for work_type in (Work, *_subclasses(Work)):
            if "wait" in work_type.__dict__:
                self._replace(work_type, "wait", self._waiting(work_type.__dict__["wait"]))

    def uninstall(self) -> None:
        """Put every original back, exactly. A method that somebody else has replaced since is left alone."""
        for owner, name, original, replacement in reversed(self._originals):
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._originals.clear()
        self._pending.clear()

    def unfinished(self) -> list[Call]:
        """Communications that were launched and whose end has not been seen."""
        return [call for calls in list(self._pending.values()) for call in calls if call.end is None]

    def _replace(self, owner: type, name: str, replacement: Callable[..., Any]) -> None:
        original = owner.__dict__[name]
        _copy_description(original, replacement)
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original, owner.__dict__[name]))

    def _captured(self, name: str, original: Any, operation: Operation) -> Callable[..., Any]:
        launch, launched, tracer = self._launch, self._launched, self._tracer
        bound = original.__get__(None, object) if isinstance(original, staticmethod) else original

        def method(process_group: Any, /, *arguments: Any, **keywords: Any) -> Any:
            call = None
            try:
                call = launch(operation, process_group, arguments, keywords)
            except Exception as error:
                tracer.failed(PART, error)
            work = bound(process_group, *arguments, **keywords)
            if call is not None:
                try:
                    launched(call, work)
                except Exception as error:
                    tracer.failed(PART, error)
            return work

        return method

    def _launch(
        self, operation: Operation, process_group: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Call | None:
        """Number the operation; if it is to be recorded, measure it and take the launch mark."""
        tracer = self._tracer
        state = tracer.groups.states.get(id(process_group)) or tracer.groups.state(process_group)
        if keywords:
            arguments = _positional(arguments, keywords, operation.arguments)
        peer = -1
        is_async: bool | None
        if operation.is_p2p:
            position = operation.peer_argument
            peer = -1 if position is None else state.ranks_by_group_rank[arguments[position]]
            seq = state.next_p2p(operation.is_send, peer)
            # Frame 0 is this function, 1 the replaced method, 2 its caller: isend, irecv, send or recv.
            is_async = sys._getframe(2).f_code.co_name not in _SYNCHRONOUS_P2P
            kind = schema.P2P
        else:
            seq = next(state.collective_seq) if state.bracket is None else -1
            options = arguments[-1] if arguments else None
            is_async = getattr(options, "asyncOp", None)
            if is_async is None:
                is_async = bool(sys._getframe(2).f_locals.get("async_op", False))
            kind = schema.COLLECTIVE
            if operation.peer_argument is not None:
                root = getattr(options, "rootRank", options)
                peer = state.ranks_by_group_rank[root] if isinstance(root, int) else -1
        if not tracer.recording:
            state.bracket_is_collective |= kind == schema.COLLECTIVE
            return None
        num_bytes, self_bytes, dtype, tensor, members = operation.measure(arguments, process_group.rank())
        clock: DeviceClock = self._host_clock
        if self._device_clock is not None and tensor is not None and tensor.is_cuda:
            clock = self._device_clock
            if clock.is_capturing():
                tracer.saw_graph_capture = True
                return None
        call = Call(
            kind, operation.name, state.group.id, seq, num_bytes, self_bytes, dtype, peer, is_async,
            tracer.coordinates, next(self._ids), clock, None,
        )  # fmt: skip
        if members:
            call.detail = {"members": members}
        if state.bracket is not None:
            state.bracket_is_collective |= kind == schema.COLLECTIVE
            call.op_in_seq = len(state.bracket)
            state.bracket.append(call)
            return None
        if clock is not self._host_clock and is_async:
            call.queue = state.queue(peer)
        call.start = clock.mark()
        return call

    def _launched(self, call: Call, work: Any) -> None:
        """The operation is under way: see to it that its end will be known."""
        if work is None:
            # Nobody can wait for it: it was blocking, or it runs on the current stream, which it holds up.
            tracer = self._tracer
            call.end = tracer.last_mark = end = call.clock.mark()
            tracer.append(WaitedCall(call, Stall((call,), tracer.coordinates, call.start, end)))
            return
        self._remember(work, (call,))
        # gloo's P2P works have no future.
        if call.is_async and (call.kind == schema.COLLECTIVE or call.clock is not self._host_clock):
            self._end_from_future(call, work)

    def _remember(self, work: Any, calls: tuple[Call, ...]) -> None:
        key = id(work)
        forgotten = self._pending.get(key)
        if forgotten is not None:
            # That Work is gone (its id is in use again) and nobody waited for it.
            for call in forgotten:
                if call.end is None:
                    self._tracer.append(call)
        self._pending[key] = calls

    def _end_from_future(self, call: Call, work: Any) -> None:
        """Have the end of an asynchronous collective marked when it comes, not when somebody asks."""
        append, mark = self._tracer.append, call.clock.mark

        def completed(_future: Any) -> None:
            call.end = mark()
            append(call)

        try:
            future = work.get_future()
        except RuntimeError:
            return  # This backend's work has no future: the return of the wait is its end.
        # `then` runs the callback on a stream that waits for the communication; `add_done_callback` does not.
        call.awaits_callback = True
        if call.clock is self._host_clock:
            future.add_done_callback(completed)
        else:
            future.then(completed)

    def _waiting(self, original: Any) -> Callable[..., Any]:
        pending, tracer, waited = self._pending, self._tracer, self._waited
        host_clock = self._host_clock

        def wait(work: Any, /, *arguments: Any, **keywords: Any) -> Any:
            calls = pending.get(id(work))
            if calls is None:
                return original(work, *arguments, **keywords)
            clock = calls[0].clock
            start = now_ns() if clock is host_clock else clock.mark()
            result = original(work, *arguments, **keywords)
            try:
                waited(work, calls, start, clock.mark())
            except Exception as error:
                tracer.failed(PART, error)
            return result

        return wait

    def _waited(self, work: Any, calls: tuple[Call, ...], start: Mark, end: Mark) -> None:
        if self._pending.pop(id(work), None) is None:
            return
        tracer = self._tracer
        tracer.last_mark = end
        call = calls[0]
        stall = Stall(calls, tracer.coordinates, start, end)
        if len(calls) == 1 and not call.awaits_callback and call.end is None:
            call.end = end
            tracer.append(WaitedCall(call, stall))
            return
        for member in calls:
            member.waited_until = end
            if member.end is None and not member.awaits_callback:
                member.end = end
                tracer.append(member)
        tracer.append(stall)

    def _starting(self, original: Any) -> Callable[..., Any]:
        tracer = self._tracer

        def start_coalescing(process_group: Any, /, *arguments: Any, **keywords: Any) -> Any:
            try:
                state = tracer.groups.state(process_group)
                state.bracket, state.bracket_is_collective = [], False
            except Exception as error:
                tracer.failed(PART, error)
            return original(process_group, *arguments, **keywords)

        return start_coalescing

    def _ending(self, original: Any) -> Callable[..., Any]:
        tracer, close_bracket, bracket_launched = self._tracer, self._close_bracket, self._bracket_launched

        def end_coalescing(process_group: Any, /, *arguments: Any, **keywords: Any) -> Any:
            calls: tuple[Call, ...] = ()
            try:
                calls = close_bracket(process_group)
            except Exception as error:
                tracer.failed(PART, error)
            work = original(process_group, *arguments, **keywords)
            if calls:
                try:
                    bracket_launched(calls, work)
                except Exception as error:
                    tracer.failed(PART, error)
            return work

        return end_coalescing

    def _close_bracket(self, process_group: Any) -> tuple[Call, ...]:
        """The members of a bracket are launched together, here: they share the time, and collectives the number."""
        state = self._tracer.groups.state(process_group)
        calls, state.bracket = tuple(state.bracket or ()), None
        # Counted also where nothing is recorded: members of the group must agree on the numbers that follow.
        collective_seq = next(state.collective_seq) if state.bracket_is_collective else -1
        if not calls:
            return ()
        start = calls[0].clock.mark()
        for call in calls:
            call.start = start
            if call.kind == schema.COLLECTIVE:
                call.seq = collective_seq
        return calls

    def _bracket_launched(self, calls: tuple[Call, ...], work: Any) -> None:
        if work is not None:
            self._remember(work, calls)
            return
        end = calls[0].clock.mark()
        for call in calls:
            call.end = end
            self._tracer.append(call)
        self._tracer.append(Stall(calls, self._tracer.coordinates, calls[0].start, end))


def _positional(arguments: tuple[Any, ...], keywords: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Arguments in the order of ``names``, wherever they were passed by keyword."""
    return arguments + tuple(keywords[name] for name in names[len(arguments) :] if name in keywords)


def _subclasses(owner: type) -> list[type]:
    children: list[type] = owner.__subclasses__()
    return [found for child in children for found in (child, *_subclasses(child))]


def _copy_description(original: Any, replacement: Any) -> None:
    replacement.__name__ = getattr(original, "__name__", replacement.__name__)
    replacement.__qualname__ = getattr(original, "__qualname__", replacement.__qualname__)
    replacement.__doc__ = getattr(original, "__doc__", None)
    replacement.__wrapped__ = original
