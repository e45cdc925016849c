"""Device times of captured communication: stamps that are put into a CUDA graph while it is captured.

Each is a node of one thread that writes the device's time, and on which nothing of the job depends: stamps.c of the
native part adds and reads them. Of a communication there are one at its start and one at its end; of a wait of the
stream on which the capture began, one where it came to the wait::

    captured kernels ──┬──▶ start   ┌──▶ end
                       └──▶ NCCL's ─┴──────────▶ what waits for it
                    other kernels ──┬──▶ waited from ──▲
                                    └──────────────────┘

The difference of what the stream depends on before and after a wait is the last node of what it waits for. So ends are
those of the communication, whatever else runs meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from commtrace.capture.records import DeviceCall, Launch, Queue
from commtrace.trace import schema
from commtrace.trace.graphs import StampedOperation

if TYPE_CHECKING:
    from commtrace.trace.spans import Int64

NEEDS_NATIVE: Final = "COMMTRACE_GRAPHS=stamps needs the native part, which is not at work: replays are recorded"

LEAST_STAMPED_BYTES: Final = 4 << 20
"""Communications of fewer bytes are stamped only if they are among the first of their group, or each sixteenth. Then a
graph has about one stamp in 50 µs at the most, and all members of a group stamp the same communications."""
FIRST_STAMPED: Final = 16
STAMPED_EACH: Final = 16

TOO_MANY: Final = "it is small, and many of its group are: one in sixteen is stamped"
OF_ANOTHER: Final = "its graph is part of another graph"

_NO: Final = schema.NOT_APPLICABLE
_NO_QUEUE: Final = Queue(_NO)
_LOOKS: Final = 8
"""Passes of the harvester, after the end of a replay was seen, in which its stamps may arrive."""
_MOST_AWAITED: Final = 4_096
"""Replays of a graph whose rows have not asked for their times: those of rows that were lost never do."""
_GIVEN_UP_AT_ONCE: Final = 256
_SLACK_NS: Final = 500_000
"""Of the times of stamps beside those of their replay, which come from events and another reading of the clock."""


class Frontier:
    """What the current stream depends on, at one point of the capture: stands for the mark of a wait."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: bytes | str) -> None:
        self.nodes = nodes  # a reason instead, if they are not known


class _CaptureClock:
    """Takes the marks of waits in a capture."""

    timing = schema.GRAPH_STAMP_TIMING

    def __init__(self, stamps: GraphStamps) -> None:
        self._stamps = stamps

    def mark(self, device: int | None = None, /) -> Frontier:
        return self._stamps.frontier(device)


class CapturedCall(DeviceCall):
    """A communication that goes into a graph. Its stamps are numbers; members of a bracket have those of the first."""

    __slots__ = (
        "end_stamp", "first_node", "from_stamp", "has_one_start", "is_awaited", "last_node", "leader", "reason",
        "stall_end_stamp", "stamps", "start_stamp",
    )  # fmt: skip

    def __init__(self, launch: Launch, device: int | None, stamps: GraphStamps) -> None:
        super().__init__(launch, stamps.clock, device, _NO_QUEUE, _NO)
        self.stamps = stamps
        self.leader: CapturedCall = self
        self.reason = ""  # why it has no stamps
        self.first_node = self.last_node = _NO
        self.start_stamp = self.end_stamp = self.from_stamp = self.stall_end_stamp = _NO
        self.has_one_start = False
        self.is_awaited = False  # the stream of the capture's begin has run it, or waited for it

    def operation(self, index: int) -> StampedOperation | None:
        """Return what its stamps are, for the graph's mark; None if it has none."""
        leader = self.leader
        if leader.start_stamp < 0 or leader.end_stamp < 0:
            return None
        stall_end = leader.end_stamp if leader.stall_end_stamp < 0 else leader.stall_end_stamp
        return StampedOperation(
            index, leader.start_stamp, leader.end_stamp, leader.from_stamp, stall_end, leader.has_one_start,
            leader.is_awaited, leader is self,
        )  # fmt: skip


class ReplayTimes(NamedTuple):
    """When the stamps of a replay were written."""

    times: Int64  # ns, the host's clock; −1 of a stamp that was not written
    error_ns: int  # of the clock: they are right within it


class GraphStamps:
    """The stamps of one graph, unless the native part has refused them: ``refusal`` says why."""

    def __init__(self, core: Any, graph_id: int, read: Callable[[], None]) -> None:
        self._core = core
        self._read_all = read
        begun: tuple[int, int] | str = core.begin_stamps(graph_id)
        self._native: tuple[int, int] | None = None if isinstance(begun, str) else begun
        self.refusal = begun if isinstance(begun, str) else ""
        self.is_capturing = True
        self.clock: Any = _CaptureClock(self)
        self._calls: list[CapturedCall] = []
        self._awaited: dict[int, int] = {}  # replays whose rows wait for their times; how often these were asked for
        self._read: dict[int, ReplayTimes] = {}

    # While it is captured

    def call(self, launch: Launch, device: int | None) -> CapturedCall | None:
        """Return a communication that is about to be captured; None if the graph has no stamps."""
        return None if self._native is None else CapturedCall(launch, device, self)

    def take_ids(self, count: int) -> int:
        """Return the first of so many numbers of communications."""
        first: int = self._core.take_ids(count)
        return first

    def about_to_launch(self, call: CapturedCall) -> None:
        """Note what the graph holds before it."""
        before = self._core.stamps_before(self._native, _index(call.device))
        if isinstance(before, int):
            call.first_node = before
        else:
            call.reason = before

    def launched(self, call: CapturedCall) -> None:
        """Stamp its start, by what its first node depends on."""
        if call.reason or call.start_stamp >= 0:
            return
        self._calls.append(call)
        started = self._core.stamp_start(self._native, call.first_node)
        if isinstance(started, str):
            call.reason = started
        else:
            call.start_stamp, call.last_node, call.has_one_start = started

    def ends_here(self, call: CapturedCall, *, has_run: bool) -> None:
        """Stamp its end: the current stream ``has_run`` it, or nobody will be seen to wait for it."""
        if call.reason or call.end_stamp >= 0 or call.start_stamp < 0:
            return
        ended = self._core.stamp_end(self._native, _index(call.device), call.first_node, call.last_node)
        if isinstance(ended, str):
            call.reason = ended
            return
        call.end_stamp, is_on_origin = ended
        if is_on_origin and has_run:
            call.from_stamp, call.is_awaited = call.start_stamp, True

    def frontier(self, device: int | None) -> Frontier:
        return Frontier(self._core.stamps_frontier(self._native, _index(device)))

    def waited(self, call: CapturedCall, before: object) -> None:
        """Stamp the end of what the current stream has waited for, and where it came to the wait."""
        call = call.leader
        if call.reason or call.start_stamp < 0 or call.is_awaited or not isinstance(before, Frontier):
            return
        has_end = call.end_stamp >= 0
        waited = before.nodes
        if isinstance(waited, bytes):
            waited = self._core.stamp_wait(
                self._native, _index(call.device), waited, call.first_node, call.last_node, has_end
            )
        if isinstance(waited, str):
            call.reason = "" if has_end else waited
            return
        waited_from, end, call.is_awaited = waited
        if not has_end:
            call.end_stamp = end
        else:
            call.stall_end_stamp = end
        if call.is_awaited:  # without a stamp the stream was behind its end already
            call.from_stamp = call.end_stamp if waited_from < 0 else waited_from

    def abandon(self) -> None:
        """Read no replay of the graph, from now on, and forget those that were read."""
        self.stop()
        self._awaited.clear()
        self._read.clear()

    def stop(self) -> None:
        """Read no replay of the graph, from now on; rows that are still to come get what was read."""
        self.is_capturing = False
        self._core.close_stamps(self._native, False)
        self._native = None

    def complete(self) -> None:
        """Add what is missing, before the capture ends: what nobody was seen to wait for ends with its last node."""
        for call in self._calls:
            self.ends_here(call, has_run=False)
            call.is_joined = True  # for waits of other streams that come later
        self._calls.clear()

    def close(self) -> None:
        """Have replays read from now on: the capture has ended."""
        self.is_capturing = False
        self._core.close_stamps(self._native, True)

    # Once it is captured

    @property
    def is_read(self) -> bool:
        return self._native is not None

    def expect(self, replay: int) -> None:
        """Keep the times of a replay, whose row will ask for them."""
        self._awaited[replay] = 0
        if len(self._awaited) > _MOST_AWAITED:
            for oldest in list(self._awaited)[:_GIVEN_UP_AT_ONCE]:
                self.expect_not(oldest)

    def expect_not(self, replay: int) -> None:
        self._awaited.pop(replay, None)
        self._read.pop(replay, None)

    def add(self, replay: int, times: ReplayTimes) -> None:
        """Take the times of a replay that the native part has read."""
        if replay in self._awaited:
            self._read[replay] = times

    def may_arrive(self, replay: int) -> bool:
        """Return whether the times of a replay, whose end was seen, are still to be waited for."""
        if replay not in self._read:
            self._read_all()
        looks = self._awaited.get(replay, _LOOKS)
        if replay in self._read or looks >= _LOOKS or not self.is_read:
            return False
        self._awaited[replay] = looks + 1
        return True

    def take(self, replay: int, start: int, end: int) -> ReplayTimes | None:
        """Return the times of a replay from ``start`` to ``end``, once; None if they are not known."""
        times = self._read.get(replay)
        self.expect_not(replay)
        if times is None:
            return None
        written = times.times[times.times != _NO]
        slack = _SLACK_NS + times.error_ns
        if len(written) and (written.min() < start - slack or written.max() > end + slack):
            # Something else has replayed the graph, and its numbers are not ours any more.
            self.abandon()
            return None
        return times


class StampingOfGraphs:
    """Has graphs stamped as they are captured, and hands the times of replays to their graphs."""

    def __init__(self, core: Any, noticed: Callable[[str], None]) -> None:
        self._core = core
        self._noticed = noticed
        self._lock = threading.Lock()
        self._graphs: weakref.WeakValueDictionary[int, GraphStamps] = weakref.WeakValueDictionary()  # by id
        self._told: set[str] = set()

    def prepare(self, *, is_alone: bool) -> None:
        """Make what the current device needs, before a capture begins; ``is_alone``: nothing else is captured now."""
        with self._lock:
            self._core.mark()  # has the native part open the device, if nothing has
            reason = self._core.prepare_stamps(is_alone)
        if reason and reason not in self._told:
            self._told.add(reason)
            self._noticed(f"communication in CUDA graphs has no device times of its own: {reason}.")

    def begin(self, graph_id: int) -> GraphStamps:
        """Begin the stamps of the graph that the current stream captures."""
        stamps = self._graphs[graph_id] = GraphStamps(self._core, graph_id, self.read)
        return stamps

    def read(self) -> None:
        """Hand over what has arrived: the harvester."""
        for graph_id, replay, error_ns, times in self._core.take_stamps():
            stamps = self._graphs.get(graph_id)
            if stamps is not None:
                stamps.add(replay, ReplayTimes(np.frombuffer(times, np.int64), error_ns))

    def close(self) -> None:
        """End all captures that are going on; what was captured is not read any more."""
        for stamps in list(self._graphs.values()):
            stamps.stop()
        self._graphs.clear()


def is_to_be_stamped(num_bytes: int, number: int) -> bool:
    """Return whether a communication is large enough, or early enough among those of its group."""
    return num_bytes >= LEAST_STAMPED_BYTES or number < FIRST_STAMPED or number % STAMPED_EACH == 0


def _index(device: int | None) -> int:
    return _NO if device is None else device
