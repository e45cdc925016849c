"""Communication of tensors on an accelerator: marks on streams instead of readings of the host's clock.

How the end of an operation becomes known (docs/how-it-works.md):

* synchronous, no Work: it runs on the current stream; marks before and after bracket it, and it stalls that stream.
* asynchronous: a callback on the Work's future runs with a stream current that waits for the operation; a mark there
  is its end. Its start is its launch or the end of the previous operation of that group, whichever is later.
* inside a coalescing bracket, or without a future: the mark after the wait for it.

``Work.wait`` is never called from here: it releases the tensors that the operation still uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.clock import DeviceClock, Mark
from commtrace.capture.records import DeviceCall, Launch, device_call_rows, device_stall_rows
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of device communication"


class DeviceCalls:
    """The device-timed half of :class:`~commtrace.capture.process_groups.ProcessGroupCapture`.

    Args:
        tracer: where entries go.
        clock: takes the marks.
    """

    def __init__(self, tracer: Tracer, clock: DeviceClock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._pending: dict[int, tuple[DeviceCall, ...]] = {}

    def launch(self, launch: Launch) -> DeviceCall | None:
        """Take the launch mark; None for an operation that is not launched now (in a bracket) or cannot be timed."""
        operation, state, _, _, _, _, peer, is_async = launch[:8]
        if self._clock.is_capturing():
            self._tracer.saw_graph_capture = True
            return None
        queue = state.queue(peer if operation.is_p2p else -1) if is_async else None
        if state.bracket is not None:
            call = DeviceCall(launch, self._clock, state.queue(-1))
            call.op_in_seq = len(state.bracket)
            state.bracket.append(call)
            return None
        return DeviceCall((*launch[:-1], self._clock.mark()), self._clock, queue)

    def launched(self, call: DeviceCall, work: Any) -> None:
        """See to it that the end of the operation will be known."""
        if work is None:
            tracer = self._tracer
            call.end = tracer.last_mark = end = self._clock.mark()
            self._ended(call)
            tracer.append((device_stall_rows, schema.STALL, call, tracer.coordinates, call.launch[-1], end))
            return
        self._remember(work, (call,))
        if call.launch[7]:
            self._end_from_future(call, work)

    def wait(self, original: Any, work: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """``Work.wait`` with a mark on either side, for works that are ours; else just ``Work.wait``."""
        calls = self._pending.get(id(work))
        if calls is None or self._clock.is_capturing():
            return original(work, *arguments, **keywords)
        start = self._clock.mark()
        result = original(work, *arguments, **keywords)
        try:
            self._pending.pop(id(work), None)
            self.waited(calls, start, self._clock.mark())
        except Exception as error:
            self._tracer.failed(PART, error)
        return result

    def unfinished(self) -> list[Launch]:
        """Operations that were launched and that nobody has waited for."""
        return [call.launch for calls in list(self._pending.values()) for call in calls if call.end is None]

    def starting_bracket(self, original: Any) -> Callable[..., Any]:
        """Replacement of ``_start_coalescing``: what follows is launched by ``_end_coalescing``."""
        tracer = self._tracer

        def start_coalescing(process_group: Any, /, *arguments: Any, **keywords: Any) -> Any:
            try:
                state = tracer.groups.state(process_group)
                state.bracket, state.bracket_is_collective = [], False
            except Exception as error:
                tracer.failed(PART, error)
            return original(process_group, *arguments, **keywords)

        return start_coalescing

    def ending_bracket(self, original: Any) -> Callable[..., Any]:
        """Replacement of ``_end_coalescing``: the members are launched together, here."""
        tracer = self._tracer

        def end_coalescing(process_group: Any, /, *arguments: Any, **keywords: Any) -> Any:
            calls: tuple[DeviceCall, ...] = ()
            try:
                calls = self._close_bracket(process_group)
            except Exception as error:
                tracer.failed(PART, error)
            work = original(process_group, *arguments, **keywords)
            try:
                if calls:
                    self._bracket_launched(calls, work)
            except Exception as error:
                tracer.failed(PART, error)
            return work

        return end_coalescing

    def _close_bracket(self, process_group: Any) -> tuple[DeviceCall, ...]:
        """Give the members of a bracket their common launch mark and, to collectives, their common number."""
        state = self._tracer.groups.state(process_group)
        calls, state.bracket = tuple(state.bracket or ()), None
        # Counted also where nothing is recorded: members of the group must agree on the numbers that follow.
        collective_seq = next(state.collective_seq) if state.bracket_is_collective else -1
        if not calls or self._clock.is_capturing():
            return ()
        start = self._clock.mark()
        for call in calls:
            operation, own_state, seq = call.launch[:3]
            call.launch = (
                operation, own_state, seq if operation.is_p2p else collective_seq, *call.launch[3:-1], start,
            )  # fmt: skip
        return calls

    def _bracket_launched(self, calls: tuple[DeviceCall, ...], work: Any) -> None:
        if work is not None:
            self._remember(work, calls)
            return
        tracer = self._tracer
        end = tracer.last_mark = self._clock.mark()
        for call in calls:
            call.queue = None
            call.end = end
            self._ended(call)
        tracer.append((device_stall_rows, schema.STALL, calls[0], tracer.coordinates, calls[0].launch[-1], end))

    def _remember(self, work: Any, calls: tuple[DeviceCall, ...]) -> None:
        for call in self._pending.get(id(work), ()):
            if call.end is None and not call.awaits_callback:
                self._ended(call)  # That Work is gone, for its id is in use again, and nobody waited for it.
        self._pending[id(work)] = calls

    def complete(self, call: DeviceCall, work: Any) -> None:
        """Have the end of an operation marked that nobody in Python will wait for."""
        self._end_from_future(call, work)

    def waited(self, calls: tuple[DeviceCall, ...], start: Mark, end: Mark) -> None:
        """The current stream has waited for these operations from ``start`` to ``end``."""
        tracer = self._tracer
        tracer.last_mark = end
        for call in calls:
            call.waited_until = end
            if call.end is None and not call.awaits_callback:
                call.end = end
                self._ended(call)
        tracer.append((device_stall_rows, schema.STALL, calls[0], tracer.coordinates, start, end))

    def _end_from_future(self, call: DeviceCall, work: Any) -> None:
        """Mark the end where the operation ends. ``then`` makes the stream current that waits for it."""
        try:
            future = work.get_future()
        except RuntimeError:
            return  # This backend's work has none: the mark after the wait is its end.
        call.awaits_callback = True

        def completed(_future: Any) -> None:
            try:
                call.end = self._clock.mark()
                self._ended(call)
            except Exception as error:
                self._tracer.failed(PART, error)

        future.then(completed)

    def _ended(self, call: DeviceCall) -> None:
        kind = schema.P2P if call.launch[0].is_p2p else schema.COLLECTIVE
        self._tracer.append((device_call_rows, kind, call))
