"""One rank's program, read from its compute lane: stretches of work between stalls, and where communications start.

What the lane did while it was not stalled is cut into *pieces* at every boundary that matters to a replay. Pieces
between the same two stalls of the same phase belong to one *segment*: the unit whose duration is compared between
peers and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.intervals import distinct
from commtrace.analysis.operations import SYNCHRONISING, communication_rows, named, unfinished_rows
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans

FORWARD: Final = 1
BACKWARD: Final = 2
OPTIMIZER: Final = 3
BETWEEN: Final = 8
"""Kinds from here on are stretches between phases: ``BETWEEN + 4 · kind before + kind after`` (0: the step's edge)."""

_KIND_OF_SPAN: Final = {schema.FORWARD: FORWARD, schema.BACKWARD: BACKWARD, schema.OPTIMIZER: OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Segments:
    """The compute lane between two stalls, within one phase or between two phases. Columns of equal length.

    Attributes:
        step: index into the steps of the program.
        kind: FORWARD, BACKWARD, OPTIMIZER, or BETWEEN and above.
        instance: number of the phase on its rank: segments of one forward share it.
        stalls: stalls in that instance; ``ordinal`` of them came before the segment.
        work_ns, data_ns, gc_ns, pause_ns: what the time went to; ``pause`` is checkpointing and evaluation.
    """

    rank: Int64
    step: Int64
    stage: Int64
    chunk: Int64
    microbatch: Int64
    kind: Int64
    instance: Int64
    stalls: Int64
    ordinal: Int64
    work_ns: Int64
    data_ns: Int64
    gc_ns: Int64
    pause_ns: Int64

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def total_ns(self) -> Int64:
        return self.work_ns + self.data_ns + self.gc_ns + self.pause_ns


@dataclass(frozen=True, slots=True)
class Launches:
    """Where a rank starts each of its communications: before piece ``piece`` and after ``node``, ``extra_ns`` later."""

    row: Int64
    step: Int64
    node: Int64
    piece: Int64
    extra_ns: Int64


@dataclass(frozen=True, slots=True)
class Lane:
    """The program of one rank over all its steps.

    The *nodes* of the lane are, per step and in this order: its start, the end of each stall, its end. Between two
    nodes lie the pieces from ``node_piece`` of the first to ``node_piece`` of the second.

    Attributes:
        node_step: index of the step of each node.
        node_piece: pieces that lie before the node.
        node_row: row of the stall that the node ends, or of a communication that the lane waited for without standing
            still; −1 for start and end of a step.
        step_start, step_end: of each step, ns; −1 where the rank did not record it.
        piece_ns: duration of each piece.
        piece_segment: the segment that it belongs to.
    """

    node_step: Int64
    node_piece: Int64
    node_row: Int64
    step_start: Int64
    step_end: Int64
    piece_ns: Int64
    piece_segment: Int64
    segments: Segments
    launches: Launches


def read_lane(run: Run, trace: RankTrace, stage: int, steps: Int64) -> Lane:
    """The program of a rank of a run in the given steps."""
    spans = trace.spans
    step_start, step_end = _steps(spans, steps)
    recorded = step_start >= 0
    intervals = _Intervals(step_start[recorded], step_end[recorded])
    index_of = np.flatnonzero(recorded)

    stall_rows = _waits(run, trace, intervals)
    stalls = _Intervals(spans.start[stall_rows], spans.end[stall_rows])
    phases = _phases(spans, intervals)
    launch_rows, launch_step, launch = _launch_times(spans, steps[index_of], intervals)

    cuts = distinct(np.concatenate([*intervals.bounds, *stalls.bounds, *phases.intervals.bounds, launch]))
    starts, ends = cuts[:-1], cuts[1:]
    step_of = intervals.holding(starts)
    works = (step_of >= 0) & (stalls.holding(starts) < 0)
    starts, ends, step_of = starts[works], ends[works], step_of[works]

    recorded_stalls = stalls.start[spans.kind[stall_rows] == schema.STALL]
    segments, piece_segment = _segments(
        spans, trace.rank, stage, starts, ends, step_of, intervals, recorded_stalls, phases
    )
    node_step, node_time, node_row = _nodes(intervals, stalls, stall_rows)
    node_piece = np.searchsorted(starts, node_time, side="left")
    launches = _launches(launch_rows, launch_step, launch, intervals, stalls, stall_rows, starts, node_row)
    return Lane(
        node_step=index_of[node_step],
        node_piece=node_piece,
        node_row=node_row,
        step_start=step_start,
        step_end=step_end,
        piece_ns=ends - starts,
        piece_segment=piece_segment,
        segments=_with_steps(segments, index_of),
        launches=Launches(launches.row, index_of[launches.step], launches.node, launches.piece, launches.extra_ns),
    )


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Disjoint half-open intervals, ascending."""

    start: Int64
    end: Int64

    @property
    def bounds(self) -> tuple[Int64, Int64]:
        return self.start, self.end

    def holding(self, times: Int64) -> Int64:
        """Index of the interval that holds each instant; −1 where none does."""
        index = np.searchsorted(self.start, times, side="right") - 1
        if not len(self.start):
            return index
        return np.where((index >= 0) & (times < self.end[index]), index, -1)

    def covered_before(self, times: Int64) -> Int64:
        """How much of the time before each instant is covered."""
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        begun = np.searchsorted(self.start, times, side="right")
        if not len(self.start):
            return total[begun]
        last = np.maximum(begun - 1, 0)
        return np.asarray(total[begun] - np.where(begun > 0, np.maximum(self.end[last] - times, 0), 0))

    @classmethod
    def union(cls, start: Int64, end: Int64) -> _Intervals:
        """The instants that lie in any of these intervals."""
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        opens = np.concatenate([[True], start[1:] > reach[:-1]])
        closes = np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(start) - 1]])
        return cls(start[opens], reach[closes])


@dataclass(frozen=True, slots=True)
class _Phases:
    intervals: _Intervals
    row: Int64
    kind: Int64


def _steps(spans: Spans, steps: Int64) -> tuple[Int64, Int64]:
    """Start and end of each wanted step; −1 where the rank has none."""
    rows = np.flatnonzero(spans.kind == schema.STEP)
    start, end = np.full(len(steps), -1, np.int64), np.full(len(steps), -1, np.int64)
    index = np.searchsorted(steps, spans.step[rows])
    wanted = steps[np.minimum(index, len(steps) - 1)] == spans.step[rows]
    start[index[wanted]], end[index[wanted]] = spans.start[rows[wanted]], spans.end[rows[wanted]]
    return start, end


def _waits(run: Run, trace: RankTrace, steps: _Intervals) -> Int64:
    """Rows of the stalls in the steps, in order; of stalls that overlap only the first is kept.

    A communication that took no time has no stall, and yet the lane needed it to go on, and would have had to wait
    had others been later: its own row stands for that wait.
    """
    spans = trace.spans
    stalls = (spans.kind == schema.STALL) & (steps.holding(spans.start) >= 0)
    instant = communication_rows(spans) & (spans.start == spans.end) & (steps.holding(spans.start) >= 0)
    instant &= named(run, spans, (*SYNCHRONISING, "recv")) & ~np.isin(spans.id, spans.stalled_on[stalls])
    rows = np.flatnonzero(stalls | (instant & ~unfinished_rows(trace)))
    rows = rows[np.lexsort((rows, spans.end[rows], spans.start[rows]))]
    if not len(rows):
        return rows
    reach = np.maximum.accumulate(spans.end[rows])
    return np.asarray(rows[np.concatenate([[True], spans.start[rows[1:]] >= reach[:-1]])])


def _phases(spans: Spans, steps: _Intervals) -> _Phases:
    """Forward, backward and optimizer rows in the steps, in order; what is nested in another one is left out."""
    kinds = np.zeros(len(schema.KINDS), np.int64)
    kinds[list(_KIND_OF_SPAN)] = list(_KIND_OF_SPAN.values())
    rows = np.flatnonzero((kinds[spans.kind] > 0) & (spans.lane == schema.COMPUTE) & (steps.holding(spans.start) >= 0))
    if len(rows):
        reach = np.maximum.accumulate(spans.end[rows])
        rows = rows[np.concatenate([[True], spans.start[rows[1:]] >= reach[:-1]])]
    return _Phases(_Intervals(spans.start[rows], spans.end[rows]), rows, kinds[spans.kind[rows]])


def _segments(
    spans: Spans,
    rank: int,
    stage: int,
    starts: Int64,
    ends: Int64,
    step_of: Int64,
    steps: _Intervals,
    stalls: Int64,
    phases: _Phases,
) -> tuple[Segments, Int64]:
    """The segments of a lane, and the segment of each piece; ``stalls`` are the starts of the recorded ones."""
    before = np.searchsorted(phases.intervals.start, starts, side="right") - 1
    inside = phases.intervals.holding(starts) >= 0
    instance_start, instance_end = _instance_bounds(before, inside, step_of, steps, phases.intervals)
    first_stall = np.searchsorted(stalls, instance_start, side="left")
    ordinal = np.searchsorted(stalls, starts, side="right") - first_stall
    instance = (before + 1) * 2 + inside

    heads = np.ones(len(starts), np.bool_)
    heads[1:] = (np.diff(instance) != 0) | (np.diff(ordinal) != 0) | (np.diff(step_of) != 0)
    head = np.flatnonzero(heads)
    row = phases.row[np.maximum(before[head], 0)] if len(phases.row) else np.zeros(len(head), np.int64)
    in_phase = inside[head]
    segments = Segments(
        rank=np.full(len(head), rank, np.int64),
        step=step_of[head],
        stage=np.full(len(head), stage, np.int64),
        chunk=np.where(in_phase, spans.chunk[row], -1).astype(np.int64),
        microbatch=np.where(in_phase, spans.microbatch[row], -1).astype(np.int64),
        kind=_kinds(before[head], in_phase, step_of[head], steps, phases),
        instance=instance[head],
        stalls=np.searchsorted(stalls, instance_end[head], side="left") - first_stall[head],
        ordinal=ordinal[head],
        **_shares(spans, starts, ends, head),
    )
    return segments, np.cumsum(heads) - 1


_SHARES: Final = {
    "gc_ns": (schema.GC,),
    "data_ns": (schema.DATA,),
    "pause_ns": (schema.CHECKPOINT, schema.EVALUATION),
}


def _shares(spans: Spans, starts: Int64, ends: Int64, heads: Int64) -> dict[str, Int64]:
    """What the time of each segment went to; what is nested counts once, for the first in the order of _SHARES."""
    left = _sum(ends - starts, heads)
    shares = {}
    for name, kinds in _SHARES.items():
        rows = np.isin(spans.kind, kinds)
        union = _Intervals.union(spans.start[rows], spans.end[rows])
        shares[name] = np.minimum(_sum(union.covered_before(ends) - union.covered_before(starts), heads), left)
        left = left - shares[name]
    return {**shares, "work_ns": left}


def _sum(values: Int64, heads: Int64) -> Int64:
    return np.add.reduceat(values, heads) if len(heads) else np.zeros(0, np.int64)


def _instance_bounds(
    before: Int64, inside: npt.NDArray[np.bool_], step_of: Int64, steps: _Intervals, phases: _Intervals
) -> tuple[Int64, Int64]:
    """Start and end of the phase, or of the stretch between phases, that each piece lies in."""
    step_start, step_end = steps.start[step_of], steps.end[step_of]
    if not len(phases.start):
        return step_start, step_end
    last = np.maximum(before, 0)
    behind = np.where(before >= 0, np.where(inside, phases.start[last], phases.end[last]), step_start)
    following = np.append(phases.start, np.iinfo(np.int64).max)[before + 1]
    ahead = np.where(inside, phases.end[last], following)
    return np.maximum(behind, step_start), np.minimum(ahead, step_end)


def _kinds(before: Int64, in_phase: npt.NDArray[np.bool_], step_of: Int64, steps: _Intervals, phases: _Phases) -> Int64:
    """What each segment is; a phase of another step counts as the step's edge."""
    kind = np.concatenate([[0], phases.kind, [0]])
    step = np.concatenate([[-1], steps.holding(phases.intervals.start), [-1]])
    own = before + 1
    behind = np.where(step[own] == step_of, kind[own], 0)
    ahead = np.where(step[own + 1] == step_of, kind[own + 1], 0)
    return np.where(in_phase, kind[own], BETWEEN + 4 * behind + ahead)


def _nodes(steps: _Intervals, stalls: _Intervals, stall_rows: Int64) -> tuple[Int64, Int64, Int64]:
    """Step, instant in the working time and row of each node of the lane.

    The instant of a stall is its start: no piece lies between its start and its end.
    """
    count = len(steps.start)
    step = np.concatenate([np.arange(count), steps.holding(stalls.start), np.arange(count)])
    time = np.concatenate([steps.start, stalls.start, steps.end])
    row = np.concatenate([np.full(count, -1), stall_rows, np.full(count, -1)])
    role = np.repeat([0, 1, 2], [count, len(stall_rows), count])
    order = np.lexsort((time, role, step))
    return step[order], time[order], row[order]


def _launch_times(spans: Spans, numbers: Int64, steps: _Intervals) -> tuple[Int64, Int64, Int64]:
    """Row, step and instant of each communication that starts in one of the steps with these numbers.

    The step is the recorded one: an operation may start at the very instant at which its step ends.
    """
    if not len(numbers):
        return (np.zeros(0, np.int64),) * 3
    step = np.minimum(np.searchsorted(numbers, spans.step), len(numbers) - 1)
    rows = np.flatnonzero(communication_rows(spans) & (numbers[step] == spans.step))
    step = step[rows]
    return rows, step, np.clip(spans.start[rows], steps.start[step], steps.end[step])


def _launches(
    rows: Int64,
    step: Int64,
    launch: Int64,
    steps: _Intervals,
    stalls: _Intervals,
    stall_rows: Int64,
    piece_start: Int64,
    node_row: Int64,
) -> Launches:
    """Where on the lane each communication starts.

    One that starts while the lane stands still starts a fixed time after that stall began: a stall begins a little
    before the device starts the operation that it waits for.
    """
    first = np.searchsorted(stalls.start, steps.start, side="left")
    begun = np.searchsorted(stalls.start, launch, side="left") + _instant_before(rows, launch, stalls, stall_rows)
    in_step = np.maximum(begun - first[step], 0)
    stalled = np.zeros(len(launch), np.bool_)
    anchor = launch
    if len(stalls.start):
        newest = np.maximum(begun - 1, 0)
        stalled = (in_step > 0) & (launch < stalls.end[newest])
        anchor = np.where(stalled, stalls.start[newest], launch)
    start_node = np.flatnonzero(node_row < 0)[::2]
    return Launches(
        row=rows,
        step=step,
        node=start_node[step] + in_step - stalled,
        piece=np.searchsorted(piece_start, anchor, side="left"),
        extra_ns=launch - anchor,
    )


def _instant_before(rows: Int64, launch: Int64, stalls: _Intervals, stall_rows: Int64) -> Int64:
    """How many waits without a length lie at the very instant of each launch and before it in the order of rows."""
    instant = stalls.end == stalls.start
    moments = np.unique(stalls.start[instant])
    if not len(moments):
        return np.zeros(len(rows), np.int64)
    stride = int(max(rows.max(initial=0), stall_rows.max(initial=0))) + 1
    waits = np.sort(np.searchsorted(moments, stalls.start[instant]) * stride + stall_rows[instant])
    moment = np.minimum(np.searchsorted(moments, launch), len(moments) - 1)
    count = np.searchsorted(waits, moment * stride + rows) - np.searchsorted(waits, moment * stride)
    return np.where(moments[moment] == launch, count, 0)


def _with_steps(segments: Segments, index_of: Int64) -> Segments:
    columns = {name: getattr(segments, name) for name in Segments.__slots__}
    return Segments(**{**columns, "step": index_of[segments.step]})
