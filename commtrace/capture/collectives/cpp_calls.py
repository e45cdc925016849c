"""Times communication that C++ issues and waits for: Python code never sees its ``Work.wait``.

Its end comes from the completion callback; :mod:`commtrace.capture.collectives.ddp_reducer` reports stalls on it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, TypeAlias

from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import Operation, Payload
from commtrace.capture.device.clock import Mark, now_ns
from commtrace.capture.device.device_calls import DeviceCalls
from commtrace.capture.records import (
    ENDED,
    NUMBER,
    WAITED,
    DeviceCall,
    Launch,
    completed_rows,
    forgotten_rows,
    kind_of,
    next_id,
    stall_rows,
)
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

PART: Final = "capture of DistributedDataParallel"
"""Switched off if the times cannot be taken."""


class HostCall:
    """A host-timed communication of C++. ``completion`` is as in :mod:`commtrace.capture.records`."""

    __slots__ = ("completion", "launch")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.completion = [next_id(), 0, 0]

    @property
    def id(self) -> int:
        """Return the number of the communication."""
        return self.completion[NUMBER]

    @property
    def end(self) -> int:
        """Return when its completion called back; 0 before that."""
        return self.completion[ENDED]


CppCall: TypeAlias = "HostCall | DeviceCall"


class CppCalls:
    """Numbers and times what C++ issues.

    Args:
        tracer: where entries go and coordinates come from.
        devices: times tensors of an accelerator; None where there is none.
    """

    def __init__(self, tracer: Tracer, devices: DeviceCalls | None = None) -> None:
        self._tracer = tracer
        self._devices = devices
        self._unfinished: dict[int, HostCall] = {}

    def state(self, boxed_group: Any) -> GroupState:
        """Return the state of a group as C++ hands it to a kernel."""
        from torch.distributed import ProcessGroup

        return self._tracer.groups.state(ProcessGroup.unbox(boxed_group))

    def launch(
        self, operation: Operation, state: GroupState, seq: int, payload: Payload, root: int | None
    ) -> CppCall | None:
        """Take the time before a communication is handed on; return None if it is not to be recorded."""
        tracer = self._tracer
        if not tracer.recording or tracer.groups.skips(state):
            return None
        num_bytes, self_bytes, dtype, tensor, members = payload
        is_member = root is not None and 0 <= root < len(state.ranks_by_group_rank)  # else its backend will refuse it
        peer = state.ranks_by_group_rank[root] if root is not None and is_member else -1
        launch = Launch(
            operation, state, seq, num_bytes, self_bytes, dtype, peer, True, tracer.coordinates, members, now_ns(),
        )  # fmt: skip
        if self._devices is not None and tensor is not None and tensor.is_cuda:
            return self._devices.launch(launch, tensor.device.index)
        return HostCall(launch)

    def complete(self, issued: CppCall, work: Any, *, stalls_until_end: bool) -> None:
        """Have the end marked when it comes.

        Args:
            issued: what :meth:`launch` returned.
            work: the operation's Work.
            stalls_until_end: the caller does nothing until the end of the operation.
        """
        if isinstance(issued, DeviceCall):
            if self._devices is not None:
                self._devices.complete(issued, work)
            return
        call, append, unfinished, failed = issued, self._tracer.append, self._unfinished, self._tracer.failed
        try:
            future = work.get_future()
        except RuntimeError:  # This backend's work has none: its end cannot be known.
            append((forgotten_rows, kind_of(call.launch), call.launch, call.id))
            return
        unfinished[call.id] = call
        coordinates = self._tracer.coordinates

        def completed(_alive: object, _future: object) -> None:
            try:
                call.completion[ENDED] = end = now_ns()
                unfinished.pop(call.id, None)
                append((completed_rows, kind_of(call.launch), call.launch, call.id, end, call.completion))
                if stalls_until_end:
                    append((stall_rows, schema.STALL, call.launch, call.id, coordinates, call.launch.start, end))
            except Exception as error:  # torch would only write it to the log
                failed(PART, error)

        completions = self._tracer.completions
        completions.add(future, partial(completed, completions.alive))

    def mark(self, issued: CppCall) -> Mark:
        """Return a mark on the clock that times this communication."""
        return issued.clock.mark(issued.device) if isinstance(issued, DeviceCall) else now_ns()

    def stalled(self, issued: CppCall, start: Mark, end: Mark) -> None:
        """Record a stall on the communication from ``start`` to ``end``."""
        tracer = self._tracer
        tracer.last_mark = end
        if isinstance(issued, DeviceCall):
            if self._devices is not None:
                self._devices.stalled(issued, start, end)
            return
        issued.completion[WAITED] = end
        # What follows the end of the communication is the reducer copying gradients: work, not a stall. One that was
        # over before somebody would have waited stalled nobody.
        end = min(end, issued.end) if issued.end else end
        if end > start:
            tracer.append((stall_rows, schema.STALL, issued.launch, issued.id, tracer.coordinates, start, end))

    @property
    def devices(self) -> DeviceCalls | None:
        """Return what times tensors of an accelerator; None where there is none."""
        return self._devices

    def unfinished(self) -> list[Launch]:
        """Return what was launched and has not ended."""
        return [call.launch for call in list(self._unfinished.values())]
