"""Divide stalls into wait and transfer by comparing ranks.

A collective that ends on all members at once lasts on each from its own arrival to the common end. So of one call

    transfer = the least time in flight of all members,   wait of a member = its stall - that least time.

Ranks report a few calls of each group in a *block* of steps; the number of the step decides which, so that all members
choose the same calls.
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
"""Reported calls per group and block, one in each of as many steps."""

_JOINS_KEPT: Final = 6
MOST_GROUPS: Final = 4
"""Reported pairs of group and operation per block: those with most bytes, which members have in common."""

Durations: TypeAlias = Annotated[tuple[Duration, ...], Meta(max_length=2 * CALLS_OF_A_BLOCK)]
"""Times of the calls of a block: up to twice as many if the size of the block is not a multiple."""


class GroupKey(NamedTuple):
    """A collective of a process group; the operation as its place in ``summary.ENDING_TOGETHER``."""

    group: int
    operation: int


class BlockTime(NamedTuple):
    """A few of one rank's calls of one collective in one block, with their times in flight."""

    group: Key
    operation: Count
    size: WorldSize  # members of the group
    identity: Key  # sum of the sequence numbers: equal on members that reported the same calls
    durations_ns: Durations


class BlockReport(NamedTuple):
    """A rank's report on its newest complete block: ``steps`` (0: none) from ``steps * number`` on."""

    steps: Count = 0
    number: Number = 0
    times: Annotated[tuple[BlockTime, ...], Meta(max_length=MOST_GROUPS)] = ()


NO_BLOCK: Final = BlockReport()


class Least(NamedTuple):
    """The least time in flight of each call over all members of a group: its transfer."""

    steps: Count
    number: Number
    group: Key
    operation: Count
    identity: Key
    durations_ns: Durations


@dataclass(slots=True)
class Split:
    """Wait and transfer, ns, of the compared calls of one operation and role."""

    wait_ns: int = 0
    transfer_ns: int = 0


@dataclass(slots=True)
class _Own:
    """This rank's reported calls of one collective in a block."""

    role: str
    name: str
    size: int
    identity: int = 0
    durations_ns: list[int] = field(default_factory=list)
    stalled_ns: list[int] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class _GrowingBlock:
    """A block that is being gathered, or waits for the least times."""

    number: int
    seen: set[int] = field(default_factory=set)
    own: dict[GroupKey, _Own] = field(default_factory=dict)
    incomparable: set[GroupKey] = field(default_factory=set)


class BlockWaits:
    """Gathers a rank's steps in blocks, and divides its stalls. Not thread-safe."""

    def __init__(self) -> None:
        self.newest = NO_BLOCK  # the report on the newest complete block
        self.split: dict[tuple[str, str], Split] = {}  # by operation and role
        self._steps = 0
        self._open: _GrowingBlock | None = None
        self._complete: deque[_GrowingBlock] = deque(maxlen=_BLOCKS_KEPT)

    @property
    def groups(self) -> list[int]:
        """Return the groups whose least times are awaited."""
        return sorted({key.group for block in self._complete for key in block.own})

    def resize(self, steps: int) -> None:
        """Set the number of steps of a block; steps gathered in another size are dropped."""
        if steps != self._steps:
            self._steps, self._open, self.newest = steps, None, NO_BLOCK
            self._complete.clear()

    def add(self, summary: StepSummary) -> None:
        """Add a complete step."""
        if not self._steps:
            return
        number = summary.step // self._steps
        if self._open is None or number != self._open.number:
            self._finish()
            self._open = _GrowingBlock(number)
        self._open.seen.add(summary.step)
        if summary.step % max(self._steps // CALLS_OF_A_BLOCK, 1):
            return
        for collective in summary.collectives:
            key = GroupKey(collective.group, collective.operation)
            if collective.duration_ns < 0:
                self._open.incomparable.add(key)
                continue
            calls = self._open.own.setdefault(key, _Own(collective.role, collective.name, collective.size))
            calls.identity += collective.seq
            calls.durations_ns.append(collective.duration_ns)
            calls.stalled_ns.append(collective.stalled_ns)
            calls.num_bytes += collective.num_bytes

    def settle(self, least_times: Iterable[Least]) -> None:
        """Divide the stalls in blocks whose least times are known, each once."""
        blocks = {block.number: block for block in self._complete}
        for least in least_times:
            block = blocks.get(least.number) if least.steps == self._steps else None
            key = GroupKey(least.group, least.operation)
            if block is None or key not in block.own or block.own[key].identity != least.identity:
                continue
            calls = block.own.pop(key)
            split = self.split.setdefault((calls.name, calls.role), Split())
            for stalled, transfer in zip(calls.stalled_ns, least.durations_ns, strict=False):
                wait = max(stalled - transfer, 0)
                split.wait_ns += wait
                split.transfer_ns += stalled - wait

    def _finish(self) -> None:
        block = self._open
        if block is None or len(block.seen) < self._steps:
            return
        for key in block.incomparable:
            block.own.pop(key, None)
        largest = sorted(block.own.items(), key=lambda item: (-item[1].num_bytes, item[0]))[:MOST_GROUPS]
        block.own = dict(largest)
        self._complete.append(block)
        times = tuple(BlockTime(*key, calls.size, calls.identity, tuple(calls.durations_ns)) for key, calls in largest)
        self.newest = BlockReport(self._steps, block.number, times)


class _BlockKey(NamedTuple):
    group: int
    operation: int
    steps: int
    number: int


@dataclass(slots=True)
class _Reported:
    """The members' reports on a block, by rank; a rank repeats its report until its next block is complete."""

    since: int
    members: dict[int, BlockTime] = field(default_factory=dict)


class LeastTimes:
    """Joins the blocks of all ranks; a block lasts one or two windows of ``seconds``, so that each is reported."""

    def __init__(self, seconds: float) -> None:
        self.steps = 0  # of a block; 0 before the length of a step is known
        self._seconds = seconds
        self._known: dict[_BlockKey, _Reported] = {}
        self._joins = 0

    def size_blocks(self, step_ns: int) -> None:
        """Choose the number of steps of a block; it changes only if a block has become far too short or too long."""
        if step_ns <= 0:
            return
        lasts = self.steps * step_ns / 1e9 / self._seconds
        if not 0.9 <= lasts <= 4:
            self.steps = 1 << (math.ceil(self._seconds * 1e9 / step_ns) - 1).bit_length()

    def join(self, blocks: Iterable[tuple[int, BlockReport]]) -> list[Least]:
        """Take the newest blocks of ranks, and return the least times of groups whose members have all reported."""
        self._joins += 1
        least: list[Least] = []
        for rank, block in blocks:
            if block.steps != self.steps:
                continue
            for time in block.times:
                key = _BlockKey(time.group, time.operation, block.steps, block.number)
                reported = self._known.setdefault(key, _Reported(self._joins))
                if rank not in reported.members:
                    reported.members[rank] = time
                    if len(reported.members) == time.size:
                        least += _least(key, reported)
        self._known = {
            key: reported for key, reported in self._known.items() if reported.since > self._joins - _JOINS_KEPT
        }
        return least


def _least(key: _BlockKey, reported: _Reported) -> Iterator[Least]:
    members = list(reported.members.values())
    calls = {(time.identity, len(time.durations_ns)) for time in members}
    if len(calls) == 1:  # if a rank counts a call in another step, members have chosen different calls
        shortest = tuple(map(min, zip(*(time.durations_ns for time in members), strict=True)))
        yield Least(key.steps, key.number, key.group, key.operation, members[0].identity, shortest)


def by_group(reported: Iterable[Least]) -> Mapping[int, list[Least]]:
    groups: dict[int, list[Least]] = {}
    for least in reported:
        groups.setdefault(least.group, []).append(least)
    return groups
