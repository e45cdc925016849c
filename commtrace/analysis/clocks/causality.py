"""Correct fitted clocks so that no receive ends before its send starts.

Ends of collectives may always be seen later on one host, which biases the fit; point-to-point operations bound that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.fit import PiecewiseClock, least_power, multiples, rows_by_clock
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.matching.match import bucket, gather
from commtrace.analysis.matching.operations import replayed_rows
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

_OUTLIERS = 0.01
MOST_MESSAGES: Final = 400_000
"""Limit of messages between hosts that are used."""


class _Messages(NamedTuple):
    sender: Int64
    receiver: Int64
    sent: Int64
    received: Int64


def without_violations(run: Run, keys: Sequence[tuple[str, str]], clocks: list[PiecewiseClock]) -> list[PiecewiseClock]:
    """Return the clocks, moved as little as needed for receives to end after their sends start.

    One message in a hundred between two hosts may be an outlier. Between contradicting directions, the middle is taken.
    """
    messages = _messages(run, keys, clocks)
    if not len(messages.sent):
        return clocks
    shifts = _shifts(_needed(messages), len(clocks))
    return [clock.moved_up(int(shift)) for clock, shift in zip(clocks, shifts, strict=True)]


def _messages(run: Run, keys: Sequence[tuple[str, str]], clocks: Sequence[PiecewiseClock]) -> _Messages:
    clock_of_rank = _clock_of_rank(run, keys)
    rows = gather(run, _between_hosts(run, clock_of_rank))
    # Of very many some: by their numbers, and so the same ones on both sides.
    rows = rows.take(multiples(rows.spans.seq, least_power(rows.spans.seq, MOST_MESSAGES)))
    if not len(rows.rank):
        return _Messages(*(np.empty(0, np.int64) for _ in _Messages._fields))
    buckets = bucket(rows)
    pairs = buckets.first[buckets.size == 2]
    first, second = buckets.order[pairs], buckets.order[pairs + 1]
    two_sides = rows.is_send[first] != rows.is_send[second]
    first, second = first[two_sides], second[two_sides]
    send, receive = np.where(rows.is_send[first], first, second), np.where(rows.is_send[first], second, first)
    clock, step = clock_of_rank[rows.rank], rows.spans.step
    known = rows.finished[receive]
    known &= _sure(rows.spans.start[send], step[send], clock[send], clocks)
    known &= _sure(rows.spans.end[receive], step[receive], clock[receive], clocks)
    send, receive = send[known], receive[known]
    return _Messages(
        clock[send],
        clock[receive],
        _on_reference(rows.spans.start[send], step[send], clock[send], clocks),
        _on_reference(rows.spans.end[receive], step[receive], clock[receive], clocks),
    )


def _clock_of_rank(run: Run, keys: Sequence[tuple[str, str]]) -> Int64:
    number = {key: position for position, key in enumerate(keys)}
    clock_of_rank = np.full(run.world_size, -1, np.int64)
    for rank, trace in run.ranks.items():
        clock_of_rank[rank] = number[trace.clock_key]
    return clock_of_rank


def _between_hosts(run: Run, clock_of_rank: Int64) -> Callable[[Block], Bool]:
    def chosen(block: Block) -> Bool:
        spans = block.spans
        is_message = (spans.kind == schema.P2P) & ~replayed_rows(spans)
        p2p = np.flatnonzero(is_message & (spans.peer >= 0) & (spans.peer < len(clock_of_rank)))
        peer_clock = clock_of_rank[spans.peer[p2p]]
        own_clock = block.per_row(clock_of_rank[[*block.ranks]])[p2p]
        between = np.zeros(len(spans), np.bool_)
        between[p2p] = (peer_clock >= 0) & (peer_clock != own_clock)
        return between

    return chosen


def _on_reference(times: Int64, steps: Int32, clock: Int64, clocks: Sequence[PiecewiseClock]) -> Int64:
    moved = np.empty_like(times)
    for number, rows in rows_by_clock(clock):
        moved[rows] = clocks[number].to_reference(times[rows], steps[rows])
    return moved


def _sure(times: Int64, steps: Int32, clock: Int64, clocks: Sequence[PiecewiseClock]) -> Bool:
    """Return a mask of the readings whose part of a stepped clock is known."""
    sure = np.ones(len(times), np.bool_)
    for number, rows in rows_by_clock(clock):
        if clocks[number].starts:
            sure[rows] = clocks[number].is_sure(times[rows], steps[rows])
    return sure


def _needed(messages: _Messages) -> dict[tuple[int, int], int]:
    """Return by (sender, receiver) how far the receiver must move up, ns; negative is slack."""
    lateness = messages.sent - messages.received
    order = np.lexsort((lateness, messages.receiver, messages.sender))
    _, begins = sort_groups(pack((messages.sender[order], messages.receiver[order])))
    sizes = np.diff(np.append(begins, len(order)))
    most = order[begins + sizes - 1 - (_OUTLIERS * sizes).astype(np.int64)]
    pairs = zip(messages.sender[most].tolist(), messages.receiver[most].tolist(), strict=True)
    needed = dict(zip(pairs, lateness[most].tolist(), strict=True))
    for (sender, receiver), there in list(needed.items()):
        back = needed.get((receiver, sender))
        if back is not None and there + back > 0:
            needed[sender, receiver] = (there - back) // 2
            needed[receiver, sender] = -needed[sender, receiver]
    return needed


def _shifts(needed: dict[tuple[int, int], int], count: int) -> Int64:
    """Return the smallest moves of the clocks, relative to clock 0 (longest paths)."""
    shifts = np.zeros(count, np.int64)
    for _ in range(count):
        before = shifts.copy()
        for (sender, receiver), least in needed.items():
            shifts[receiver] = max(shifts[receiver], shifts[sender] + least)
        if np.array_equal(shifts, before):
            break
    return np.asarray(shifts - shifts[0])
