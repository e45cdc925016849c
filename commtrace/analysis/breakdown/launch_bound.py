"""When the device had nothing queued, and waited for its host: told by how far the host was ahead at each mark.

A mark that the device passes as soon as the host takes it (a small lead) shows that the queue was empty. Between two
such marks the device was paced by its host. A large lead shows nothing of the host where the stream has waited for
communication since the host took the mark; the time of these stalls is left out of the lead that an interval begins
with. docs/definitions.md gives the reasons for the limits.

>>> launch_bound(block.spans, block.bounds, block.end_to_end()).intervals.length  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import IntervalUnion, union
from commtrace.analysis.keys import grouped, pack
from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int64, Spans

SMALL_US: Final = 20
"""A lead is small if it exceeds the zero by less."""

MOST_ZERO_US: Final = 100
"""A larger zero is none: the queue was never seen empty. It is half of the widest reading around an anchor by which
leads are told (100 µs), and 50 µs for the record itself."""

ZERO_QUANTILE: Final = 0.01
MINUTE_NS: Final = 60_000_000_000
"""The zero is the lead that this share of a rank's marks in a minute do not exceed."""

REFILL_NS: Final = 500_000
"""Right after the queue was empty for another reason, a host needs a moment to be ahead again, and is not late."""


class LaunchBound(NamedTuple):
    """Times on one axis on which ranks lie one after the other, ns."""

    intervals: IntervalUnion  # in which the device waited for its host, whatever it did
    before_empty: IntervalUnion  # at whose end it had nothing queued: where nothing was recorded, it waited in them
    known: Int64  # all marks with a lead, ascending


class _Marks(NamedTuple):
    """Marks with a lead, by rank, then by time."""

    owner: Int64  # index of the rank
    time: Int64  # ns, on the rank's own clock
    lead_us: Int64

    @property
    def is_synchronized(self) -> Bool:
        return np.asarray(self.lead_us == schema.SYNCHRONIZED_LEAD)


def launch_bound(spans: Spans, bounds: Int64, shift: Int64) -> LaunchBound:
    """Return when the devices of some ranks waited for their hosts.

    Args:
        spans: rows of several ranks; rank i has rows ``bounds[i]`` to ``bounds[i + 1]``.
        shift: ns, of each rank: what is added to its times on the common axis.
    """
    marks = _marks(spans, bounds)
    if not len(marks.time):
        none = np.zeros(0, np.int64)
        return LaunchBound(IntervalUnion(none, none), IntervalUnion(none, none), none)
    most_us = _zeros_us(marks) + SMALL_US
    time = marks.time + shift[marks.owner]
    is_small, is_synchronized = marks.lead_us < most_us, marks.is_synchronized
    begins_small = is_synchronized | (_leads_without_stalls(spans, bounds, shift, marks, time) < most_us)
    ends_small = is_small & ~is_synchronized
    ends_empty = ends_small[1:] & (marks.owner[1:] == marks.owner[:-1])
    is_refill = _refills(marks, begins_small) & (np.diff(marks.time) <= REFILL_NS)
    # The marks around a replay show how long its launch took, and nothing of what is inside.
    ends_empty &= ~_replays(spans, bounds, shift, time)
    both, ends = (np.flatnonzero(chosen) for chosen in (ends_empty & begins_small[:-1] & ~is_refill, ends_empty))
    return LaunchBound(union(time[both], time[both + 1]), union(time[ends], time[ends + 1]), time)


def _leads_without_stalls(spans: Spans, bounds: Int64, shift: Int64, marks: _Marks, time: Int64) -> Int64:
    """Return, in µs, for how long the stream has worked from when the host took each mark until it passed the mark.

    While a stream waits for communication its host gets ahead, however late it was: that shows no queue. A lead that is
    too long to be told stays as it is.
    """
    rows = np.flatnonzero((spans.kind == schema.STALL) & (spans.lane == schema.COMPUTE))
    of_rank = shift[_owners(rows, bounds)]
    stalled = union(spans.start[rows] + of_rank, spans.end[rows] + of_rank)
    first = time[np.searchsorted(marks.owner, marks.owner)]
    taken = np.maximum(time - 1000 * np.maximum(marks.lead_us, 0), first)
    without = marks.lead_us - (stalled.before(time) - stalled.before(taken)) // 1000
    return np.where(marks.lead_us < schema.MOST_LEAD_US, without, marks.lead_us)


def _replays(spans: Spans, bounds: Int64, shift: Int64, time: Int64) -> Bool:
    """Mark the intervals between neighbouring times in which a CUDA graph is replayed."""
    rows = np.flatnonzero((spans.kind == schema.REPLAY) & (spans.lane == schema.COMPUTE))
    of_rank = shift[_owners(rows, bounds)]
    before = union(spans.start[rows] + of_rank, spans.end[rows] + of_rank).before(time)
    return np.asarray(before[1:] > before[:-1])


def _marks(spans: Spans, bounds: Int64) -> _Marks:
    # The first launch of a graph uploads it.
    is_usable = (spans.lane == schema.COMPUTE) & ~((spans.kind == schema.REPLAY) & (spans.seq == 0))
    starts = np.flatnonzero(is_usable & (spans.start_lead_us != schema.UNKNOWN_LEAD))
    ends = np.flatnonzero(is_usable & (spans.end_lead_us != schema.UNKNOWN_LEAD))
    time = np.concatenate([spans.start[starts], spans.end[ends]])
    lead = np.concatenate([spans.start_lead_us[starts], spans.end_lead_us[ends]]).astype(np.int64)
    owner = _owners(np.concatenate([starts, ends]), bounds)
    order = np.argsort(pack([owner, time, lead]), kind="stable")  # quick, as the times come in ascending runs
    return _Marks(owner[order], time[order], lead[order])


def _owners(rows: Int64, bounds: Int64) -> Int64:
    return np.searchsorted(bounds, rows, side="right") - 1


def _zeros_us(marks: _Marks) -> Int64:
    """Return the zero of each mark's rank and minute: below all leads where the queue was never seen empty."""
    minute, number = grouped(pack([marks.owner, marks.time // MINUTE_NS]))
    # Those after a synchronisation have no lead of their own.
    measured = np.flatnonzero(~marks.is_synchronized)
    order = measured[np.lexsort((marks.lead_us[measured], number[measured]))]
    count = np.bincount(number[order], minlength=len(minute))
    first = np.cumsum(count) - count
    at = first + np.maximum(np.ceil(ZERO_QUANTILE * count).astype(np.int64) - 1, 0)
    never = schema.UNKNOWN_LEAD - SMALL_US
    zero = np.full(len(minute), never, np.int64)
    filled = count > 0
    zero[filled] = marks.lead_us[order[at[filled]]]
    return np.where(zero <= MOST_ZERO_US, zero, never)[number]


def _refills(marks: _Marks, begins_small: Bool) -> Bool:
    """Mark the intervals between neighbours that begin when the queue has just run empty, or was waited for."""
    has_run_empty = np.zeros(len(marks.time), np.bool_)
    has_run_empty[1:] = ~begins_small[:-1] & (marks.owner[1:] == marks.owner[:-1])
    return np.asarray((has_run_empty | marks.is_synchronized)[:-1])
