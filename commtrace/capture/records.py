"""What the training threads put into the recorder's buffer, and how it becomes rows.

A :class:`Call` is created when a communication is launched and is completed in place by whoever learns its end: the
wait, the completion callback, or the end of a coalescing bracket. Slots instead of a dictionary, no base class:
creating one is most of what a captured communication costs.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from commtrace.capture.clock import DeviceClock, Mark
from commtrace.trace import schema
from commtrace.trace.writer import Row

_NO = schema.NOT_APPLICABLE


class Coordinates(NamedTuple):
    """Where in the schedule something happens; −1 where it does not apply."""

    step: int = _NO
    microbatch: int = _NO
    chunk: int = _NO
    stage: int = _NO


class Call:
    """One communication, from its launch to its end."""

    __slots__ = (
        "awaits_callback", "clock", "coordinates", "detail", "dtype", "end", "group", "id", "is_async", "kind", "name",
        "num_bytes", "op_in_seq", "peer", "queue", "self_bytes", "seq", "start", "waited_until",
    )  # fmt: skip

    def __init__(
        self, kind: int, name: str, group: int, seq: int, num_bytes: int, self_bytes: int, dtype: Any, peer: int,
        is_async: bool, coordinates: Coordinates, call_id: int, clock: DeviceClock, start: Mark,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.name = name
        self.group = group
        self.seq = seq
        self.op_in_seq = 0
        self.num_bytes = num_bytes
        self.self_bytes = self_bytes
        self.dtype = dtype
        self.peer = peer
        self.is_async = is_async
        self.coordinates = coordinates
        self.id = call_id
        self.clock = clock
        self.start = start
        self.end: Mark | None = None
        self.waited_until: Mark | None = None
        self.awaits_callback = False
        self.queue: Queue | None = None
        self.detail: dict[str, Any] | None = None

    def rows(self) -> list[Row] | None:
        """The communication's row, once its start and its end are known."""
        resolve = self.clock.resolve
        start = resolve(self.start)
        end = start if self.end is None else resolve(self.end)
        waited_until = None if self.waited_until is None else resolve(self.waited_until)
        if start is None or end is None:
            return None
        if self.queue is not None:
            # The communication stream runs one operation of a group after another: what was launched while the
            # previous one ran began when that one ended.
            start = min(max(start, self.queue.free_at), end)
            self.queue.free_at = max(self.queue.free_at, end)
        if waited_until is not None:
            # A completion callback runs when it gets the GIL; a wait that returned earlier saw the end earlier.
            end = max(start, min(end, waited_until))
        detail = self.detail
        if self.end is None:
            detail = {**(detail or {}), "unfinished": True}
        return [
            (
                self.kind, self.name, schema.COMMUNICATION, start, max(start, end), *self.coordinates, self.group,
                self.seq, self.op_in_seq, self.num_bytes, self.self_bytes, dtype_name(self.dtype), self.peer,
                self.is_async, self.id, _NO, self.clock.timing,
                None if detail is None else json.dumps(detail, separators=(",", ":")),
            )
        ]  # fmt: skip


class Queue:
    """The stream on which a group's operations run one after another."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0


class Stall:
    """The time that the training thread, or the compute stream, stood still for a communication."""

    __slots__ = ("calls", "coordinates", "end", "start")
    kind = schema.STALL

    def __init__(self, calls: tuple[Call, ...], coordinates: Coordinates, start: Mark, end: Mark) -> None:
        self.calls = calls
        self.coordinates = coordinates
        self.start = start
        self.end = end

    def rows(self) -> list[Row] | None:
        """The stall's row; it names the first member of a coalesced bracket."""
        call = self.calls[0]
        start, end = call.clock.resolve(self.start), call.clock.resolve(self.end)
        if start is None or end is None:
            return None
        # The step and the phase in which the lane stood still, not those in which the communication was launched.
        return [
            (
                schema.STALL, call.name, schema.COMPUTE, start, max(start, end), *self.coordinates, call.group,
                call.seq, call.op_in_seq, _NO, _NO, None, call.peer, call.is_async, _NO, call.id, call.clock.timing, None,
            )
        ]  # fmt: skip


class WaitedCall:
    """A communication whose end is the return of the wait for it: its row and the stall's in one record."""

    __slots__ = ("call", "kind", "stall")

    def __init__(self, call: Call, stall: Stall) -> None:
        self.kind = call.kind
        self.call = call
        self.stall = stall

    def rows(self) -> list[Row] | None:
        """Two rows."""
        stall = self.stall.rows()
        if stall is None:
            return None
        communication = self.call.rows()
        return None if communication is None else communication + stall


class Span:
    """A phase of the compute lane or the host: a forward, an optimizer step, a checkpoint."""

    __slots__ = ("clock", "coordinates", "end", "kind", "lane", "name", "start")

    def __init__(
        self, kind: int, name: str, lane: int, coordinates: Coordinates, clock: DeviceClock, start: Mark
    ) -> None:
        self.kind = kind
        self.name = name
        self.lane = lane
        self.coordinates = coordinates
        self.clock = clock
        self.start = start
        self.end: Mark = None

    def rows(self) -> list[Row] | None:
        """The span's row."""
        start, end = self.clock.resolve(self.start), self.clock.resolve(self.end)
        if start is None or end is None:
            return None
        return [
            (
                self.kind, self.name, self.lane, start, max(start, end), *self.coordinates, _NO, _NO, 0, _NO, _NO, None,
                _NO, False, _NO, _NO, self.clock.timing, None,
            )
        ]  # fmt: skip


def dtype_name(dtype: Any) -> str | None:
    """``torch.bfloat16`` → ``bfloat16``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
