"""Read the compute lanes of many ranks at once: work between stalls, and the starts of communications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from commtrace.analysis.breakdown.intervals import IntervalUnion, distinct
from commtrace.analysis.keys import find_rows, pack
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import SYNCHRONISING, codes_named, timed_rows
from commtrace.analysis.replay.segments import LaneRows, Phases, Pieces, WorkSegments, find_segments, narrow
from commtrace.analysis.replay.step_bounds import StepBounds
from commtrace.trace import schema
from commtrace.trace.blocks import bounds_of
from commtrace.trace.spans import Bool, Int8, Int32, Int64

_Columns = TypeVar("_Columns", "WorkSegments", "Starts", "Waits", "Launches")


@dataclass(frozen=True, slots=True)
class Starts:
    """Starts of communications on the lanes: after ``node`` and before ``piece``, ``extra_ns`` later."""

    node: Int32
    piece: Int32
    extra_ns: Int64
    end: Int64  # of the communication

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class Launches:
    """Communications that start on the lanes, in the order of :class:`Starts`, with columns of their rows."""

    rank: Int32
    row: Int32
    step: Int32  # index into the steps of the program
    bucket: Int32  # number of the communication in the run; −1 if unknown
    complete: Bool  # can be compared with the other participants
    last_start: Int64  # arrival of the last participant, as matched
    ready_exact: Bool  # no participant's start is a bound
    kind: Int8
    name: Int32
    peer: Int32
    op_in_seq: Int32
    bytes: Int64
    id: Int64
    start: Int64
    end: Int64
    end_exact: Bool

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Waits:
    """Stalls, and communications that a lane waited for without a stall."""

    rank: Int32
    row: Int32
    step: Int32  # index into the steps of the program
    node: Int32  # the wait's end on the lane
    launch: Int32  # index of the launch waited for, of the same rank and step; −1 if unknown
    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Programs of some ranks over all their steps.

    The *nodes* of a lane are, per step: its start, the end of each stall, its end. Between two nodes lie the pieces
    from ``node_piece`` of the first to ``node_piece`` of the second.
    """

    node_piece: Int32
    first_node: Int64  # start of each step, shape (ranks, steps)
    last_node: Int64  # end of each step, shape (ranks, steps)
    step_start: Int64
    step_end: Int64
    between_ns: Int64  # before each of them, in the recorded step
    piece_ns: Int64
    piece_segment: Int32  # index of the segment of each piece
    segments: WorkSegments
    starts: Starts
    waits: Waits


class ReadLanes(NamedTuple):
    """Lanes, and the launches, which are needed only until communications are joined."""

    lanes: Lanes
    launches: Launches


def read_lanes(rows: LaneRows, matches: Matches, stages: Int64, bounds: StepBounds) -> ReadLanes:
    """Return the programs of some ranks in the steps of ``bounds``; ``stages`` is by rank."""
    steps, step_start, step_end = bounds.steps, bounds.start, bounds.end
    along = rows.shift[:, None]
    intervals = IntervalUnion((step_start + along).reshape(-1), (step_end + along).reshape(-1))
    stall_rows, stalls = _stalls(rows, intervals)
    phases = Phases.of(rows, intervals)
    begins = _begins(rows, steps, intervals)

    cuts = distinct(np.concatenate([*intervals.bounds, *stalls.bounds, *phases.intervals.bounds, begins.time]))
    recorded = stalls.start[rows.spans.kind[stall_rows] == schema.STALL]
    pieces = Pieces.cut(cuts, intervals, stalls, recorded, phases.intervals)
    segments, piece_segment = find_segments(rows, stages, len(steps), pieces, intervals, recorded, phases)

    # Stalls stand in their order; each step has a node more before them and one behind.
    interval_of_stall = intervals.holding(stalls.start)
    stalls_before = np.searchsorted(interval_of_stall, np.arange(len(intervals) + 1))
    first_node = stalls_before[:-1] + 2 * np.arange(len(intervals))
    last_node = stalls_before[1:] + 2 * np.arange(len(intervals)) + 1
    stall_node = np.arange(len(stalls)) + 2 * interval_of_stall + 1
    node_time = np.empty(len(stalls) + 2 * len(intervals), np.int64)
    node_time[first_node], node_time[stall_node], node_time[last_node] = intervals.start, stalls.start, intervals.end

    shape = (len(rows.ranks), len(steps))
    places = _Places(rows, begins, stalls, stall_rows, stalls_before, first_node)
    launches = places.launches(matches)
    lanes = Lanes(
        node_piece=narrow(np.searchsorted(pieces.start, node_time, side="left")),
        first_node=first_node.reshape(shape),
        last_node=last_node.reshape(shape),
        step_start=step_start,
        step_end=step_end,
        between_ns=bounds.between_ns,
        piece_ns=pieces.end - pieces.start,
        piece_segment=narrow(piece_segment),
        segments=segments,
        starts=places.starts(pieces.start, launches.end),
        waits=_waits(rows, stall_rows, interval_of_stall, len(steps), stall_node, begins),
    )
    return ReadLanes(lanes, launches)


def concatenate_lanes(parts: Sequence[ReadLanes]) -> ReadLanes:
    """Concatenate the lanes of several parts of a run."""
    lanes, launches = [part.lanes for part in parts], [part.launches for part in parts]
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in lanes])
        for field in fields(Lanes)
        if field.name not in ("segments", "starts", "waits")
    }
    whole = Lanes(
        segments=_concatenated(WorkSegments, [part.segments for part in lanes]),
        starts=_concatenated(Starts, [part.starts for part in lanes]),
        waits=_concatenated(Waits, [part.waits for part in lanes]),
        **columns,
    )
    _number(whole, lanes)
    return ReadLanes(whole, _concatenated(Launches, launches))


def _number(whole: Lanes, parts: Sequence[Lanes]) -> None:
    """Make the numbers in the concatenated columns of all parts those of the whole, in place."""
    nodes, pieces, segments, starts, waits, ranks = (
        bounds_of([len(column) for column in columns])
        for columns in zip(
            *(
                (part.node_piece, part.piece_ns, part.segments, part.starts, part.waits, part.first_node)
                for part in parts
            ),
            strict=True,
        )
    )
    numbers: Sequence[tuple[Int32 | Int64, Int64, Int64]] = (
        (whole.node_piece, nodes, pieces),
        (whole.first_node, ranks, nodes),
        (whole.last_node, ranks, nodes),
        (whole.piece_segment, pieces, segments),
        (whole.starts.node, starts, nodes),
        (whole.starts.piece, starts, pieces),
        (whole.waits.node, waits, nodes),
        (whole.waits.launch, waits, starts),
    )
    for column, bounds, before in numbers:
        for (first, end), number in zip(pairwise(bounds.tolist()), before[:-1].tolist(), strict=True):
            number_of = column[first:end]
            np.add(number_of, number, out=number_of, where=number_of >= 0)  # −1 stays: a wait without its launch


def _concatenated(kind: type[_Columns], parts: Sequence[_Columns]) -> _Columns:
    return kind(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(kind)))


def _stalls(rows: LaneRows, steps: IntervalUnion) -> tuple[Int64, IntervalUnion]:
    """Return the rows and times of the stalls in the steps, in order; of stalls that overlap, only the first."""
    spans = rows.spans
    stalls = np.flatnonzero(spans.kind == schema.STALL)
    stalls = stalls[steps.holding(rows.start(stalls)) >= 0]
    # A communication that took no time has no stall, but the lane would have waited had others been later.
    instants = _instants(rows, steps, stalls)
    chosen = np.sort(np.concatenate([stalls, instants])) if len(instants) else stalls
    start, end = rows.start(chosen), rows.end(chosen)
    if (np.diff(start) <= 0).any():
        order = np.lexsort((end, start))
        chosen, start, end = chosen[order], start[order], end[order]
    if len(chosen):
        apart = np.append(True, start[1:] >= np.maximum.accumulate(end)[:-1])
        chosen, start, end = chosen[apart], start[apart], end[apart]
    return chosen, IntervalUnion(start, end)


def _instants(rows: LaneRows, steps: IntervalUnion, stalls: Int64) -> Int64:
    """Return rows of finished communications without a length on which no stall was recorded."""
    spans = rows.spans
    calls = np.flatnonzero(timed_rows(spans) & (spans.start == spans.end))
    calls = calls[steps.holding(rows.start(calls)) >= 0]
    calls = calls[codes_named(rows.run, spans.name[calls], (*SYNCHRONISING, "recv"))]
    if not len(calls):
        return calls
    known = pack(
        [
            np.concatenate([rows.of_row[calls], rows.of_row[stalls]]),
            np.concatenate([spans.id[calls], spans.stalled_on[stalls]]),
        ]
    )
    stalled = np.isin(known[: len(calls)], known[len(calls) :])
    return np.asarray(calls[~stalled & ~np.isin(calls, rows.unfinished())])


class _Begins(NamedTuple):
    """Communications that start in the steps; ``interval`` is the index of the step of a rank."""

    row: Int64
    step: Int64
    interval: Int64
    time: Int64


def _begins(rows: LaneRows, numbers: Int64, intervals: IntervalUnion) -> _Begins:
    """Return the communications of the steps with these numbers."""
    # The recorded step counts: an operation may start at the very instant at which its step ends.
    row = np.flatnonzero(timed_rows(rows.spans))
    number = rows.spans.step[row]
    step = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
    wanted = numbers[step] == number
    row, step = row[wanted], step[wanted]
    rank = rows.of_row[row]
    interval = rank * len(numbers) + step
    time = rows.spans.start[row] + rows.shift[rank]
    np.clip(time, intervals.start[interval], intervals.end[interval], out=time)
    return _Begins(row, step, interval, time)


def _waits(rows: LaneRows, waiting: Int64, interval: Int64, num_steps: int, node: Int64, begins: _Begins) -> Waits:
    spans, index = rows.spans, rows.of_row.take(waiting)
    # Rows that are communications themselves stand for a wait without a length.
    begun_ids = spans.id[begins.row]
    waited_for = np.where(spans.kind[waiting] == schema.STALL, spans.stalled_on[waiting], spans.id[waiting])
    return Waits(
        rank=narrow(rows.ranks).take(index),
        row=narrow(waiting - rows.first.take(index)),
        step=narrow(interval % num_steps),
        node=narrow(node),
        launch=narrow(np.where(waited_for >= 0, find_rows((begins.interval, begun_ids), (interval, waited_for)), -1)),
        start=spans.start[waiting],
        end=spans.end[waiting],
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Locates the starts of communications on their lanes."""

    rows: LaneRows
    begins: _Begins
    stalls: IntervalUnion
    stall_row: Int64
    stalls_before: Int64  # of each interval
    first_node: Int64  # of each interval

    def starts(self, piece_start: Int64, end: Int64) -> Starts:
        """Return the starts of the communications on the lanes."""
        # A stall begins a little before the device starts its operation, which starts a fixed time later.
        begun = np.searchsorted(self.stalls.start, self.begins.time, side="left") + self._instants_before()
        # One that starts as its step ends is not behind the waits that lie at that instant in the next step.
        interval = self.begins.interval
        begun = np.clip(begun, self.stalls_before[interval], self.stalls_before[interval + 1])
        in_step = begun - self.stalls_before[interval]
        stalled = np.zeros(len(self.begins.time), np.bool_)
        anchor = self.begins.time
        if len(self.stalls):
            newest = np.maximum(begun - 1, 0)
            stalled = (in_step > 0) & (self.begins.time < self.stalls.end[newest])
            anchor = np.where(stalled, self.stalls.start[newest], self.begins.time)
        return Starts(
            node=narrow(self.first_node[interval] + in_step - stalled),
            piece=narrow(np.searchsorted(piece_start, anchor, side="left")),
            extra_ns=self.begins.time - anchor,
            end=end,
        )

    def launches(self, matches: Matches) -> Launches:
        rows, spans = self.rows, self.rows.spans
        bounds = np.searchsorted(self.begins.row, rows.first)
        bucket, complete, last_start, ready_exact = self._matched(matches, bounds)
        return Launches(
            rank=np.repeat(narrow(rows.ranks), np.diff(bounds)),
            row=narrow(self.begins.row - np.repeat(rows.first[:-1], np.diff(bounds))),
            step=narrow(self.begins.step),
            bucket=bucket,
            complete=complete,
            last_start=last_start,
            ready_exact=ready_exact,
            **{name: getattr(spans, name)[self.begins.row] for name in _OF_ROW},
        )

    def _matched(self, matches: Matches, bounds: Int64) -> tuple[Int32, Bool, Int64, Bool]:
        matched = [
            (matches.ranks[rank], self.begins.row[begin:end] - first)
            for rank, first, begin, end in zip(
                self.rows.ranks.tolist(), self.rows.first[:-1], bounds[:-1], bounds[1:], strict=True
            )
        ]
        return (
            np.concatenate([match.bucket[rows] for match, rows in matched]),
            np.concatenate([match.complete[rows] for match, rows in matched]),
            np.concatenate([match.last_start[rows] for match, rows in matched]),
            np.concatenate([match.ready_exact[rows] for match, rows in matched]),
        )

    def _instants_before(self) -> Int64 | int:
        """Return the number of waits without a length at the instant of each start, before it in the order of rows."""
        instant = self.stalls.end == self.stalls.start
        moments = np.unique(self.stalls.start[instant])
        if not len(moments):
            return 0
        stride = int(max(self.begins.row.max(initial=0), self.stall_row.max(initial=0))) + 1
        waits = np.sort(np.searchsorted(moments, self.stalls.start[instant]) * stride + self.stall_row[instant])
        moment = np.minimum(np.searchsorted(moments, self.begins.time), len(moments) - 1)
        count = np.searchsorted(waits, moment * stride + self.begins.row) - np.searchsorted(waits, moment * stride)
        return np.where(moments[moment] == self.begins.time, count, 0)


_OF_ROW = ("kind", "name", "peer", "op_in_seq", "bytes", "id", "start", "end", "end_exact")
