"""Entries of the recorder's buffer, plain tuples for speed, and the functions that turn them into rows.

The docstrings of these functions show their entries, with ``…`` for ``make_rows`` and the kind if it is dropped.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from msgspec import structs

from commtrace import _native
from commtrace.capture.collectives.operations import NcclBackend, Operation
from commtrace.capture.device.clock import DeviceClock, DeviceTiming, Mark, is_on_device
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.quiet import QUIET
from commtrace.trace.schema import Coordinates, Row, mark_row, row_of

if TYPE_CHECKING:
    import torch

_NO = schema.NOT_APPLICABLE

Entry: TypeAlias = tuple[Any, ...]
"""``(make_rows, kind, …)``: see the functions below."""

MakeRows: TypeAlias = Callable[[Entry], "list[Row] | None"]
"""Makes the rows of an entry; None while the device has not reached one of its marks."""

_NO_COMMUNICATION: Final = Row(0, "", 0, 0, 0)[Row._fields.index("group") : Row._fields.index("timing")]
"""The columns of a communication in the row of something else."""

_EXACT: Final = (True, True)
"""Whether start and end are exact, of all but communications."""

_NO_LEADS: Final = (schema.UNKNOWN_LEAD, schema.UNKNOWN_LEAD)

SHORTEST_HOST_WAIT_NS: Final = 50_000
"""A wait of the host that returned so soon found the communication over. The native part has the same limit."""

NUMBER, WAITED, ENDED = range(3)
"""Items of the list ``completion`` of a communication that calls back: its id, the end of the wait for it, and the time
of the callback; 0 before that."""

COLLECTIVE_AND_STALL: Final = (schema.COLLECTIVE, schema.STALL)
P2P_AND_STALL: Final = (schema.P2P, schema.STALL)

_core, _ = _native.load()

next_id: Final[Callable[[], int]] = itertools.count().__next__ if _core is None else _core.next_id
"""Numbers communications: unique in the process, also where the native part records some. Atomic under the GIL."""


coordinates_of: Final[Callable[[tuple[int, int, int, int]], Coordinates]] = functools.partial(
    tuple.__new__, Coordinates
)
"""Makes a place of all its fields, without a frame of Python."""


class GraphContents(Protocol):
    """The part of a :class:`commtrace.capture.graphs.contents.RecordedGraph` that communication needs."""

    def add(self, launch: Launch, device: int | None = None) -> DeviceCall | None: ...

    def close_bracket(self, state: object, seq: int) -> tuple[DeviceCall, ...]: ...

    def number(self, state: object, seq: int, *, is_p2p: bool) -> None: ...

    def refused(self, state: object, seq: int) -> None: ...


class LaunchGroup(Protocol):
    """The part of a :class:`commtrace.capture.collectives.groups.GroupState` that a launch needs."""

    group: Group
    nccl: NcclBackend
    ranks_by_group_rank: tuple[int, ...]
    bracket: list[DeviceCall] | None
    graph: GraphContents | None

    def next_p2p(self, is_send: bool, peer: int, tag: int = 0) -> int: ...

    def queue(self, peer: int, device: int) -> Queue: ...


class Launch(NamedTuple):
    """The facts about a communication that are known when it starts."""

    operation: Operation
    state: LaunchGroup
    seq: int  # in the group or, for point-to-point, between the two ranks
    num_bytes: int
    self_bytes: int
    dtype: torch.dtype | None
    peer: int  # global rank of the partner or the root; −1 without one
    is_async: bool
    coordinates: Coordinates
    members: tuple[int, ...] | None  # bytes of each operation that it coalesces; None for one
    start: Mark | None  # None while a coalescing bracket is open


_Members: TypeAlias = "tuple[int, ...] | None"
_Fields: TypeAlias = (
    "tuple[Operation, LaunchGroup, int, int, int, torch.dtype | None, int, bool, Coordinates, _Members, Mark]"
)

launch_of: Final[Callable[[_Fields], Launch]] = functools.partial(tuple.__new__, Launch)
"""Makes a launch of all its fields: for the hot path, in half of the time of ``Launch(…)``."""


def kind_of(launch: Launch) -> int:
    return schema.P2P if launch.operation.is_p2p else schema.COLLECTIVE


def waited_rows(entry: Entry) -> list[Row]:
    """Make rows of ``(…, launch, coordinates at the wait, wait start, wait end[, id])``: ended with its wait."""
    launch, coordinates, start, end = entry[2:6]
    if not launch.is_async:
        start = launch.start  # the caller of a synchronous operation does nothing between its launch and its wait
    number = entry[6] if len(entry) > 6 else next_id()
    timing = schema.HOST_TIMING
    # One that was over when the wait for it began ended before: torch's pipelines wait for sends at the end of a step.
    end_exact = not launch.is_async or end - start >= SHORTEST_HOST_WAIT_NS
    return [
        communication_row(launch, launch.start, end, number, timing, False, exact=(True, end_exact)),
        _stall_row(launch, coordinates, start, end, number, timing),
    ]


def completed_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, launch, id, end, completion or ())``: host-timed, with a completion callback."""
    _, _, launch, number, end, completion = entry
    if completion and completion[WAITED]:
        # The callback runs when it gets the GIL; a wait that returned earlier saw the end earlier.
        end = min(end, completion[WAITED])
    return [communication_row(launch, launch.start, end, number, schema.HOST_TIMING, False)]


def ended_by_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, launch, id, end)``: host-timed, and over when it was asked."""
    _, _, launch, number, end = entry
    return [communication_row(launch, launch.start, end, number, schema.HOST_TIMING, False)._replace(end_exact=False)]


def stall_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, launch, id, coordinates at the wait, start, end)``: the host's wait."""
    _, _, launch, number, coordinates, start, end = entry
    return [_stall_row(launch, coordinates, start, end, number, schema.HOST_TIMING)]


def forgotten_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, launch, id)``: a communication whose end was not seen."""
    _, _, launch, number = entry
    start = launch.start if isinstance(launch.start, int) else 0
    return [communication_row(launch, start, start, number, schema.HOST_TIMING, True)]


class DeviceCall:
    """A communication of an accelerator's tensors: its marks are resolved after its launch."""

    __slots__ = (
        "batch", "clock", "device", "end", "handed_on", "has_future", "id", "is_joined", "launch", "launched_at",
        "op_in_seq", "position", "queue", "returned_at", "waited_from",
    )  # fmt: skip

    def __init__(self, launch: Launch, clock: DeviceTiming, device: int | None, queue: Queue, position: int) -> None:
        self.launch = launch
        self.clock = clock
        self.device = device  # index; None for the current device
        self.queue = queue
        self.position = position  # of its launch on the communicator
        self.batch = self.id = next_id()  # members of a coalescing bracket get the batch of the first
        self.op_in_seq = 0  # index in the bracket
        self.waited_from: Mark | None = None  # before the wait for it; None if it ran on the current stream
        self.end: Mark | None = None  # after it, or after the wait for it; None without a wait
        # The compute stream has waited for the other stream on which it ran; its future was taken, to be waited for.
        self.is_joined = self.has_future = False
        self.handed_on = 0  # host time, ns, after the backend's call
        # Host time, ns, before and after the backend's call; 0 unless its duration is asked for.
        self.launched_at = self.returned_at = 0


_next_communicator: Final[Callable[[], int]] = itertools.count().__next__


class Queue:
    """The stream of a communicator, or the streams of the job, on which its operations run.

    All are launched in one order: see :mod:`commtrace.capture.device.placement`, which knows queues by their number.
    """

    __slots__ = ("_next_position", "_on_job_streams", "_pauses", "_positions", "number", "unreached")

    def __init__(self, number: int | None = None, next_position: Callable[[], int] | None = None) -> None:
        self._next_position = next_position  # of the native part, which launches on the communicator, too
        self.number = 2 * _next_communicator() if number is None else number
        self.unreached: DeviceCall | None = None
        self._on_job_streams: Queue | None = None
        self._positions = self._pauses = 0

    def next_position(self, pauses: int = 0) -> int:
        """Return the position of a launch on the communicator, after so many ``pauses`` of the recording."""
        if self._next_position is not None:
            return self._next_position()
        if pauses != self._pauses:
            self._pauses = pauses
            self._positions += 1  # what was launched meanwhile
        self._positions += 1
        return self._positions - 1

    @property
    def on_job_streams(self) -> Queue:
        """Return the queue of the same communicator's operations on the streams of the job."""
        if self._on_job_streams is None:
            self._on_job_streams = Queue(self.number + 1)
        return self._on_job_streams


def device_stall_rows(entry: Entry) -> list[Row] | None:
    """Make the row of ``(…, call, coordinates at the wait, start mark, end mark)``: a device-timed stall."""
    call, coordinates, start_mark, end_mark = entry[2:]
    start, end = call.clock.resolve(start_mark), call.clock.resolve(end_mark)
    if start is None or end is None:
        return None
    timing = _timing(call.clock, start_mark, end_mark)
    leads = _leads(start_mark, end_mark)
    return [_stall_row(call.launch, coordinates, start, end, call.id, timing, call.op_in_seq, leads)]


def marked_stall_rows(entry: Entry) -> list[Row] | None:
    """Make the row of ``(…, launch, id, coordinates at the wait, clock, start mark, end mark)``: a device's stall."""
    _, _, launch, number, coordinates, clock, start_mark, end_mark = entry
    start, end = clock.resolve(start_mark), clock.resolve(end_mark)
    if start is None or end is None:
        return None
    timing, leads = _timing(clock, start_mark, end_mark), _leads(start_mark, end_mark)
    return [_stall_row(launch, coordinates, start, end, number, timing, leads=leads)]


def _timing(clock: DeviceClock, start: Mark, end: Mark) -> int:
    return schema.HOST_TIMING if isinstance(start, int) or isinstance(end, int) else clock.timing


def _leads(start: Mark, end: Mark) -> tuple[int, int]:
    return lead_of(start), lead_of(end)


def lead_of(mark: Mark) -> int:
    """Return how far the host was ahead of the device when it took a mark that is resolved, µs (``start_lead_us``)."""
    lead_us: int = mark.lead_us if is_on_device(mark) else schema.UNKNOWN_LEAD
    return lead_us


class Span:
    """A phase of the compute lane or the host: a forward, an optimizer step, a checkpoint."""

    __slots__ = ("clock", "coordinates", "end", "kind", "lane", "name", "outer", "start")

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
        self.outer: Span | None = None


def span_rows(entry: Entry) -> list[Row] | None:
    """Make the row of ``(…, span)``."""
    span: Span = entry[2]
    start, end = span.clock.resolve(span.start), span.clock.resolve(span.end)
    if start is None or end is None:
        return None
    timing = _timing(span.clock, span.start, span.end)
    return [
        row_of(
            (
                span.kind,
                span.name,
                span.lane,
                start,
                max(start, end),
                *span.coordinates,
                *_NO_COMMUNICATION,
                timing,
                *_EXACT,
                None,
                *_leads(span.start, span.end),
            )
        )
    ]


def count_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, step, instant, counts)``: counts of the script for a step."""
    _, _, step, at_ns, counts = entry
    return [mark_row("count", counts, step, at_ns)]


def quiet_rows(entry: Entry) -> list[Row]:
    """Make the mark of ``(…, change, instant)``: from here on nothing is recorded, or everything again."""
    _, _, change, at_ns = entry
    return [mark_row(QUIET, structs.asdict(change), change.step, at_ns)]


def peak_memory_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, step, instant, bytes allocated, bytes reserved)``: the highest peaks until a step ended."""
    _, _, step, at_ns, allocated, reserved = entry
    return [mark_row("peak_memory", {"step": step, "allocated": allocated, "reserved": reserved}, step, at_ns)]


def graph_rows(entry: Entry) -> list[Row]:
    """Make the mark of ``(…, graph, instant)``: what a CUDA graph contains, once."""
    _, _, graph, at_ns = entry
    return [mark_row("graph", graph.to_json(), at_ns=at_ns)]


def replay_rows(entry: Entry) -> list[Row] | None:
    """Make the row of ``(…, graph, replay, name, coordinates, clock, start mark, end mark, firsts, first id)``.

    ``firsts`` are the numbers of the first communication of each counter of the graph, ``first id`` that of its
    communications with times of their own.
    """
    _, kind, graph, number, name, coordinates, clock, start_mark, end_mark, firsts, first_id = entry
    start, end = clock.resolve(start_mark), clock.resolve(end_mark)
    if start is None or end is None or (graph.stamps is not None and graph.stamps.may_arrive(number)):
        return None
    # Of the host, before the launch: that may block.
    launched_ns = start_mark if isinstance(start_mark, int) else start_mark.taken_at
    facts = {"launched_ns": launched_ns, "first": firsts}
    stamps = None if graph.stamps is None else graph.stamps.take(number, start, max(start, end))
    if stamps is not None:
        # From the replay's start on: small numbers.
        offsets = [None if time == _NO else time - start for time in stamps.times.tolist()]
        facts |= {"first_id": first_id, "stamps": offsets, "error_ns": stamps.error_ns}
    detail = json.dumps(facts, separators=(",", ":"))
    return [
        row_of((
            kind, name, schema.COMPUTE, start, max(start, end), *coordinates, _NO, number, graph.num_operations,
            graph.num_bytes, _NO, None, _NO, False, graph.id, _NO, _timing(clock, start_mark, end_mark), *_EXACT,
            detail, *_leads(start_mark, end_mark),
        ))
    ]  # fmt: skip


def failed_rows(entry: Entry) -> list[Row]:
    """Make the row of ``(…, launch, type of the exception, instant)``: a communication that raised."""
    _, _, launch, exception, at_ns = entry
    failure = {
        "operation": launch.operation.name, "group": launch.state.group.id, "seq": launch.seq, "peer": launch.peer,
        "exception": exception, "at_ns": at_ns,
    }  # fmt: skip
    return [mark_row("failed", failure, at_ns=at_ns)]


def module_rows(clock: DeviceClock) -> MakeRows:
    """Return the maker of a module's rows, of ``(…, name, coordinates, start mark, end mark)``."""
    resolve = clock.resolve

    def rows(entry: Entry) -> list[Row] | None:
        _, kind, name, coordinates, start_mark, end_mark = entry
        start, end = resolve(start_mark), resolve(end_mark)
        if start is None or end is None:
            return None
        timing = _timing(clock, start_mark, end_mark)
        return [
            row_of((
                kind, name, schema.COMPUTE, start, max(start, end), *coordinates, *_NO_COMMUNICATION, timing, *_EXACT,
                None, *_leads(start_mark, end_mark),
            ))
        ]  # fmt: skip

    return rows


def communication_row(
    launch: Launch,
    start: int,
    end: int,
    number: int,
    timing: int,
    unfinished: bool,
    op_in_seq: int = 0,
    exact: tuple[bool, bool] = _EXACT,
) -> Row:
    """Make the row of a communication; ``exact``: whether start and end are."""
    operation, state, seq, num_bytes, self_bytes, dtype, peer, is_async, coordinates, members, _ = launch
    extras: dict[str, object] = {}
    if members:
        extras["members"] = members
    if unfinished:
        extras["unfinished"] = True
    kind = schema.P2P if operation.is_p2p else schema.COLLECTIVE
    detail = json.dumps(extras, separators=(",", ":")) if extras else None
    return row_of((
        kind, operation.name, schema.COMMUNICATION, start, end, *coordinates, state.group.id, seq, op_in_seq,
        num_bytes, self_bytes, dtype_name(dtype), peer, bool(is_async), number, _NO, timing, *exact, detail,
        *_NO_LEADS,
    ))  # fmt: skip


def _stall_row(
    launch: Launch,
    coordinates: Coordinates,
    start: int,
    end: int,
    number: int,
    timing: int,
    op_in_seq: int = 0,
    leads: tuple[int, int] = _NO_LEADS,
) -> Row:
    operation, state, seq, _, _, _, peer, is_async, _, _, _ = launch
    return row_of((
        schema.STALL, operation.name, schema.COMPUTE, start, max(start, end), *coordinates, state.group.id, seq,
        op_in_seq, _NO, _NO, None, peer, bool(is_async), _NO, number, timing, *_EXACT, None, *leads,
    ))  # fmt: skip


@functools.cache
def dtype_name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
