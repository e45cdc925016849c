"""Divides stalls into wait and transfer, which no rank can do alone.

A collective that ends on all members at once lasts, on each of them, as long as the member waits for the last one to
arrive, and then the transfer, which is the same for all. So of one call

    transfer = the least time in flight of all members,   waiting of a member = what it stood still - that least time.

Ranks cannot tell each other every call. They tell a few of each group in a *block* of steps, chosen by the number of
the step so that all members choose the same; who joins them finds the least of each.

>>> blocks = BlockWaits()                                       # doctest: +SKIP
>>> blocks.size = 16; blocks.add(summary)                       # doctest: +SKIP
>>> blocks.newest                                               # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta

from commtrace.live.monitoring.wire_types import Count, Duration, Key, Number, WorldSize
from commtrace.live.summary import StepSummary

_BLOCKS_KEPT: Final = 4
CALLS_OF_A_BLOCK: Final = 8
"""So many calls of each group are told of a block, one in each of as many steps."""

_JOINS_KEPT: Final = 6
MOST_GROUPS: Final = 4
"""So many pairs of group and operation are told of a block: those with most bytes, which members have in common."""

Durations: TypeAlias = Annotated[tuple[Duration, ...], Meta(max_length=2 * CALLS_OF_A_BLOCK)]
"""Of the calls of a block: twice as many where its size divides badly."""


class GroupKey(NamedTuple):
    """The key of calls that are added up: a collective of a process group."""

    group: int
    operation: int


class BlockTime(NamedTuple):
    """A few of one rank's calls of one kind in one block.

    Attributes:
        group, operation: which; the operation as its place in ``summary.ENDING_TOGETHER``.
        size: members of the group.
        identity: sum of their sequence numbers: tells whether members have told the same calls.
        durations_ns: in flight, of each call, in their order.
    """

    group: Key
    operation: Count
    size: WorldSize
    identity: Key
    durations_ns: Durations


class Block(NamedTuple):
    """A rank's report on its newest complete block.

    Attributes:
        steps: in it; 0 where there is none.
        number: it holds the steps from ``steps * number`` on.
        times: by group and operation.
    """

    steps: Count = 0
    number: Number = 0
    times: Annotated[tuple[BlockTime, ...], Meta(max_length=MOST_GROUPS)] = ()


NO_BLOCK: Final = Block()


class Least(NamedTuple):
    """The least time in flight that members of a group have told of each call: its transfer.

    Attributes:
        steps, number: of the block.
        group, operation: which calls.
        identity: sum of their sequence numbers.
        durations_ns: the least of each call.
    """

    steps: Count
    number: Number
    group: Key
    operation: Count
    identity: Key
    durations_ns: Durations


@dataclass(slots=True)
class Split:
    """Of the exposed time of one operation for one role, that of the calls that were compared; ns, added up.

    Attributes:
        wait_ns: before the last participant had arrived.
        transfer_ns: after it.
    """

    wait_ns: int = 0
    transfer_ns: int = 0


@dataclass(slots=True)
class _Own:
    """This rank's calls of one kind that are told of a block."""

    role: str
    name: str
    size: int
    identity: int = 0
    durations_ns: list[int] = field(default_factory=list)
    stalled_ns: list[int] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class _Steps:
    """A block that is being gathered, or waits to be judged."""

    number: int
    seen: set[int] = field(default_factory=set)
    own: dict[GroupKey, _Own] = field(default_factory=dict)
    incomparable: set[GroupKey] = field(default_factory=set)


class BlockWaits:
    """Gathers a rank's steps in blocks, and splits what it stood still when the least times of a block are known.

    Not for several threads at a time.

    Attributes:
        newest: what is to be told of the newest complete block.
        split: by operation and role, what is known so far.
    """

    def __init__(self) -> None:
        self.newest = NO_BLOCK
        self.split: dict[tuple[str, str], Split] = {}
        self._steps = 0
        self._open: _Steps | None = None
        self._complete: deque[_Steps] = deque(maxlen=_BLOCKS_KEPT)

    @property
    def groups(self) -> list[int]:
        """The groups whose least times would be of use now."""
        return sorted({key.group for block in self._complete for key in block.own})

    def resize(self, steps: int) -> None:
        """From now on a block has so many steps; what was gathered of another size is let go."""
        if steps != self._steps:
            self._steps, self._open, self.newest = steps, None, NO_BLOCK
            self._complete.clear()

    def add(self, summary: StepSummary) -> None:
        """A step has ended."""
        if not self._steps:
            return
        number = summary.step // self._steps
        if self._open is None or number != self._open.number:
            self._finish()
            self._open = _Steps(number)
        self._open.seen.add(summary.step)
        if summary.step % max(self._steps // CALLS_OF_A_BLOCK, 1):
            return
        for one in summary.collectives:
            key = GroupKey(one.group, one.operation)
            if one.duration_ns < 0:
                self._open.incomparable.add(key)
                continue
            own = self._open.own.setdefault(key, _Own(one.role, one.name, one.size))
            own.identity += one.seq
            own.durations_ns.append(one.duration_ns)
            own.stalled_ns.append(one.stalled_ns)
            own.num_bytes += one.num_bytes

    def settle(self, least_times: Iterable[Least]) -> None:
        """Split what was stood still in blocks of which the least times are now known; each once."""
        blocks = {block.number: block for block in self._complete}
        for least in least_times:
            block = blocks.get(least.number) if least.steps == self._steps else None
            key = GroupKey(least.group, least.operation)
            if block is None or key not in block.own or block.own[key].identity != least.identity:
                continue
            own = block.own.pop(key)
            split = self.split.setdefault((own.name, own.role), Split())
            for stalled, transfer in zip(own.stalled_ns, least.durations_ns, strict=False):
                wait = max(stalled - transfer, 0)
                split.wait_ns += wait
                split.transfer_ns += stalled - wait

    def _finish(self) -> None:
        """Tell of the block that is open, if all of its steps were seen."""
        block = self._open
        if block is None or len(block.seen) < self._steps:
            return
        for key in block.incomparable:
            block.own.pop(key, None)
        largest = sorted(block.own.items(), key=lambda item: (-item[1].num_bytes, item[0]))[:MOST_GROUPS]
        block.own = dict(largest)
        self._complete.append(block)
        times = tuple(BlockTime(*key, own.size, own.identity, tuple(own.durations_ns)) for key, own in largest)
        self.newest = Block(self._steps, block.number, times)


class _BlockKey(NamedTuple):
    """The key of calls in a block."""

    group: int
    operation: int
    steps: int
    number: int


@dataclass(slots=True)
class _Reported:
    """The members' reports, by rank. Ranks report a block until the next one is complete."""

    since: int
    members: dict[int, BlockTime] = field(default_factory=dict)


class LeastTimes:
    """Joins the blocks of all ranks.

    Args:
        seconds: length of a window: a block lasts one or two of them, so that every one is told.

    Attributes:
        steps: of a block; 0 before the length of a step is known.
    """

    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self._seconds = seconds
        self._known: dict[_BlockKey, _Reported] = {}
        self._joins = 0

    def size_blocks(self, step_ns: int) -> None:
        """Choose how long a block is; it changes only where it has become far too short or too long."""
        if step_ns <= 0:
            return
        lasts = self.steps * step_ns / 1e9 / self._seconds
        if not 0.9 <= lasts <= 4:
            self.steps = 1 << (math.ceil(self._seconds * 1e9 / step_ns) - 1).bit_length()

    def join(self, blocks: Iterable[tuple[int, Block]]) -> list[Least]:
        """Take the newest blocks of ranks; the least times of groups all of whose members have told the same one."""
        self._joins += 1
        found: list[Least] = []
        for rank, block in blocks:
            if block.steps != self.steps:
                continue
            for time in block.times:
                key = _BlockKey(time.group, time.operation, block.steps, block.number)
                reported = self._known.setdefault(key, _Reported(self._joins))
                if rank not in reported.members:
                    reported.members[rank] = time
                    if len(reported.members) == time.size:
                        found += _least(key, reported)
        self._known = {
            key: reported for key, reported in self._known.items() if reported.since > self._joins - _JOINS_KEPT
        }
        return found


def _least(key: _BlockKey, reported: _Reported) -> Iterator[Least]:
    members = list(reported.members.values())
    calls = {(time.identity, len(time.durations_ns)) for time in members}
    if len(calls) == 1:  # where a call is counted in another step on some rank, they have chosen different ones
        shortest = tuple(map(min, zip(*(time.durations_ns for time in members), strict=True)))
        yield Least(key.steps, key.number, key.group, key.operation, members[0].identity, shortest)


def by_group(reported: Iterable[Least]) -> Mapping[int, list[Least]]:
    """Return the least times of each group."""
    found: dict[int, list[Least]] = {}
    for one in reported:
        found.setdefault(one.group, []).append(one)
    return found
