"""Place communication on the device's timeline: when each operation started and ended, and whether that is exact.

Marks say when a stream reached an operation's launch and the wait for it. NCCL runs the operations of a communicator
one after another, in the order of their launches, on whichever streams they were launched. So:

* An operation ended at the mark behind its wait if the stream stalled there; else then or earlier, and before any that
  was launched later.
* It started at its launch, or when the operation right before it ended if that came later. The start is exact if that
  end is, or if it came before the launch; else the operation started then or later. It did, too, if the stream was
  there before the host had handed the operation on.
* A duration that was measured on the communicator's own stream gives the start where the end is known, and the end
  where the start is.

An operation may come in a later pass than one that was launched after it, because it was waited for later:
:class:`Placement` remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int8, Int64

SHORTEST_STALL_NS: Final = 10_000
"""A stream that got no further than this while it waited did not wait: the two marks alone take microseconds."""

HOST_BOUND_NS: Final = 100_000
"""A stream that passes a mark within this time after the host took it may have waited for the host."""

SOON_NS: Final = 20_000
"""A stream without work passes the mark at a launch at once, and the kernel comes when the host has handed it on. A
start that is called exact may be so much earlier than its kernel."""

MOST_REMEMBERED: Final = 64
"""Launches of a communicator that are remembered behind one that has not come yet."""

MOST_REMEMBERED_IN_ALL: Final = 4_096
"""Launches that are remembered of all communicators: of those that are gone, nobody tells."""

UNMEASURED: Final = -1

_NEVER: Final = np.iinfo(np.int64).max

_Columns = TypeVar("_Columns", bound="Columns")


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of equal length."""

    def take(self: _Columns, rows: npt.NDArray[Any] | slice) -> _Columns:
        """Select rows by a mask, by indices (in that order) or by a slice (without copying)."""
        if not isinstance(rows, slice) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)  # once instead of once for each column
        return type(self)(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def concatenate(cls: type[_Columns], parts: Sequence[_Columns]) -> _Columns:
        """Return all parts' rows, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))


@dataclass(frozen=True, slots=True)
class DeviceOperations(Columns):
    """Operations of an accelerator's tensors, whose marks the device has passed. Times are ns."""

    id: Int64  # unique in the process, grows with launches
    batch: Int64  # id of the first member of its coalescing bracket; else its own
    queue: Int64  # 2k: on the own stream of communicator k; 2k + 1: on streams of the job
    position: Int64  # of the launch on its communicator, on whichever stream; from 0
    launch: Int64  # the stream reached the launch
    waited_from: Int64  # the stream reached the wait for it; the launch if it ran on that stream
    end: Int64  # the stream got past the wait
    waited_taken_at: Int64  # the host took the mark of `waited_from`; 0 without a mark, or if that is the host's time
    end_taken_at: Int64  # the host took the mark of `end`; 0 if a mark is the host's time
    handed_on: Int64  # the host had passed it to the backend; 0 where that is not known
    duration: Int64  # as measured by the backend; UNMEASURED where it was not

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True, slots=True)
class PlacedTimes(Columns):
    """The times of operations, ns."""

    start: Int64
    end: Int64
    start_exact: Bool  # False: it started then or later
    end_exact: Bool  # False: it ended then or earlier
    timing: Int8  # the source of the end: a code of schema.TIMINGS, UNKNOWN_TIMING for an upper bound
    measured_end: Int64  # what start and duration say of the end; UNMEASURED where they say nothing


_NO_TIMES: Final = np.empty(0, np.int64)
_NO_CALLS: Final = DeviceOperations(*(_NO_TIMES for _ in fields(DeviceOperations)))
_NOTHING: Final = PlacedTimes(*(_NO_TIMES.astype(dtype) for dtype in ("q", "q", "?", "?", "b", "q")))


class Placement:
    """Place the operations of each pass of the harvester, by those of earlier passes too."""

    def __init__(self) -> None:
        self._remembered = _Launches.of(_NO_CALLS)

    def place(self, calls: DeviceOperations) -> PlacedTimes:
        """Return when operations of any queues started and ended, in the order of ``calls``."""
        if not len(calls):
            return _NOTHING
        remembered = self._remembered
        rows = _Launches.concatenate([remembered, _Launches.of(calls)])
        order = np.lexsort((rows.batch, rows.queue >> 1))  # Stable: of a bracket, those that are remembered come first.
        launches, launch_of_row = _joined(rows.take(order))
        launches, measured_end = _placed(launches)
        self._remembered = _worth_remembering(launches)

        launch = np.empty(len(order), np.int64)
        launch[order] = launch_of_row
        launch = launch[len(remembered.batch) :]
        return PlacedTimes(
            launches.start[launch],
            launches.end[launch],
            launches.start_exact[launch],
            launches.end_exact[launch],
            launches.timing[launch],
            measured_end[launch],
        )


@dataclass(frozen=True, slots=True)
class _Launches(Columns):
    """What a communicator launched as one, an operation or a bracket; ``start`` is the launch before it is placed."""

    batch: Int64
    queue: Int64
    first: Int64  # positions
    last: Int64
    start: Int64
    not_before: Int64  # nothing behind it on the communicator started earlier
    end: Int64
    start_exact: Bool
    end_exact: Bool
    timing: Int8
    handed_on: Int64
    duration: Int64
    is_placed: Bool

    @classmethod
    def of(cls, calls: DeviceOperations) -> _Launches:
        end = np.maximum(calls.launch, calls.end)
        timing = np.where(calls.end_taken_at == 0, schema.HOST_TIMING, schema.CUDA_EVENT_TIMING).astype(np.int8)
        # On a stream of the job, a duration counts from the launch, and not from when the operation before has ended.
        # Where the host was late, it is not known when the operation began.
        is_late = calls.handed_on - calls.launch > SOON_NS
        duration = np.where((calls.queue & 1 == 1) | is_late, UNMEASURED, calls.duration)
        no = np.zeros(len(end), np.bool_)
        return cls(
            calls.batch, calls.queue, calls.position, calls.position, calls.launch, calls.launch, end, no,
            _ended_at_the_mark(calls, end), timing, calls.handed_on, duration, no,
        )  # fmt: skip


def _ended_at_the_mark(calls: DeviceOperations, end: Int64) -> Bool:
    """Mark the operations that ended at ``end``, as the stream waited for them or they were short."""
    waited_ns = end - calls.waited_from
    # A stream without work passes the mark behind the wait when the host has taken it: it waited for the host.
    has_marks = (calls.waited_taken_at > 0) & (calls.end_taken_at > 0)
    is_host_late = has_marks & (end - calls.end_taken_at < HOST_BOUND_NS)
    is_host_late &= waited_ns < calls.end_taken_at - calls.waited_taken_at + SHORTEST_STALL_NS
    is_short = end - calls.launch < SHORTEST_STALL_NS
    return is_short | ((waited_ns >= SHORTEST_STALL_NS) & ~is_host_late)


def _joined(rows: _Launches) -> tuple[_Launches, Int64]:
    """Join the members of brackets; return the launches, and the position of each row's."""
    begins = _begins(rows.batch) | _begins(rows.queue >> 1)
    launch_of_row = np.cumsum(begins) - 1
    if begins.all():
        return rows, launch_of_row
    at = np.flatnonzero(begins)
    launches = rows.take(at)
    # A member that comes late shares what has been written of the others.
    end = np.where(launches.is_placed, launches.end, np.minimum.reduceat(rows.end, at))
    ends_exactly = rows.end_exact & (rows.end == end[launch_of_row])
    return replace(
        launches,
        first=np.minimum.reduceat(rows.first, at),
        last=np.maximum.reduceat(rows.last, at),
        end=end,
        end_exact=np.where(launches.is_placed, launches.end_exact, np.logical_or.reduceat(ends_exactly, at)),
        handed_on=np.maximum.reduceat(rows.handed_on, at),
        duration=np.maximum.reduceat(rows.duration, at),
    ), launch_of_row


class _Order(NamedTuple):
    """How launches follow one another, in the order of communicators and launches."""

    communicator: Int64  # counted from 0
    follows: Bool  # the launch right before this one on its communicator is the row before

    @classmethod
    def of(cls, launches: _Launches) -> _Order:
        begins = _begins(launches.queue >> 1)
        follows = ~begins
        follows[1:] &= launches.first[1:] == launches.last[:-1] + 1
        return cls(np.cumsum(begins) - 1, follows)


def _placed(launches: _Launches) -> tuple[_Launches, Int64]:
    """Return the launches with their times, and the ends that durations say."""
    order = _Order.of(launches)
    new = ~launches.is_placed
    marked_end = launches.end
    # What was launched later ended later. Two cannot have ended at one mark: only the later one did.
    later_end = _earliest_behind(marked_end, order)
    end = np.where(new, np.minimum(marked_end, later_end), marked_end)
    end_exact = launches.end_exact & (~new | (marked_end < later_end))
    timing = np.where(end_exact | ~new, launches.timing, schema.UNKNOWN_TIMING).astype(np.int8)
    launch = np.minimum(launches.start, end)
    was_idle = order.follows & (_shifted(end, 1, _NEVER, order.communicator) <= launch)

    launches = replace(launches, start=launch, end=end, end_exact=end_exact, timing=timing)
    measured_end = np.full(len(end), UNMEASURED, np.int64)
    has_durations = bool((new & (launches.duration >= 0)).any())
    was_idle &= launches.handed_on - launch <= SOON_NS
    if has_durations:
        launches, measured_end = _with_measured_ends(launches, order, was_idle)
        end, end_exact = launches.end, launches.end_exact
        end = np.where(new & ~end_exact, np.minimum(end, _earliest_behind(end, order)), end)
        launches = replace(launches, end=end)

    end_before = _shifted(np.where(end_exact, end, 0), 1, 0, order.communicator)
    not_before = np.where(new, launch, launches.not_before)
    not_before = _running(np.maximum, np.maximum(not_before, end_before), order.communicator)
    start = np.minimum(not_before, end)
    start_exact = was_idle | (order.follows & _shifted(end_exact, 1, False, order.communicator))
    start_exact &= launches.handed_on - start <= SOON_NS
    if has_durations:
        start, start_exact = _with_measured_starts(launches, order, start, start_exact)
    return replace(
        launches,
        start=np.where(new, start, launches.start),
        not_before=not_before,
        start_exact=np.where(new, start_exact, launches.start_exact),
        is_placed=np.ones(len(end), np.bool_),
    ), measured_end


def _earliest_behind(ends: Int64, order: _Order) -> Int64:
    """Return, for each launch, the earliest end of those behind it on its communicator."""
    communicator = order.communicator
    return _shifted(_running(np.minimum, ends[::-1], communicator[::-1])[::-1], -1, _NEVER, communicator)


def _with_measured_ends(launches: _Launches, order: _Order, was_idle: Bool) -> tuple[_Launches, Int64]:
    """Return the launches with ends that durations give, and all that they say, also where that is refused.

    A duration counts from when the communicator's own stream reached the operation: from its launch, or from the end of
    the one before it on that stream.
    """
    rows = np.flatnonzero((launches.queue & 1) == 0)
    on_communicator = launches.take(rows)
    known, launch, new = on_communicator.end_exact, on_communicator.start, ~on_communicator.is_placed
    gaps = np.cumsum(~order.follows)[rows]  # rows without one between them are all there is
    follows = np.zeros(len(rows), np.bool_)
    follows[1:] = gaps[1:] == gaps[:-1]
    follows_idle = was_idle[rows]
    follows_idle[1:] |= follows[1:] & (on_communicator.end[:-1] <= launch[1:])

    # A chain begins with a known end. The end of each that goes on is max(launch, end before) + duration, which is
    # the largest of all launches so far plus the durations since.
    is_measured = new & (on_communicator.duration >= 0)
    begins = known | follows_idle | ~(is_measured & follows)
    chain = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)[chain]
    is_first_known = known | (follows_idle & is_measured)
    first_end = np.where(known, on_communicator.end, launch + on_communicator.duration)
    elapsed = np.cumsum(np.where(begins, 0, on_communicator.duration))
    elapsed -= elapsed[first]
    since = np.where(begins, first_end, launch - (elapsed - on_communicator.duration))
    chained_end = elapsed + _running(np.maximum, since, chain)
    # One that would end behind its upper bound is refused: behind it, nothing is known.
    is_chained = is_first_known[first] & ~known
    refused = np.cumsum(is_chained & (chained_end > on_communicator.end + SHORTEST_STALL_NS))
    accepted = is_chained & (refused == np.where(first > 0, refused[first - 1], 0))

    end, known = np.where(accepted, chained_end, on_communicator.end), known | accepted
    end_before = np.where(follows, np.roll(end, 1), 0)
    is_start_known = follows_idle | (follows & np.roll(known, 1))
    reached = np.maximum(launch, np.where(follows_idle, 0, end_before))
    measured_end = np.full(len(order.follows), UNMEASURED, np.int64)
    measured_end[rows] = np.where(is_measured & is_start_known, reached + on_communicator.duration, UNMEASURED)

    all_ends, all_known, timing = launches.end.copy(), launches.end_exact.copy(), launches.timing.copy()
    all_ends[rows], all_known[rows] = end, known
    timing[rows[accepted]] = schema.NCCL_TIMING
    return replace(launches, end=all_ends, end_exact=all_known, timing=timing), measured_end


def _with_measured_starts(launches: _Launches, order: _Order, start: Int64, start_exact: Bool) -> tuple[Int64, Bool]:
    """Return starts, and whether they are exact, by the durations of operations with a known end."""
    is_measured = launches.end_exact & (launches.duration >= 0)
    measured = np.where(is_measured, launches.end - launches.duration, 0)
    # The communicator's own stream may have been there, and waited, while an operation ran on another stream.
    was_free = _shifted(launches.queue, 1, UNMEASURED, order.communicator) == launches.queue
    was_free |= _shifted(launches.end, 1, _NEVER, order.communicator) <= measured
    start_exact = start_exact | (is_measured & order.follows & was_free)
    return np.minimum(np.maximum(start, measured), launches.end), start_exact


def _worth_remembering(launches: _Launches) -> _Launches:
    """Return the latest launch of each queue before the first gap, and all behind it: what fills the gap is to come."""
    order = _Order.of(launches)
    communicator, rows = order.communicator, np.arange(len(order.follows))
    begins = np.flatnonzero(_begins(communicator))
    gaps = np.cumsum(~order.follows)
    is_settled = (gaps == gaps[begins][communicator]) & (launches.first[begins] == 0)[communicator]
    settled = np.flatnonzero(is_settled)
    latest = np.full(2 * len(begins), -1)
    latest[2 * communicator[settled] + (launches.queue[settled] & 1)] = settled  # The last one of each stays.
    ends = np.append(begins[1:], len(rows))
    waiting = ends - begins - np.bincount(communicator[settled], minlength=len(begins))
    gives_up = waiting > MOST_REMEMBERED

    keeps = ~is_settled & (ends[communicator] - rows <= MOST_REMEMBERED)
    keeps[latest[(latest >= 0) & ~np.repeat(gives_up, 2)]] = True
    kept = np.flatnonzero(keeps)
    if len(kept) > MOST_REMEMBERED_IN_ALL:
        kept = np.sort(kept[np.argsort(launches.batch[kept])[-MOST_REMEMBERED_IN_ALL:]])
    # What is left out before them has come or is given up: those that are kept follow one another.
    communicator, is_settled = communicator[kept], is_settled[kept]
    begins_again = _begins(communicator)
    before = np.where(begins_again, 0, np.roll(launches.last[kept], 1) + 1)
    is_complete = is_settled | (begins_again & gives_up[communicator])
    return replace(launches.take(kept), first=np.where(is_complete, before, launches.first[kept]))


def _begins(segment: Int64) -> Bool:
    begins = np.ones(len(segment), np.bool_)
    begins[1:] = segment[1:] != segment[:-1]
    return begins


def _running(extreme: np.ufunc, values: Int64, segment: Int64) -> Int64:
    """Return the largest (or smallest) value so far in each segment."""
    # Lifted so far apart that none reaches into another. What is remembered of weeks ago is brought nearer, so that the
    # sums fit: it is older than anything that is placed now.
    most = int(values.max())
    span_ns = min(most - int(values.min()), _NEVER // (int(segment.max()) + 2))
    lift = segment * (span_ns + 1)
    lift += span_ns - most
    lifted = np.maximum(values, most - span_ns) + lift
    return np.asarray(extreme.accumulate(lifted) - lift)


def _shifted(values: npt.NDArray[Any], by: int, missing: Any, segment: Int64) -> npt.NDArray[Any]:
    """Return the value of the row before (``by`` 1) or behind (−1) in the same segment."""
    shifted = np.full(len(values), missing, values.dtype)
    same = segment[1:] == segment[:-1]
    if by > 0:
        shifted[1:][same] = values[:-1][same]
    else:
        shifted[:-1][same] = values[1:][same]
    return shifted
