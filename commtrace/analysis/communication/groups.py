"""What passes through each process group and between each two ranks, how fast, and which rank came last.

>>> measure_groups(analyse("commtrace-runs/my-run")).arrivals   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.communication.table import CommunicationSums, Detail, communication_sums
from commtrace.analysis.communication.transfers import large_transfers
from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matched import Context
from commtrace.analysis.statistics import Distribution, join_distributions
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.spans import Int64

_NEVER: Final = np.iinfo(np.int64).max


class GroupOperation(NamedTuple):
    """An operation on a process group."""

    group: int  # id
    operation: str


class Pair(NamedTuple):
    """Ranks, of a message or of an arrival: the first one did it to, or in, the second."""

    first: int
    second: int


class PairMessages(NamedTuple):
    """Messages from one rank to another."""

    calls: int
    num_bytes: int  # of those of known size
    large_bytes: int  # of large ones whose transfer is known
    large_ns: int

    def plus(self, other: PairMessages) -> PairMessages:
        return PairMessages(*(one + another for one, another in zip(self, other, strict=True)))


class Arrivals(NamedTuple):
    """How often a rank came last to a communication of a group."""

    times: int  # by more than the clocks are wrong
    wait_ns: int  # of the others for it

    def plus(self, other: Arrivals) -> Arrivals:
        return Arrivals(self.times + other.times, self.wait_ns + other.wait_ns)


Sums = TypeVar("Sums", PairMessages, Arrivals)


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Sums over some steps; those of several windows of a run add up."""

    calls: CommunicationSums  # by process group
    speeds: Mapping[GroupOperation, Distribution[float]]  # busbw of large calls, GB/s
    compared: Mapping[int, int]  # by group: communications whose members' arrivals were compared
    arrivals: Mapping[Pair, Arrivals] = field(default_factory=dict)  # (group, rank)
    messages: Mapping[Pair, PairMessages] = field(default_factory=dict)  # (sender, receiver)

    def __add__(self, later: GroupTotals) -> GroupTotals:
        compared = {group: self.compared.get(group, 0) for group in {**self.compared, **later.compared}}
        return GroupTotals(
            self.calls + later.calls,
            join_distributions([*self.speeds.items(), *later.speeds.items()]),
            {group: count + later.compared.get(group, 0) for group, count in compared.items()},
            _added([*self.arrivals.items(), *later.arrivals.items()]),
            _added([*self.messages.items(), *later.messages.items()]),
        )


def measure_groups(analysis: Analysis) -> GroupTotals:
    """Measure the steps that count."""
    context = analysis.context
    calls = communication_sums(
        context.run, context.matches, analysis.partition, context.roles, context.steps, Detail.GROUP
    )
    speeds: list[tuple[GroupOperation, Distribution[float]]] = []
    messages: list[tuple[Pair, PairMessages]] = []
    for block in context.run.blocks:
        _measure_block(context, block, speeds, messages)
    compared, arrivals = _arrivals(context, analysis.alignment)
    return GroupTotals(calls, join_distributions(speeds), compared, arrivals, _added(messages))


def _added(parts: Iterable[tuple[Pair, Sums]]) -> dict[Pair, Sums]:
    sums: dict[Pair, Sums] = {}
    for key, sums_of_pair in parts:
        sums[key] = sums[key].plus(sums_of_pair) if key in sums else sums_of_pair
    return sums


def _measure_block(
    context: Context,
    block: Block,
    speeds: list[tuple[GroupOperation, Distribution[float]]],
    messages: list[tuple[Pair, PairMessages]],
) -> None:
    spans, large = block.spans, large_transfers(context, block)
    example, which = grouped(pack((spans.group[large.row], spans.name[large.row])))
    gbps = large.bus_bytes / large.ns
    for number, row in enumerate(large.row[example].tolist()):
        key = GroupOperation(int(spans.group[row]), context.run.names[int(spans.name[row])])
        speeds.append((key, Distribution.of(gbps[which == number])))
    # A message is seen where it is received; where the receiver was not recorded, where it is sent.
    is_message = (spans.kind == schema.P2P) & (spans.peer < OUTSIDE) & np.isin(spans.step, context.steps)
    receives = spans.name == context.run.name_code("recv")
    rows = np.flatnonzero(is_message & (receives | ~np.isin(spans.peer, [*context.run.ranks])))
    if not len(rows):
        return
    rank, peer = block.rank()[rows].astype(np.int64), spans.peer[rows].astype(np.int64)
    sender, receiver = np.where(receives[rows], peer, rank), np.where(receives[rows], rank, peer)
    large_bytes, large_ns = np.zeros((2, len(spans)), np.int64)
    large_bytes[large.row], large_ns[large.row] = np.rint(large.bus_bytes), large.ns
    example, which = grouped(pack((sender, receiver)))
    ones, num_bytes = np.ones(len(rows), np.int64), np.maximum(spans.bytes[rows], 0)
    columns = [_sums(which, values, len(example)) for values in (ones, num_bytes, large_bytes[rows], large_ns[rows])]
    for number, row in enumerate(example.tolist()):
        pair = Pair(int(sender[row]), int(receiver[row]))
        messages.append((pair, PairMessages(*(int(column[number]) for column in columns))))


def _sums(which: Int64, values: Int64, count: int) -> Int64:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, which, values)
    return sums


def _arrivals(context: Context, alignment: Alignment) -> tuple[dict[int, int], dict[Pair, Arrivals]]:
    """Return the compared communications of each group, and the arrivals by (group, rank)."""
    parts = [_collectives(context, block) for block in context.run.blocks]
    bucket, group, rank, last, wait, nodes = (np.concatenate(column) for column in zip(*parts, strict=True))
    # The last two members are compared where the wait of the one before the last is more than the clocks are wrong.
    count = int(bucket.max(initial=-1)) + 1
    shortest = np.full(count, _NEVER)
    waited = rank != last
    np.minimum.at(shortest, bucket[waited], wait[waited])
    of_last = np.flatnonzero(~waited)
    residual = np.where(nodes[of_last] > 1, alignment.residual_ns["p99"], 0)
    is_clear = (shortest[bucket[of_last]] > residual) & (shortest[bucket[of_last]] < _NEVER)
    clear = of_last[is_clear]
    groups, number = np.unique(group[of_last], return_counts=True)
    times = [
        (Pair(*key), Arrivals(count, 0))
        for key, count in _counted(group[clear], rank[clear], np.ones(len(clear), np.int64))
    ]
    is_clear_bucket = np.zeros(count, np.bool_)
    is_clear_bucket[bucket[clear]] = True
    late = waited & is_clear_bucket[bucket]
    waits = [(Pair(*key), Arrivals(0, ns)) for key, ns in _counted(group[late], last[late], wait[late])]
    return dict(zip(groups.tolist(), number.tolist(), strict=True)), _added([*times, *waits])


def _counted(first: Int64, second: Int64, values: Int64) -> list[tuple[tuple[int, int], int]]:
    example, which = grouped(pack((first, second)))
    keys = zip(first[example].tolist(), second[example].tolist(), strict=True)
    return list(zip(keys, _sums(which, values, len(example)).tolist(), strict=True))


def _collectives(context: Context, block: Block) -> tuple[Int64, ...]:
    """Return bucket, group, rank, last rank, wait and number of nodes of the matched collectives of a block.

    They are those whose members all began at a known time.
    """
    spans, matches = block.spans, context.matches.ranks
    bucket, complete, last, ready, exact = (
        block.together({rank: getattr(matches[rank], column) for rank in block.ranks})
        for column in ("bucket", "complete", "last_rank", "ready", "ready_exact")
    )
    nodes = block.together({rank: context.roles.ranks[rank].nodes for rank in block.ranks})
    chosen = complete & exact & (spans.kind == schema.COLLECTIVE) & (last >= 0) & np.isin(spans.step, context.steps)
    rows = np.flatnonzero(chosen)
    columns = (bucket, spans.group, block.rank(), last, ready - spans.start, nodes)
    return tuple(column[rows].astype(np.int64) for column in columns)
