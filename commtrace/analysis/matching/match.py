"""Match operations of different ranks to communications, and find when the last participant arrived.

A collective is joined on (group, seq, op_in_seq), a point-to-point operation on (group, sender, receiver, seq): the
n-th send from a to b meets the n-th receive. Names and order in time never matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, numbered, pack
from commtrace.analysis.matching.operations import (
    BYTES_DIFFER,
    ROOTED,
    SYNCHRONISING,
    communication_rows,
    named,
    unfinished_rows_of,
)
from commtrace.trace import schema
from commtrace.trace.blocks import Block, bounds_of
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

_UNKNOWN_SIZE = -1
_LARGEST = np.iinfo(np.int64).max

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RankMatches:
    """The matches of one rank, aligned with its span rows.

    ``ready`` separates wait from transfer: a send or rooted collective that ended before its last participant arrived
    did not wait, and members of a point-to-point bracket are ready together. Rows without communication have
    ``last_start = ready = start``.
    """

    bucket: Int32  # number of the communication, equal on all ranks; −1 for other rows
    participants: Int32  # number of rows in the bucket
    complete: Bool  # every member was seen, and wait and transfer can be separated
    mismatched: Bool  # the participants disagree on operation, bytes or dtype
    last_start: Int64  # arrival of the last participant, ns on this rank's clock
    last_rank: Int32  # −1 if unknown
    ready: Int64  # ns in [start, end]
    ready_exact: Bool  # False: a lower bound, as the start of a participant is one
    stall_ready: Int64  # of its communication; the start if unrecorded, as nothing shows a late rank
    stall_ready_exact: Bool  # of its communication
    stall_complete: Bool  # of its communication

    def take(self, rows: Bool | Int64 | slice) -> RankMatches:
        return RankMatches(*(getattr(self, column.name)[rows] for column in fields(self)))

    def wait_ns(self, spans: Spans) -> Int64:
        """Return the time in flight before the last participant arrived: max(0, last − start).

        It is 0 for an operation that began at an unknown time, and a lower bound if only another member's did.
        """
        return np.where(spans.start_exact, self.ready - spans.start, 0)

    def transfer_ns(self, spans: Spans) -> Int64:
        """Return the time in flight after it: end − max(last, start)."""
        return np.asarray(np.maximum(spans.end - self.ready, 0))

    def transfer_exact(self, spans: Spans) -> Bool:
        """Return whether that time is exact; else it is an upper bound."""
        return np.asarray(self.ready_exact & spans.end_exact)


@dataclass(frozen=True, slots=True)
class Matches:
    """The matches of a run.

    If ``clocks_agree`` is False, times of different hosts are not compared: between hosts, the shortest member of a
    synchronising collective counts as last to arrive, and rooted collectives and point-to-point are not complete.
    """

    ranks: Mapping[int, RankMatches]
    clocks_agree: bool = True


def match(run: Run, *, clocks_agree: bool = True) -> Matches:
    """Match the communications of all ranks of an aligned run; see :class:`Matches` for clocks that do not agree."""
    rows, bounds = _rows_and_bounds(run)
    joined = _join(run, rows, clocks_agree) if len(rows.rank) else None
    of_blocks = [
        _matches_of_block(block, rows.position[begin:end], joined, slice(begin, end))
        for block, (begin, end) in zip(run.blocks, pairwise(bounds.tolist()), strict=True)
    ]
    ranks = {
        rank: matches.take(rows)
        for block, matches in zip(run.blocks, of_blocks, strict=True)
        for rank, rows in block.slices().items()
    }
    return Matches(ranks, clocks_agree)


def _rows_and_bounds(run: Run) -> tuple[Rows, Int64]:
    """Return the communication rows of all ranks, and the place of the first one of each block, with their number."""
    parts = gather_blocks(run)
    return concatenate(parts), bounds_of([len(part.rank) for part in parts])


def _matches_of_block(block: Block, position: Int64, joined: _Joined | None, rows_of_block: slice) -> RankMatches:
    """Return the matches of a block, whose communications are at these positions and in ``joined[rows_of_block]``."""
    matches = unmatched(block.spans)
    if joined is not None:
        for column in _Joined._fields:
            getattr(matches, column)[position] = getattr(joined, column)[rows_of_block]
        stalls = np.flatnonzero(block.spans.kind == schema.STALL)
        communications = communications_of(block, stalls)
        is_recorded = communications >= 0
        stalls, communications = stalls[is_recorded], communications[is_recorded]
        matches.stall_ready[stalls] = matches.ready[communications]
        matches.stall_ready_exact[stalls] = matches.ready_exact[communications]
        matches.stall_complete[stalls] = matches.complete[communications]
    return matches


def communication_of(spans: Spans, stalls: Int64) -> Int64:
    """Return the row of each stall's communication in a rank; −1 if it was not recorded."""
    return communications_of(Block((0,), bounds_of([len(spans)]), spans), stalls)


def communications_of(block: Block, stalls: Int64) -> Int64:
    """Return the row of each stall's communication in a block; −1 if it was not recorded."""
    spans = block.spans
    communications = np.flatnonzero(communication_rows(spans) & (spans.id >= 0))
    if not len(communications):
        return np.full(len(stalls), -1, np.int64)
    rank = block.rank()
    which = np.concatenate([communications, stalls])
    ids = np.concatenate([spans.id[communications], spans.stalled_on[stalls]])
    # Of equal keys the first one is the example: a communication wherever there is one, as they come first.
    example, number = grouped(pack((rank[which], ids)))
    is_communication = example < len(communications)
    communication_of_key = np.where(is_communication, communications[np.minimum(example, len(communications) - 1)], -1)
    return np.asarray(communication_of_key[number[len(communications) :]])


def unmatched(spans: Spans) -> RankMatches:
    """Return the matches of a rank that is not compared with others: no wait."""
    count = len(spans)
    return RankMatches(
        bucket=np.full(count, -1, np.int32),
        participants=np.zeros(count, np.int32),
        complete=np.zeros(count, np.bool_),
        mismatched=np.zeros(count, np.bool_),
        last_start=spans.start.copy(),
        last_rank=np.full(count, -1, np.int32),
        ready=spans.start.copy(),
        ready_exact=spans.start_exact.copy(),
        stall_ready=spans.start.copy(),
        stall_ready_exact=np.ones(count, np.bool_),
        stall_complete=np.zeros(count, np.bool_),
    )


class _Joined(NamedTuple):
    bucket: Int32
    participants: Int32
    complete: Bool
    mismatched: Bool
    last_start: Int64
    last_rank: Int32
    ready: Int64
    ready_exact: Bool


def _join(run: Run, rows: Rows, clocks_agree: bool) -> _Joined:
    buckets = bucket(rows)
    of_row = buckets.of_row()
    last_start, last_rank, comparable, exact = _last_arrival(run, rows, buckets, of_row, clocks_agree)
    return _Joined(
        bucket=of_row.astype(np.int32),
        participants=buckets.size.astype(np.int32)[of_row],
        complete=comparable & (buckets.size == _expected_participants(run, rows, buckets))[of_row],
        mismatched=_mismatched(run, rows, buckets)[of_row],
        last_start=last_start,
        last_rank=last_rank,
        ready=_ready(run, rows, last_start),
        ready_exact=_shared_in_brackets(rows, exact, np.logical_and),
    )


def _last_arrival(
    run: Run, rows: Rows, buckets: Buckets, of_row: Int64, clocks_agree: bool
) -> tuple[Int64, Int32, Bool, Bool]:
    """Return start and rank of the last participant, and masks of the rows with comparable times and an exact one."""
    start = rows.spans.start
    last_start = buckets.maximum(start)[of_row]
    is_last = start == last_start
    comparable = np.ones(len(start), np.bool_)
    exact = buckets.all(rows.spans.start_exact)[of_row]
    if not clocks_agree:
        apart = (buckets.maximum(rows.clock) != buckets.minimum(rows.clock))[of_row]
        synchronising = named(run, rows.spans, SYNCHRONISING) & (rows.spans.kind == schema.COLLECTIVE)
        duration = np.where(rows.finished, rows.spans.end - start, _LARGEST)
        shortest = buckets.minimum(duration)[of_row]
        by_duration = apart & synchronising & (shortest != _LARGEST)
        last_start = np.where(by_duration, np.maximum(rows.spans.end - shortest, start), last_start)
        last_start = np.where(apart & ~by_duration, start, last_start)
        is_last = np.where(by_duration, duration == shortest, is_last & ~apart)
        comparable = ~apart | by_duration
        exact &= ~by_duration | buckets.all(rows.spans.end_exact)[of_row]
    last_rank = buckets.maximum(np.where(is_last, rows.rank, -1))[of_row]
    return last_start, last_rank.astype(np.int32), comparable, exact


def _expected_participants(run: Run, rows: Rows, buckets: Buckets) -> Int32:
    """Return the size of each bucket's group; 2 for point-to-point; −1 if no rank recorded the group."""
    example = buckets.order[buckets.first]
    sizes = {number: group.size for trace in run.ranks.values() for number, group in trace.groups.items()}
    known = np.array(sorted(sizes), np.int64)
    size_of_known = np.array([*(sizes[number] for number in sorted(sizes)), _UNKNOWN_SIZE], np.int32)
    slot = np.searchsorted(known, rows.spans.group[example])
    is_known = np.append(known, -1)[slot] == rows.spans.group[example]
    expected = np.where(is_known, size_of_known[slot], _UNKNOWN_SIZE)
    return np.where(rows.spans.kind[example] == schema.P2P, 2, expected).astype(np.int32)


def _mismatched(run: Run, rows: Rows, buckets: Buckets) -> Bool:
    return np.asarray(np.logical_or.reduce(list(differences(run, rows, buckets).values())))


def differences(run: Run, rows: Rows, buckets: Buckets) -> dict[str, Bool]:
    """Return by aspect the buckets whose rows differ in it."""
    spans = rows.spans
    # The two sides of a P2P have different names; two sends would be no pair.
    operation = np.where(spans.kind == schema.P2P, 0, spans.name)
    may_differ = named(run, spans, BYTES_DIFFER) | (spans.self_bytes >= 0)
    bytes_of_all = np.where(may_differ, schema.NOT_APPLICABLE, spans.bytes)
    return {
        "operation": buckets.differ(operation),
        "bytes": _known_values_differ(buckets, bytes_of_all),
        "dtype": _known_values_differ(buckets, spans.dtype),
        "sides": _same_side(rows, buckets),
    }


def _same_side(rows: Rows, buckets: Buckets) -> Bool:
    """Return the pairs of two sends, or of two receives."""
    are_alike = np.zeros(len(buckets.first), np.bool_)
    pairs = np.flatnonzero(buckets.size == 2)
    first, second = buckets.order[buckets.first[pairs]], buckets.order[buckets.first[pairs] + 1]
    are_alike[pairs] = (rows.spans.kind[first] == schema.P2P) & (rows.is_send[first] == rows.is_send[second])
    return are_alike


def _known_values_differ(buckets: Buckets, values: npt.NDArray[np.integer]) -> Bool:
    differ = buckets.differ(values)
    if not differ.any():
        return differ
    # Widened first: numpy would silently truncate the large number in a narrow column.
    wide = values.astype(np.int64)
    smallest_known = buckets.minimum(np.where(wide == schema.NOT_APPLICABLE, _LARGEST, wide))
    return np.asarray((smallest_known != _LARGEST) & (smallest_known != buckets.maximum(wide)))


def _ready(run: Run, rows: Rows, last_start: Int64) -> Int64:
    spans = rows.spans
    may_leave_early = rows.is_send | ((spans.kind == schema.COLLECTIVE) & named(run, spans, ROOTED))
    did_not_wait = may_leave_early & (last_start > spans.end)
    ready = np.where(did_not_wait, spans.start, np.clip(last_start, spans.start, np.maximum(spans.end, spans.start)))
    return _shared_in_brackets(rows, ready, np.maximum)


def _shared_in_brackets(rows: Rows, values: npt.NDArray[_Scalar], combine: np.ufunc) -> npt.NDArray[_Scalar]:
    """Combine the values of the members of each point-to-point bracket, which have consecutive ids."""
    p2p = np.flatnonzero(rows.spans.kind == schema.P2P)
    if not len(p2p) or not rows.spans.op_in_seq[p2p].any():
        return values
    ordered = p2p[np.lexsort((rows.spans.id[p2p], rows.rank[p2p]))]
    begins = rows.spans.op_in_seq[ordered] == 0
    begins[0] = True
    of_row = np.cumsum(begins) - 1
    shared = values.copy()
    shared[ordered] = combine.reduceat(values[ordered], np.flatnonzero(begins))[of_row]
    return shared


def blame_ns(run: Run, matches: Matches) -> Mapping[int, int]:
    """Return by rank the total wait of others for communications in which it arrived last, ns."""
    blame = Counter[int]()
    for block in run.blocks:
        ready, last_rank = (
            block.together({rank: getattr(matches.ranks[rank], column) for rank in block.ranks})
            for column in ("ready", "last_rank")
        )
        wait = np.where(block.spans.start_exact, ready - block.spans.start, 0)
        waited = np.flatnonzero((last_rank >= 0) & (last_rank != block.rank()) & (wait > 0))
        sums = np.zeros(int(last_rank.max(initial=-1)) + 1, np.int64)
        np.add.at(sums, last_rank[waited], wait[waited])
        blame.update({rank: int(sums[rank]) for rank in np.flatnonzero(sums).tolist()})
    return blame


class Rows(NamedTuple):
    """Communication rows of all ranks, one rank after the other; ``position`` is in the rank's block."""

    rank: Int32
    clock: Int32
    position: Int64
    is_send: Bool
    finished: Bool
    spans: Spans

    def take(self, chosen: Bool) -> Rows:
        rows = np.flatnonzero(chosen)
        return Rows(
            self.rank[rows], self.clock[rows], self.position[rows], self.is_send[rows], self.finished[rows],
            self.spans.take(rows),
        )  # fmt: skip


class Buckets(NamedTuple):
    """Rows sorted so that those of one communication are neighbours."""

    order: Int64  # sorts the rows
    first: Int64  # position of each bucket's first sorted row
    size: Int64
    of_sorted_row: Int64  # bucket of each sorted row

    def maximum(self, values: npt.NDArray[np.integer]) -> Int64:
        """Return the largest value in each bucket; values are aligned with the unsorted rows."""
        return np.asarray(np.maximum.reduceat(values[self.order], self.first))

    def all(self, values: Bool) -> Bool:
        """Return whether a value is true for every row of each bucket."""
        return np.asarray(np.logical_and.reduceat(values[self.order], self.first))

    def minimum(self, values: npt.NDArray[np.integer]) -> Int64:
        return np.asarray(np.minimum.reduceat(values[self.order], self.first))

    def differ(self, values: npt.NDArray[np.generic]) -> Bool:
        ordered = values[self.order]
        changes = ordered[1:] != ordered[:-1]
        changes &= self.of_sorted_row[1:] == self.of_sorted_row[:-1]
        do_differ = np.zeros(len(self.first), np.bool_)
        do_differ[self.of_sorted_row[1:][changes]] = True
        return do_differ

    def of_row(self) -> Int64:
        buckets = np.empty(len(self.order), np.int64)
        buckets[self.order] = self.of_sorted_row
        return buckets


def gather(run: Run, chosen: Callable[[Block], Bool] | None = None) -> Rows:
    """Return the communication rows that know their group, of all ranks; of a block only those ``chosen``."""
    return concatenate(gather_blocks(run, chosen))


def gather_blocks(run: Run, chosen: Callable[[Block], Bool] | None = None) -> list[Rows]:
    number_of_clock = {key: number for number, key in enumerate(dict.fromkeys(t.clock_key for t in run.ranks.values()))}

    def of_block(block: Block) -> Rows:
        # Rows without times would be joined well, and then compared by times that mean nothing.
        has_times = np.array([run.ranks[rank].has_times for rank in block.ranks], np.bool_)
        selected = communication_rows(block.spans) & (block.spans.group >= 0) & block.per_row(has_times)
        position = np.flatnonzero(selected & chosen(block) if chosen else selected)
        spans = block.spans.take(position)
        clock = np.array([number_of_clock[run.ranks[rank].clock_key] for rank in block.ranks], np.int32)
        return Rows(
            rank=block.rank()[position],
            clock=block.per_row(clock)[position],
            position=position,
            is_send=(spans.kind == schema.P2P) & named(run, spans, ("send",)),
            finished=~unfinished_rows_of(run, block)[position],
            spans=spans,
        )

    return [of_block(block) for block in run.blocks]


def concatenate(parts: Sequence[Rows]) -> Rows:
    rank, clock, position, is_send, finished = (
        np.concatenate([part[column] for part in parts]) for column in range(len(Rows._fields) - 1)
    )
    return Rows(rank, clock, position, is_send, finished, Spans.concatenate([part.spans for part in parts]))


def bucket(rows: Rows) -> Buckets:
    """Sort the rows by the key of their communication."""
    spans = rows.spans
    p2p = np.flatnonzero(spans.kind == schema.P2P)
    rank, peer, is_send = rows.rank[p2p], spans.peer[p2p], rows.is_send[p2p]
    pair = np.full(len(spans), schema.NOT_APPLICABLE, np.int64)
    pair[p2p] = pack((np.where(is_send, rank, peer), np.where(is_send, peer, rank)))
    # The seq of a P2P counts its pair alone; only collectives of one bracket need the index.
    op_in_seq = spans.op_in_seq.copy()
    op_in_seq[p2p] = 0
    key = pack((numbered(spans.group), pair, spans.seq, op_in_seq))
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = np.flatnonzero(is_first)
    return Buckets(order, first, np.diff(np.append(first, len(order))), np.cumsum(is_first) - 1)
