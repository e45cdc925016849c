"""Make the rows of the operations whose marks the device has passed: all those of a pass of the harvester together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commtrace.capture.device.clock import Mark, is_on_device
from commtrace.capture.device.facts import CallFacts, OperationFacts, Part, dropped_on_failure, rows_of
from commtrace.capture.device.hidden_ends import HiddenEnds
from commtrace.capture.device.placement import UNMEASURED, DeviceOperations, Placement
from commtrace.capture.records import DeviceCall, Entry, communication_row
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.schema import Row


class _Resolved(NamedTuple):
    """A call and the times of its marks, ns."""

    call: DeviceCall
    launch: int
    waited_from: int
    end: int


class ResolvedCalls:
    """Gather operations in a pass, and place them and make their rows at its end. For the harvester's thread."""

    def __init__(self, tracer: Tracer, placement: Placement, hidden_ends: HiddenEnds | None = None) -> None:
        self.placement = placement
        self.hidden_ends = hidden_ends
        self._recorder = tracer.recorder
        self._resolved: list[_Resolved] = []
        self._parts: list[Part] = []

    def resolve(self, entry: Entry) -> list[Row] | None:
        """Gather ``(…, call)`` once the device has passed its marks. A call without a wait has its row at once."""
        call: DeviceCall = entry[2]
        queue = call.queue
        # Once the clock is off, nothing is waited for: resolving raises, and the call is dropped.
        if queue.unreached is not None and queue.unreached.id < call.id and not call.clock.is_off:
            return None
        resolve = call.clock.resolve
        launch = resolve(call.launch.start)
        waited_from = launch if call.waited_from is None else resolve(call.waited_from)
        end = launch if call.end is None else resolve(call.end)
        if launch is None or waited_from is None or end is None:
            if queue.unreached is None:
                queue.unreached = call
            return None
        if queue.unreached is call:
            queue.unreached = None
        if call.end is None:
            timing = schema.HOST_TIMING if isinstance(call.launch.start, int) else call.clock.timing
            return [communication_row(call.launch, launch, launch, call.id, timing, True, call.op_in_seq)]
        self._resolved.append(_Resolved(call, launch, waited_from, end))
        return []

    def add(self, calls: DeviceOperations, facts: OperationFacts) -> None:
        """Gather whole columns."""
        self._parts.append((calls, facts))

    def end_pass(self, last: bool) -> list[Row]:
        """Return the rows of what was gathered and is not held back; in the ``last`` pass nothing is."""
        resolved, self._resolved = self._resolved, []
        parts, self._parts = self._parts, []
        if resolved:
            parts.append((_calls_of(resolved), CallFacts([call.call for call in resolved])))
        parts = self._not_held(parts)
        rows: list[Row] = []
        if parts:
            with dropped_on_failure(parts, self._recorder):
                placed = self.placement.place(DeviceOperations.concatenate([calls for calls, _ in parts]))
                rows = rows_of(parts, placed)
        if last and self.hidden_ends is not None:
            rows += self.hidden_ends.release()
        return rows

    def _not_held(self, parts: Sequence[Part]) -> list[Part]:
        if self.hidden_ends is None:
            return list(parts)
        rest: list[Part] = []
        for calls, facts in parts:
            goes_on = ~self.hidden_ends.hold(calls, facts)
            rest.append((calls.take(goes_on), facts.take(goes_on)))
        return rest


def _calls_of(resolved: Sequence[_Resolved]) -> DeviceOperations:
    table = np.array([_columns_of(*call) for call in resolved], np.int64)
    return DeviceOperations(*np.ascontiguousarray(table.T))


def _columns_of(call: DeviceCall, launch: int, waited_from: int, end: int) -> tuple[int, ...]:
    has_host_times = isinstance(call.launch.start, int) or isinstance(call.end, int)
    return (
        call.id, call.batch, call.queue.number, call.position, launch, waited_from, end,
        _taken_at(call.waited_from), 0 if has_host_times else _taken_at(call.end), call.handed_on, UNMEASURED,
    )  # fmt: skip


def _taken_at(mark: Mark) -> int:
    return mark.taken_at if is_on_device(mark) else 0
