"""The communication that CUDA graphs contain: noted while they are captured, and numbered when they are replayed.

A captured operation sends nothing: it takes its number when the graph is replayed. Until then it has one within the
graph, from 0, of a :class:`GroupState` that stands for its group's while the graph is captured.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, cast

from commtrace.capture.collectives.groups import TAG_BIT
from commtrace.capture.graphs.stamps import OF_ANOTHER, TOO_MANY, CapturedCall, GraphStamps, is_to_be_stamped
from commtrace.capture.records import Launch, dtype_name, next_id
from commtrace.trace import schema
from commtrace.trace.graphs import ContainedOperation, StampedOperation
from commtrace.trace.graphs import Counter as SequenceCounter

if TYPE_CHECKING:
    from commtrace.capture.collectives.groups import GroupState
    from commtrace.capture.device.clock import DeviceClock
    from commtrace.trace.schema import MarkDetail

MOST_OPERATIONS: Final = 65_536
"""Of one graph, in its list: further ones are counted."""

_PHASES: Final = (schema.FORWARD, schema.BACKWARD, schema.RECOMPUTE, schema.OPTIMIZER)

_NOT_OF_A_DEVICE: Final = frozenset({"gloo", "mpi"})
"""Backends whose communication is never captured: it is of the host, and sent at once."""

_Message: TypeAlias = "tuple[bool, int, int]"
"""A kind of messages of a group that are numbered together: whether they are sent, the peer, and the tag."""


class _Numbers(NamedTuple):
    """The numbers that each replay of a graph takes of a counter."""

    counter: SequenceCounter
    take: Callable[[], int]  # takes them, and returns the first


class _Noted(NamedTuple):
    launch: Launch
    op_in_seq: int
    module: str
    stamped: CapturedCall | str | None  # by what, or why not; None where nothing is stamped


class RecordedGraph:
    """The contents of a graph; ``id`` is unique among the graphs and communications of the process.

    It is open until :meth:`close`. ``is_known`` is False if something in it may not be listed.
    """

    def __init__(self, *, is_known: bool = True) -> None:
        self.id = next_id()
        self.stamps: GraphStamps | None = None
        self.is_known = is_known
        self.num_replays = 0
        self.num_operations = 0
        self.num_bytes = 0 if is_known else schema.NOT_APPLICABLE
        self._phases: set[int] = set()
        self._states: dict[GroupState, GroupState] = {}  # within the graph, by the group's
        self._noted: list[_Noted] = []
        self._in_bracket: dict[object, int] = {}  # by the state of the group whose coalescing bracket is open
        self._unlisted = 0
        self._bracket_calls: dict[object, list[CapturedCall]] = {}  # by the state of its group
        self._numbers: list[_Numbers] = []
        self._operations: list[ContainedOperation] = []
        self._stamped_operations: list[StampedOperation] = []
        self._unstamped: Counter[str] = Counter()  # by reason

    # While it is captured

    def state(self, of_group: GroupState) -> GroupState:
        """Return what numbers the communication of a group within this graph."""
        state = self._states.get(of_group)
        if state is None:
            state = type(of_group)(of_group.group, of_group.ranks_by_group_rank, of_group.nccl, graph=self)
            self._states[of_group] = state
        return state

    def add(self, launch: Launch, device: int | None = None) -> CapturedCall | None:
        """Note a communication, in the order of launches; return it if it is to be stamped, outside of a bracket."""
        op_in_seq = 0
        if launch.state.bracket is not None:
            op_in_seq = self._in_bracket.get(launch.state, 0)
            self._in_bracket[launch.state] = op_in_seq + 1
        if len(self._noted) < MOST_OPERATIONS:
            stamped = None if self.stamps is None else self._stamped(self.stamps, launch, device)
            self._noted.append(_Noted(launch, op_in_seq, _module(), stamped))
            if isinstance(stamped, CapturedCall) and launch.state.bracket is None:
                return stamped
        else:
            self._unlisted += 1
        return None

    def _stamped(self, stamps: GraphStamps, launch: Launch, device: int | None) -> CapturedCall | str:
        """Return what stamps a communication that is about to be launched, or why nothing does."""
        state = cast("GroupState", launch.state)
        in_bracket = self._bracket_calls.get(state)
        first = in_bracket[0] if in_bracket else None
        number = state.collective_seq.launched if launch.seq < 0 else launch.seq & ((1 << TAG_BIT) - 1)
        if first is None and not is_to_be_stamped(launch.num_bytes, number):
            return TOO_MANY
        call = stamps.call(launch, device)
        if call is None:
            return stamps.refusal
        if first is None:
            stamps.about_to_launch(call)
        else:
            call.leader = first
        if state.bracket is not None:
            self._bracket_calls.setdefault(state, []).append(call)
        return call

    def close_bracket(self, state: object, seq: int) -> tuple[CapturedCall, ...]:
        """Give the collectives of a coalescing bracket of a group, which is closed now, their common number.

        Return those of its members that are to be stamped.
        """
        self._in_bracket.pop(state, None)
        self.number(state, seq, is_p2p=False)
        return tuple(self._bracket_calls.pop(state, ()))

    def number(self, state: object, seq: int, *, is_p2p: bool) -> None:
        """Give the communications of a group that were noted without a number this one."""
        for at in range(len(self._noted) - 1, -1, -1):
            launch = self._noted[at].launch
            if launch.state is state and launch.operation.is_p2p == is_p2p:
                if launch.seq >= 0:
                    return
                self._noted[at] = self._noted[at]._replace(launch=launch._replace(seq=seq))

    def refused(self, state: object, seq: int) -> None:
        """Forget the latest communication, which its backend has refused."""
        if self._noted and self._noted[-1].launch.state is state and self._noted[-1].launch.seq == seq:
            self._noted.pop()

    def passed(self, kind: int) -> None:
        """Note that a phase of training, a kind of span, is part of the graph."""
        if kind in _PHASES:
            self._phases.add(kind)

    def include(self, graph: RecordedGraph) -> None:
        """Note that another graph is replayed into this one."""
        if graph.stamps is not None:
            graph.stamps.abandon()  # its counter goes on with each replay of this one
        stamped = None if self.stamps is None else OF_ANOTHER
        self.is_known = self.is_known and graph.is_known
        self._phases |= graph._phases
        moved: dict[int, tuple[GroupState, dict[_Message | None, int]]] = {}  # by the id of the state within it
        for of_group, within in graph._states.items():
            state = self.state(of_group)
            moved[id(within)] = state, {message: _take(state, message, count) for message, count in _counts(within)}
        room = MOST_OPERATIONS - len(self._noted)
        self._unlisted += graph._unlisted + max(0, len(graph._noted) - room)
        for noted in graph._noted[:room]:
            launch = noted.launch
            state, firsts = moved[id(launch.state)]
            if launch.seq >= 0:
                launch = launch._replace(seq=firsts[_message_of(launch)] + _offset(launch))
            self._noted.append(noted._replace(launch=launch._replace(state=state), stamped=stamped))

    def close(self) -> None:
        """End the capture: what the graph contains stays as it is."""
        positions: dict[tuple[int, _Message | None], int] = {}  # of counters, by the id of the state within the graph
        for of_group, state in self._states.items():
            for message, count in _counts(state):
                if count:
                    positions[id(state), message] = len(self._numbers)
                    counter = SequenceCounter(of_group.group.id, *(message or (None, schema.NOT_APPLICABLE, 0)))
                    self._numbers.append(_Numbers(counter, partial(_take, of_group, message, count)))
        if self.stamps is not None:
            self.stamps.close()
        for noted in self._noted:
            operation = _operation(noted, positions)
            if operation is not None:
                self._note_stamps(noted.stamped, len(self._operations))
                self._operations.append(operation)
        self._unlisted += len(self._noted) - len(self._operations)
        self.num_operations = len(self._operations) + self._unlisted
        sizes = [operation.num_bytes for operation in self._operations]
        self.num_bytes = sum(max(size, 0) for size in sizes) if self.is_known else schema.NOT_APPLICABLE

    def _note_stamps(self, stamped: CapturedCall | str | None, index: int) -> None:
        """Note the stamps of an operation of the list, or why it has none."""
        stamps = stamped.operation(index) if isinstance(stamped, CapturedCall) else None
        if stamps is not None:
            self._stamped_operations.append(stamps)
        elif stamped is not None:
            reason = stamped if isinstance(stamped, str) else stamped.leader.reason
            self._unstamped[reason] += 1

    # Once it is captured

    @property
    def is_stamped(self) -> bool:
        """Return whether replays have stamps that are read."""
        return bool(self._stamped_operations) and self.stamps is not None and self.stamps.is_read

    @property
    def phases(self) -> str:
        """Return the phases that it contains, with plus signs between; ``graph`` if none is known."""
        return "+".join(schema.KINDS[kind] for kind in _PHASES if kind in self._phases) or "graph"

    def replayed(self) -> tuple[int, list[int]]:
        """Return the number of a replay, and the first number of each counter, which are taken now."""
        number = self.num_replays
        self.num_replays += 1
        return number, [numbers.take() for numbers in self._numbers]

    def take_ids(self) -> int:
        """Return the first number of the communications of a replay, if they have times of their own."""
        if not self.is_stamped or self.stamps is None:
            return schema.NOT_APPLICABLE
        return self.stamps.take_ids(len(self._operations))

    def to_json(self) -> MarkDetail:
        """Return the detail of its mark: ``CapturedGraph`` of commtrace/trace/graphs.py."""
        return {
            "id": self.id,
            "phases": self.phases,
            "is_known": self.is_known,
            "unlisted": self._unlisted,
            "counters": [list(numbers.counter) for numbers in self._numbers],
            "operations": [list(operation) for operation in self._operations],
            **self._stamps_to_json(),
        }

    def _stamps_to_json(self) -> dict[str, object]:
        if self.stamps is None:
            return {}
        return {"stamps": [list(stamped) for stamped in self._stamped_operations], "unstamped": dict(self._unstamped)}


def _message_of(launch: Launch) -> _Message | None:
    if not launch.operation.is_p2p:
        return None
    return launch.operation.is_send, launch.peer, max(launch.seq, 0) >> TAG_BIT


def _offset(launch: Launch) -> int:
    """Return the number of a launch within its graph, from 0: the tag of a message left out."""
    message = _message_of(launch)
    return launch.seq if message is None else launch.seq - (message[2] << TAG_BIT)


def _operation(noted: _Noted, positions: dict[tuple[int, _Message | None], int]) -> ContainedOperation | None:
    launch = noted.launch
    key = _message_of(launch)
    counter = positions.get((id(launch.state), key))
    if counter is None or launch.seq < 0:  # a message from anybody, or in a bracket that was never closed
        return None
    return ContainedOperation(
        launch.operation.name,
        counter,
        _offset(launch),
        noted.op_in_seq,
        launch.num_bytes,
        launch.self_bytes,
        dtype_name(launch.dtype),
        launch.peer,
        bool(launch.is_async),
        *launch.coordinates[1:],
        noted.module,
    )


def _counts(state: GroupState) -> Iterator[tuple[_Message | None, int]]:
    """Yield how many numbers were taken: of collectives, with None, and of each kind of messages."""
    yield None, state.collective_seq.launched
    for is_send, peer, tag, count in state.collective_seq.messages():
        yield (is_send, peer, tag), count


def _take(state: GroupState, message: _Message | None, count: int) -> int:
    """Take so many numbers, of collectives or of a kind of messages; return the first of them."""
    counters = state.collective_seq
    return counters.take(count) if message is None else counters.take_messages(*message, count)


def _module() -> str:
    """Return the class of the innermost module whose forward runs here; empty where none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if module is not None:
                return type(module).__name__
        frame = frame.f_back
    return ""


class _Capture(NamedTuple):
    """A capture that is going on."""

    graph: weakref.ref[object]
    contents: RecordedGraph
    thread: int


class OpenCaptures:
    """The graphs that are captured now, by torch's ``CUDAGraph``. Mostly there are none: ``open`` is empty then."""

    def __init__(self, clock: DeviceClock, tell: Callable[[bool], None] = lambda _: None) -> None:
        self.open: tuple[_Capture, ...] = ()
        self.are_followed = False  # captures and replays are recorded
        self._clock = clock
        self._tell = tell  # told whether any is open
        self._lock = threading.Lock()

    def begin(self, graph: object) -> RecordedGraph:
        """Begin, and return, the contents of a graph, which this thread captures."""
        capture = _Capture(weakref.ref(graph), RecordedGraph(), threading.get_ident())
        with self._lock:
            self.open = (*self._but(graph), capture)
            self._tell(True)
        return capture.contents

    def end(self, graph: object) -> RecordedGraph | None:
        """End the capture of a graph; return its contents, which are still open, or None if its begin was not seen."""
        with self._lock:
            ended = [capture.contents for capture in self.open if capture.graph() is graph]
            self.open = self._but(graph)
            self._tell(bool(self.open))
        return ended[-1] if ended else None

    def _but(self, graph: object) -> tuple[_Capture, ...]:
        """Return the captures of other graphs that are still there."""
        return tuple(capture for capture in self.open if capture.graph() not in (None, graph))

    def forget(self) -> None:
        """End all, at the end of the recording."""
        with self._lock:
            for capture in self.open:
                if capture.contents.stamps is not None:
                    capture.contents.stamps.abandon()
            self.open = ()
            self._tell(False)

    def current(self) -> RecordedGraph | None:
        """Return the graph into which the current stream is captured; None where it is not, or is not known."""
        captures = self.open
        if not captures or not self._clock.is_capturing():
            return None
        if len(captures) == 1:
            return captures[0].contents
        # A backward is captured on autograd's threads: with several captures, which it belongs to is not known.
        thread = threading.get_ident()
        of_thread = [capture.contents for capture in captures if capture.thread == thread]
        if len(of_thread) == 1:
            return of_thread[0]
        for capture in captures:
            capture.contents.is_known = False
        return None

    def state(self, of_group: GroupState) -> GroupState:
        """Return what numbers the communication of a group here: the graph that is captured, or the group itself."""
        graph = None if of_group.group.backend in _NOT_OF_A_DEVICE else self.current()
        return of_group if graph is None else graph.state(of_group)
