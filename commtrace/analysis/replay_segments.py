"""Segments: stretches of work between two stalls, within one phase or between two. Their durations are compared
between peers, and replaced in a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.disjoint import Disjoint, begun_at
from commtrace.analysis.lane_rows import LaneRows
from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int64

FORWARD: Final = 1
BACKWARD: Final = 2
OPTIMIZER: Final = 3
BETWEEN: Final = 8
"""Kinds from here on are stretches between phases: ``BETWEEN + 4 · kind before + kind after`` (0: the step's edge)."""

_KIND_OF_SPAN: Final = {schema.FORWARD: FORWARD, schema.BACKWARD: BACKWARD, schema.OPTIMIZER: OPTIMIZER}

_SHARES: Final = {
    "gc_ns": (schema.GC,),
    "data_ns": (schema.DATA,),
    "pause_ns": (schema.CHECKPOINT, schema.EVALUATION),
}


@dataclass(frozen=True, slots=True)
class Segments:
    """The compute lane between two stalls, within one phase or between two phases. Columns of equal length.

    Attributes:
        step: index into the steps of the program.
        kind: FORWARD, BACKWARD, OPTIMIZER, or BETWEEN and above.
        instance: number of the phase: segments of one forward share it.
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


class Pieces(NamedTuple):
    """What the lanes did while they were not stalled, cut at every boundary that matters to a replay; ascending.

    Attributes:
        start, end: ns.
        interval: the step of a rank that the piece lies in.
        phase: the last phase that had begun; −1 where there was none.
        stalls: how many recorded stalls had begun.
    """

    start: Int64
    end: Int64
    interval: Int64
    phase: Int64
    stalls: Int64

    @classmethod
    def cut(cls, cuts: Int64, intervals: Disjoint, stalls: Disjoint, recorded: Int64, phases: Disjoint) -> Pieces:
        """The pieces between these instants, at which all of the bounds are; ``recorded`` are starts of stalls."""
        start = cuts[:-1]
        step = intervals.of_begun(begun_at(cuts, intervals.start)[:-1], start)
        works = np.flatnonzero((step >= 0) & (stalls.of_begun(begun_at(cuts, stalls.start)[:-1], start) < 0))
        phase, begun = (begun_at(cuts, begins)[works] for begins in (phases.start, recorded))
        return cls(cuts[works], cuts[works + 1], step[works], phase - 1, begun)


class Phases(NamedTuple):
    """Forwards, backwards and optimizers, in order.

    Attributes:
        row: which row each one is.
        kind: FORWARD, BACKWARD or OPTIMIZER.
    """

    intervals: Disjoint
    row: Int64
    kind: Int64

    @classmethod
    def of(cls, rows: LaneRows, intervals: Disjoint) -> Phases:
        """The phases that begin in the steps; what is nested in another one is left out."""
        kinds = np.zeros(len(schema.KINDS), np.int64)
        kinds[list(_KIND_OF_SPAN)] = list(_KIND_OF_SPAN.values())
        chosen = np.flatnonzero((kinds > 0)[rows.spans.kind] & (rows.spans.lane == schema.COMPUTE))
        start = rows.start(chosen)
        inside = intervals.holding(start) >= 0
        chosen, start = chosen[inside], start[inside]
        end = rows.end(chosen)
        if len(chosen):
            outermost = np.append(True, start[1:] >= np.maximum.accumulate(end)[:-1])
            chosen, start, end = chosen[outermost], start[outermost], end[outermost]
        return cls(Disjoint(start, end), chosen, kinds[rows.spans.kind[chosen]])


def find_segments(
    rows: LaneRows, stages: Int64, num_steps: int, pieces: Pieces, intervals: Disjoint, stalls: Int64, phases: Phases
) -> tuple[Segments, Int64]:
    """The segments of some lanes, and the segment of each piece.

    Args:
        rows: of these lanes.
        stages: pipeline stage of each rank.
        num_steps: of each rank.
        pieces: of the lanes.
        intervals: the steps, rank by rank.
        stalls: starts of the recorded stalls.
        phases: of the lanes.
    """
    inside = phases.intervals.of_begun(pieces.phase + 1, pieces.start) >= 0
    number = (pieces.phase + 1) * 2 + inside
    opens = _changes(number) | _changes(pieces.interval)
    instance = np.cumsum(opens) - 1
    stalls_before, stalls_within = _stalls_of_instances(
        np.flatnonzero(opens), inside, pieces, intervals, stalls, phases
    )
    ordinal = pieces.stalls - stalls_before[instance]

    heads = opens | _changes(ordinal)
    head = np.flatnonzero(heads)
    phase, in_phase, step = pieces.phase[head], inside[head], pieces.interval[head]
    row = phases.row[np.maximum(phase, 0)] if len(phases.row) else np.zeros(len(head), np.int64)
    rank = step // num_steps
    segments = Segments(
        rank=rows.ranks[rank],
        step=step - rank * num_steps,
        stage=stages[rank],
        chunk=np.where(in_phase, rows.spans.chunk[row], -1).astype(np.int64),
        microbatch=np.where(in_phase, rows.spans.microbatch[row], -1).astype(np.int64),
        kind=_kinds(phase, in_phase, step, intervals, phases),
        instance=number[head],
        stalls=stalls_within[instance[head]],
        ordinal=ordinal[head],
        **_shares(rows, pieces, head),
    )
    return segments, np.cumsum(heads) - 1


def _changes(values: Int64) -> Bool:
    changes = np.ones(len(values), np.bool_)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _stalls_of_instances(
    first: Int64, inside: Bool, pieces: Pieces, intervals: Disjoint, stalls: Int64, phases: Phases
) -> tuple[Int64, Int64]:
    """Of each phase, or stretch between phases: how many stalls began before it and in it; ``first`` is its piece."""
    start, end = _bounds_of_instances(
        pieces.phase[first], inside[first], pieces.interval[first], intervals, phases.intervals
    )
    before = np.searchsorted(stalls, start, side="left")
    return before, np.searchsorted(stalls, end, side="left") - before


def _bounds_of_instances(
    before: Int64, inside: Bool, interval: Int64, intervals: Disjoint, phases: Disjoint
) -> tuple[Int64, Int64]:
    step_start, step_end = intervals.start[interval], intervals.end[interval]
    if not len(phases):
        return step_start, step_end
    last = np.maximum(before, 0)
    behind = np.where(before >= 0, np.where(inside, phases.start[last], phases.end[last]), step_start)
    following = np.append(phases.start, np.iinfo(np.int64).max)[before + 1]
    ahead = np.where(inside, phases.end[last], following)
    return np.maximum(behind, step_start), np.minimum(ahead, step_end)


def _kinds(before: Int64, in_phase: Bool, interval: Int64, intervals: Disjoint, phases: Phases) -> Int64:
    """What each segment is; a phase of another step counts as the step's edge."""
    kind = np.concatenate([[0], phases.kind, [0]])
    step = np.concatenate([[-1], intervals.holding(phases.intervals.start), [-1]])
    own = before + 1
    behind = np.where(step[own] == interval, kind[own], 0)
    ahead = np.where(step[own + 1] == interval, kind[own + 1], 0)
    return np.where(in_phase, kind[own], BETWEEN + 4 * behind + ahead)


def _shares(rows: LaneRows, pieces: Pieces, heads: Int64) -> dict[str, Int64]:
    """What the time of each segment went to; what is nested counts once, for the first in the order of _SHARES."""
    left = _sum(pieces.end - pieces.start, heads)
    share_of_kind = np.full(len(schema.KINDS), -1, np.int8)
    for number, kinds in enumerate(_SHARES.values()):
        share_of_kind[list(kinds)] = number
    share = share_of_kind[rows.spans.kind]
    shares = {}
    for number, name in enumerate(_SHARES):
        own = np.flatnonzero(share == number)
        shares[name] = np.zeros(len(heads), np.int64)
        if len(own):
            union = Disjoint.union(rows.start(own), rows.end(own))
            covered = _sum(union.covered_before(pieces.end) - union.covered_before(pieces.start), heads)
            shares[name] = np.minimum(covered, left)
            left = left - shares[name]
    return {**shares, "work_ns": left}


def _sum(values: Int64, heads: Int64) -> Int64:
    if len(heads) == len(values):
        return values
    return np.add.reduceat(values, heads) if len(heads) else np.zeros(0, np.int64)
