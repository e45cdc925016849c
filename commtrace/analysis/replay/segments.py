"""Segments: stretches of work between two stalls, compared between peers and changed in a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.intervals import IntervalUnion, begun_at, union
from commtrace.analysis.breakdown.launch_bound import launch_bound
from commtrace.analysis.keys import concatenated_ranges, grouped, pack, run_begins
from commtrace.analysis.matching.operations import unfinished_ids
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of some ranks of a run, concatenated by rank."""

    run: Run
    ranks: Int64
    first: Int64  # the first row of each rank, then the number of all rows
    of_row: Int64  # index of the rank of each row
    spans: Spans
    shift: Int64  # of each rank, added to its times so that no two ranks overlap

    @classmethod
    def of(cls, run: Run, block: Block) -> LaneRows:
        return cls(
            run=run,
            ranks=np.array(block.ranks, np.int64),
            first=block.bounds,
            of_row=block.per_row(np.arange(len(block.ranks))),
            spans=block.spans,
            shift=block.end_to_end(),
        )

    def start(self, rows: Int64) -> Int64:
        """Return the shifted starts of these rows."""
        return np.asarray(self.spans.start[rows] + self.shift[self.of_row[rows]])

    def end(self, rows: Int64) -> Int64:
        """Return the shifted ends of these rows."""
        return np.asarray(self.spans.end[rows] + self.shift[self.of_row[rows]])

    def unfinished(self) -> Int64:
        """Return rows of communications whose end was never seen, and all rows that share an id with them."""
        rows = [
            first + np.flatnonzero(np.isin(trace.spans.id, ids))
            for first, trace in zip(self.first[:-1].tolist(), self._traces(), strict=True)
            if (ids := unfinished_ids(trace))
        ]
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)

    def _traces(self) -> Iterator[RankTrace]:
        return (self.run.ranks[rank] for rank in self.ranks.tolist())


FORWARD: Final = 1
BACKWARD: Final = 2
OPTIMIZER: Final = 3
BETWEEN: Final = 8
"""Kinds from here on lie between phases: ``BETWEEN + 4 · kind before + kind after`` (0: the step's edge)."""

_KIND_OF_SPAN: Final = {schema.FORWARD: FORWARD, schema.BACKWARD: BACKWARD, schema.OPTIMIZER: OPTIMIZER}

_SHARES: Final = {
    "gc_ns": (schema.GC,),
    "data_ns": (schema.DATA,),
    "checkpoint_ns": (schema.CHECKPOINT,),
    "evaluation_ns": (schema.EVALUATION,),
}


@dataclass(frozen=True, slots=True)
class WorkSegments:
    """Work on the compute lane between two stalls, within one phase or between two. Columns of equal length."""

    rank: Int32
    step: Int32  # index into the steps of the program
    stage: Int32
    chunk: Int32
    microbatch: Int32
    kind: Int32  # FORWARD, BACKWARD, OPTIMIZER, or BETWEEN and above
    instance: Int32  # shared by the segments of one phase
    stalls: Int32  # in the instance
    ordinal: Int32  # stalls of the instance before the segment
    work_ns: Int64
    data_ns: Int64
    gc_ns: Int64
    checkpoint_ns: Int64
    evaluation_ns: Int64
    launch_bound_ns: Int64  # of ``work_ns``, the device waited for its host; −1 if not known

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def total_ns(self) -> Int64:
        return self.work_ns + self.data_ns + self.gc_ns + self.checkpoint_ns + self.evaluation_ns


def ends_with_a_phase(kind: Int32 | Int64) -> Bool:
    """Return whether each kind is a stretch before a phase."""
    return np.asarray((kind >= BETWEEN) & ((kind - BETWEEN) % 4 > 0))


def first_of_phase(segments: WorkSegments) -> Bool:
    """Return whether each segment is the first of its phase. Segments of a phase must be neighbours."""
    first = np.ones(len(segments), np.bool_)
    first[1:] = segments.instance[1:] != segments.instance[:-1]
    for column in (segments.rank, segments.step):
        first[1:] |= column[1:] != column[:-1]
    return first


def same_work(segments: WorkSegments) -> Int64:
    """Return numbers from 0 that are equal for segments of the same work."""
    _, number = grouped(pack([segments.stage, segments.chunk, segments.kind, segments.stalls, segments.ordinal]))
    return number


class Pieces(NamedTuple):
    """Work between stalls, cut at every boundary that matters to a replay; ascending."""

    start: Int64
    end: Int64
    interval: Int64  # index of the step of a rank
    phase: Int64  # the last one that had begun; −1 for none
    stalls: Int64  # recorded ones that had begun

    @classmethod
    def cut(
        cls, cuts: Int64, intervals: IntervalUnion, stalls: IntervalUnion, recorded: Int64, phases: IntervalUnion
    ) -> Pieces:
        """Return the pieces between ``cuts``, which hold all bounds; ``recorded`` are starts of stalls."""
        start = cuts[:-1]
        step = intervals.of_begun(begun_at(cuts, intervals.start)[:-1], start)
        stalled = begun_at(cuts, stalls.start)
        works = np.flatnonzero((step >= 0) & (stalls.of_begun(stalled[:-1], start) < 0))
        begun = begun_at(cuts, recorded)
        return cls(cuts[works], cuts[works + 1], step[works], begun_at(cuts, phases.start)[works] - 1, begun[works])


class Phases(NamedTuple):
    """Forwards, backwards and optimizers, in order."""

    intervals: IntervalUnion
    row: Int64
    kind: Int64  # FORWARD, BACKWARD or OPTIMIZER

    @classmethod
    def of(cls, rows: LaneRows, intervals: IntervalUnion) -> Phases:
        """Return the outermost phases that begin in the steps."""
        kinds = np.zeros(len(schema.KINDS), np.int64)
        kinds[list(_KIND_OF_SPAN)] = list(_KIND_OF_SPAN.values())
        chosen = np.flatnonzero((kinds > 0).take(rows.spans.kind) & (rows.spans.lane == schema.COMPUTE))
        start = rows.start(chosen)
        inside = intervals.holding(start) >= 0
        chosen, start = chosen[inside], start[inside]
        end = rows.end(chosen)
        if len(chosen):
            outermost = np.append(True, start[1:] >= np.maximum.accumulate(end)[:-1])
            chosen, start, end = chosen[outermost], start[outermost], end[outermost]
        return cls(IntervalUnion(start, end), chosen, kinds[rows.spans.kind[chosen]])


def find_segments(
    rows: LaneRows,
    stages: Int64,
    num_steps: int,
    pieces: Pieces,
    intervals: IntervalUnion,
    stalls: Int64,
    phases: Phases,
) -> tuple[WorkSegments, Int64]:
    """Return the segments of some lanes, and the segment of each piece.

    ``intervals`` are the steps, rank by rank; ``stalls`` are starts of the recorded stalls.
    """
    inside = phases.intervals.of_begun(pieces.phase + 1, pieces.start) >= 0
    number = (pieces.phase + 1) * 2 + inside
    opens = run_begins(number) | run_begins(pieces.interval)
    first = np.flatnonzero(opens)
    instances = _Instances.of(first, inside[first], pieces, intervals, stalls, phases)
    instance = np.cumsum(opens) - 1
    ordinal = pieces.stalls - instances.stalls_before[instance]

    heads = opens | run_begins(ordinal)
    head = np.flatnonzero(heads)
    instance = instance[head]
    row = phases.row[np.maximum(instances.phase, 0)] if len(phases.row) else np.zeros(len(first), np.int64)
    rank = instances.interval // num_steps
    shares = _shares(rows, pieces, head)
    segments = WorkSegments(
        rank=narrow(rows.ranks[rank])[instance],
        step=narrow(instances.interval - rank * num_steps)[instance],
        stage=narrow(stages[rank])[instance],
        chunk=narrow(np.where(instances.in_phase, rows.spans.chunk[row], -1))[instance],
        microbatch=narrow(np.where(instances.in_phase, rows.spans.microbatch[row], -1))[instance],
        kind=narrow(instances.kinds(intervals, phases))[instance],
        instance=narrow(number[first])[instance],
        stalls=narrow(instances.stalls)[instance],
        ordinal=narrow(ordinal[head]),
        **shares,
        launch_bound_ns=_launch_bound(rows, pieces, head, intervals, instances.in_phase[instance], shares["work_ns"]),
    )
    return segments, np.cumsum(heads) - 1


def narrow(numbers: npt.NDArray[np.integer]) -> Int32:
    """Return ranks, steps or counts as 32 bits: there are never 2³¹ of them."""
    return numbers.astype(np.int32)


class _Instances(NamedTuple):
    """Phases and the stretches between them, in order."""

    phase: Int64  # the last one that had begun; −1 for none
    in_phase: Bool  # the instance is that phase
    interval: Int64  # index of the step of a rank
    stalls_before: Int64
    stalls: Int64  # that began in the instance

    @classmethod
    def of(
        cls, first: Int64, in_phase: Bool, pieces: Pieces, intervals: IntervalUnion, stalls: Int64, phases: Phases
    ) -> _Instances:
        phase, interval = pieces.phase[first], pieces.interval[first]
        start, end = _bounds(phase, in_phase, interval, intervals, phases.intervals)
        before = np.searchsorted(stalls, start, side="left")
        return cls(phase, in_phase, interval, before, np.searchsorted(stalls, end, side="left") - before)

    def kinds(self, intervals: IntervalUnion, phases: Phases) -> Int64:
        """Return the kind of each instance; a phase of another step counts as the step's edge."""
        kind = np.concatenate([[0], phases.kind, [0]])
        step = np.concatenate([[-1], intervals.holding(phases.intervals.start), [-1]])
        last = self.phase + 1
        behind = np.where(step[last] == self.interval, kind[last], 0)
        ahead = np.where(step[last + 1] == self.interval, kind[last + 1], 0)
        return np.where(self.in_phase, kind[last], BETWEEN + 4 * behind + ahead)


def _bounds(
    before: Int64, in_phase: Bool, interval: Int64, intervals: IntervalUnion, phases: IntervalUnion
) -> tuple[Int64, Int64]:
    step_start, step_end = intervals.start[interval], intervals.end[interval]
    if not len(phases):
        return step_start, step_end
    last = np.maximum(before, 0)
    behind = np.where(before >= 0, np.where(in_phase, phases.start[last], phases.end[last]), step_start)
    following = np.append(phases.start, np.iinfo(np.int64).max)[before + 1]
    ahead = np.where(in_phase, phases.end[last], following)
    return np.maximum(behind, step_start), np.minimum(ahead, step_end)


def _shares(rows: LaneRows, pieces: Pieces, heads: Int64) -> dict[str, Int64]:
    """Divide the time of each segment by cause; nested spans count once, for the first of _SHARES."""
    left = _sum(pieces.end - pieces.start, heads)
    share_of_kind = np.full(len(schema.KINDS), -1, np.int8)
    for number, kinds in enumerate(_SHARES.values()):
        share_of_kind[list(kinds)] = number
    share = share_of_kind.take(rows.spans.kind)
    shares = {}
    for number, name in enumerate(_SHARES):
        of_kind = np.flatnonzero(share == number)
        shares[name] = np.zeros(len(heads), np.int64)
        if len(of_kind):
            shares[name] = np.minimum(_sum(_covered(pieces, rows.start(of_kind), rows.end(of_kind)), heads), left)
            left = left - shares[name]
    return {**shares, "work_ns": left}


def _launch_bound(
    rows: LaneRows, pieces: Pieces, heads: Int64, intervals: IntervalUnion, is_in_phase: Bool, work_ns: Int64
) -> Int64:
    """Return how much of the work of each segment was launch-bound; −1 in steps without a mark that tells."""
    waits, before_empty, known = launch_bound(rows.spans, rows.first, rows.shift)
    if not len(known):
        return np.full(len(heads), -1, np.int64)
    in_phases, between = (
        _sum(_covered(pieces, *times.bounds), heads) if len(times) else np.zeros(len(heads), np.int64)
        for times in (waits, before_empty)
    )
    is_known = np.searchsorted(known, intervals.end, side="right") > np.searchsorted(known, intervals.start)
    waited = np.minimum(np.where(is_in_phase, in_phases, between), work_ns)
    return np.where(is_known[pieces.interval[heads]], waited, -1)


def _covered(pieces: Pieces, start: Int64, end: Int64) -> Int64:
    """Return how much of each piece lies in any of these few intervals."""
    covering = union(start, end)
    first = np.searchsorted(pieces.end, covering.start, "right")
    behind = np.searchsorted(pieces.start, covering.end, "left")
    touched = np.unique(concatenated_ranges(first, np.maximum(behind, first)))
    covered = np.zeros(len(pieces.start), np.int64)
    covered[touched] = covering.before(pieces.end[touched]) - covering.before(pieces.start[touched])
    return covered


def _sum(values: Int64, heads: Int64) -> Int64:
    return np.add.reduceat(values, heads) if len(heads) else np.zeros(0, np.int64)
