"""The communication that CUDA graphs contain: noted while they are captured, and numbered when they are replayed.

A captured operation sends nothing: it takes its number when the graph is replayed. Until then it has one within the
graph, from 0, of a :class:`GroupState` that stands for its group's while the graph is captured.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from commtrace.capture.records import Launch, dtype_name, next_id
from commtrace.trace import schema

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


class CapturedOperation(NamedTuple):
    """One communication of a graph: an item of ``operations`` in the mark ``graph`` (docs/recorded-spans.md)."""

    name: str
    counter: int  # position in the counters of the graph
    offset: int  # of its number from the counter's first
    op_in_seq: int
    num_bytes: int
    self_bytes: int
    dtype: str | None
    peer: int
    is_async: bool
    microbatch: int
    chunk: int
    stage: int
    module: str


class _Counter(NamedTuple):
    """Numbers of a group that a graph takes: of collectives, or of messages of one kind."""

    to_json: list[object]  # [group, is_send, peer, tag]; [group, None, -1, 0] of collectives
    take: Callable[[], int]  # takes them, and returns the first


class _Noted(NamedTuple):
    launch: Launch
    op_in_seq: int
    module: str


class CapturedGraph:
    """The contents of a graph; ``id`` is unique among the graphs and communications of the process.

    It is open until :meth:`close`. ``is_known`` is False if something in it may not be listed.
    """

    def __init__(self, *, is_known: bool = True) -> None:
        self.id = next_id()
        self.is_known = is_known
        self.num_replays = 0
        self.num_operations = 0
        self.num_bytes = 0 if is_known else schema.NOT_APPLICABLE
        self._phases: set[int] = set()
        self._states: dict[GroupState, GroupState] = {}  # of the groups, by their own
        self._noted: list[_Noted] = []
        self._in_bracket: dict[object, int] = {}  # by the state of the group whose coalescing bracket is open
        self._unlisted = 0
        self._counters: tuple[_Counter, ...] = ()
        self._operations: list[CapturedOperation] = []

    # While it is captured

    def state(self, own: GroupState) -> GroupState:
        """Return what numbers the communication of a group within this graph."""
        state = self._states.get(own)
        if state is None:
            state = self._states[own] = type(own)(own.group, own.ranks_by_group_rank, own.nccl, graph=self)
        return state

    def add(self, launch: Launch) -> None:
        """Note a communication, in the order of launches."""
        op_in_seq = 0
        if launch.state.bracket is not None:
            op_in_seq = self._in_bracket.get(launch.state, 0)
            self._in_bracket[launch.state] = op_in_seq + 1
        if len(self._noted) < MOST_OPERATIONS:
            self._noted.append(_Noted(launch, op_in_seq, _module()))
        else:
            self._unlisted += 1

    def close_bracket(self, state: object, seq: int) -> None:
        """Give the collectives of a coalescing bracket of a group, which is closed now, their common number."""
        self._in_bracket.pop(state, None)
        self.number(state, seq, is_p2p=False)

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

    def include(self, graph: CapturedGraph) -> None:
        """Note that another graph is replayed into this one."""
        self.is_known = self.is_known and graph.is_known
        self._phases |= graph._phases
        moved: dict[int, tuple[GroupState, dict[_Message | None, int]]] = {}  # by the id of the state within it
        for own, within in graph._states.items():
            state = self.state(own)
            firsts: dict[_Message | None, int] = {None: state.collective_seq.take(within.collective_seq.launched)}
            for is_send, peer, tag, count in within.collective_seq.messages():
                firsts[is_send, peer, tag] = state.collective_seq.take_messages(is_send, peer, tag, count)
            moved[id(within)] = state, firsts
        room = MOST_OPERATIONS - len(self._noted)
        self._unlisted += graph._unlisted + max(0, len(graph._noted) - room)
        for noted in graph._noted[:room]:
            launch = noted.launch
            state, firsts = moved[id(launch.state)]
            if launch.seq >= 0:
                launch = launch._replace(seq=firsts[_message_of(launch)] + _offset(launch))
            self._noted.append(noted._replace(launch=launch._replace(state=state)))

    def close(self) -> None:
        """End the capture: what the graph contains stays as it is."""
        positions: dict[tuple[int, _Message | None], int] = {}
        counters: list[_Counter] = []
        for own, state in self._states.items():
            count = state.collective_seq.launched
            if count:
                positions[id(state), None] = len(counters)
                counters.append(_Counter([own.group.id, None, -1, 0], _taking(own, None, count)))
            for is_send, peer, tag, messages in state.collective_seq.messages():
                if messages:
                    positions[id(state), (is_send, peer, tag)] = len(counters)
                    counters.append(
                        _Counter([own.group.id, is_send, peer, tag], _taking(own, (is_send, peer, tag), messages))
                    )
        self._counters = tuple(counters)
        self._operations = [
            operation for noted in self._noted if (operation := _operation(noted, positions)) is not None
        ]
        self._unlisted += len(self._noted) - len(self._operations)
        self.num_operations = len(self._operations) + self._unlisted
        sizes = [operation.num_bytes for operation in self._operations]
        self.num_bytes = sum(max(size, 0) for size in sizes) if self.is_known else schema.NOT_APPLICABLE

    # Once it is captured

    @property
    def phases(self) -> str:
        """Return the phases that it contains, with plus signs between; ``graph`` if none is known."""
        return "+".join(schema.KINDS[kind] for kind in _PHASES if kind in self._phases) or "graph"

    def replayed(self) -> tuple[int, list[int]]:
        """Return the number of a replay, and the first number of each counter, which are taken now."""
        number = self.num_replays
        self.num_replays += 1
        return number, [counter.take() for counter in self._counters]

    def to_json(self) -> MarkDetail:
        """Return the detail of its mark: ``Graph`` of commtrace/trace/marks.py."""
        return {
            "id": self.id,
            "phases": self.phases,
            "is_known": self.is_known,
            "unlisted": self._unlisted,
            "counters": [counter.to_json for counter in self._counters],
            "operations": [list(operation) for operation in self._operations],
        }


_TAG_BITS: Final = 32
"""The tag of a message is in its number, above so many bits: see GroupState.next_p2p."""


def _message_of(launch: Launch) -> _Message | None:
    if not launch.operation.is_p2p:
        return None
    return launch.operation.is_send, launch.peer, max(launch.seq, 0) >> _TAG_BITS


def _offset(launch: Launch) -> int:
    """Return the number of a launch within its graph, from 0: the tag of a message left out."""
    message = _message_of(launch)
    return launch.seq if message is None else launch.seq - (message[2] << _TAG_BITS)


def _operation(noted: _Noted, positions: dict[tuple[int, _Message | None], int]) -> CapturedOperation | None:
    launch = noted.launch
    key = _message_of(launch)
    counter = positions.get((id(launch.state), key))
    if counter is None or launch.seq < 0:  # a message from anybody, or in a bracket that was never closed
        return None
    return CapturedOperation(
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


def _taking(own: GroupState, message: _Message | None, count: int) -> Callable[[], int]:
    counters = own.collective_seq
    if message is None:
        return lambda: counters.take(count)
    return lambda: counters.take_messages(*message, count)


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
    contents: CapturedGraph
    thread: int


class OpenCaptures:
    """The graphs that are captured now, by torch's ``CUDAGraph``. Mostly there are none: ``open`` is empty then."""

    def __init__(self, clock: DeviceClock, tell: Callable[[bool], None] = lambda _: None) -> None:
        self.open: tuple[_Capture, ...] = ()
        self.are_followed = False  # captures and replays are recorded
        self._clock = clock
        self._tell = tell  # told whether any is open
        self._lock = threading.Lock()

    def begin(self, graph: object) -> None:
        """Begin the contents of a graph, which this thread captures."""
        capture = _Capture(weakref.ref(graph), CapturedGraph(), threading.get_ident())
        with self._lock:
            self.open = (*(one for one in self.open if one.graph() not in (None, graph)), capture)
            self._tell(True)

    def end(self, graph: object) -> CapturedGraph | None:
        """End the capture of a graph; return its contents, which are still open, or None if its begin was not seen."""
        with self._lock:
            ended = [one.contents for one in self.open if one.graph() is graph]
            self.open = tuple(one for one in self.open if one.graph() not in (None, graph))
            self._tell(bool(self.open))
        return ended[-1] if ended else None

    def forget(self) -> None:
        """End all, at the end of the recording."""
        with self._lock:
            self.open = ()
            self._tell(False)

    def current(self) -> CapturedGraph | None:
        """Return the graph into which the current stream is captured; None where it is not, or is not known."""
        captures = self.open
        if not captures or not self._clock.is_capturing():
            return None
        if len(captures) == 1:
            return captures[0].contents
        # A backward is captured on autograd's threads: with several captures, which it belongs to is not known.
        thread = threading.get_ident()
        own = [capture.contents for capture in captures if capture.thread == thread]
        if len(own) == 1:
            return own[0]
        for capture in captures:
            capture.contents.is_known = False
        return None

    def state(self, own: GroupState) -> GroupState:
        """Return what numbers the communication of a group here: the graph that is captured, or the group itself."""
        graph = None if own.group.backend in _NOT_OF_A_DEVICE else self.current()
        return own if graph is None else graph.state(own)
