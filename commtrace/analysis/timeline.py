"""The data of a timeline: the steps of an aligned run as boxes on lanes, in plain columns, ready for JSON.

The report, the viewer and Perfetto draw it. Times are ns relative to the ``base_ns`` of their step; step −1 is a whole
recording without steps. :meth:`Timeline.step` holds, per rank, four tables:

=================  ==================================================================================================
work               phases and spans of the compute lane: kind, name, start, duration, microbatch, chunk, stage, depth
stalls             of the compute lane: state, role, communication, start, duration, microbatch, chunk, stage, depth.
                   A stall is cut at the arrival of the last participant: before it is ``bubble`` or ``wait``
host               data, checkpoint, gc, evaluation: kind, name, start, duration
communication      name, lane, sublane, start, duration, bytes, dtype, peer, seq, microbatch, chunk, stage, wait,
                   transfer, join, last, is_async, timing, start_exact, end_exact, transfer_exact, finished
=================  ==================================================================================================

``kind``, ``state``, ``role``, ``name``, ``dtype`` and ``timing`` index vocabularies of :meth:`Timeline.outline`,
``lane`` the lanes of the rank. ``depth`` counts enclosing boxes; boxes of one ``sublane`` never overlap.
``communication`` is a row of the communication table, ``join`` is equal on all ranks of a communication, ``last`` is
the rank that came last to it, ``wait`` and ``transfer`` split its duration; −1 means unknown or not applicable. A start
that is not exact is a lower bound, an end and a transfer upper bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from commtrace.analysis.chain import Analysis
from commtrace.analysis.clocks.align import Alignment, align, apply
from commtrace.analysis.keys import pack
from commtrace.analysis.matching.arrivals import describe_group
from commtrace.analysis.matching.match import Matches, RankMatches, communication_of, match
from commtrace.analysis.matching.operations import communication_rows, replayed_rows, timed_rows, unfinished_rows
from commtrace.analysis.matching.roles import PIPELINE, UNKNOWN, Roles, find_roles, is_p2p
from commtrace.analysis.steps.choice import select, whole_recording_as_step
from commtrace.analysis.steps.inference import infer_steps
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.metadata import Group
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection import StepRange
from commtrace.trace.spans import Int64, Spans

STATES: Final = ("wait", "transfer", "bubble")
WAIT, TRANSFER, BUBBLE = range(3)

_COORDINATES: Final = ("pp", "dp", "cp", "tp", "ep")
"""Order of the parallel dimensions in labels: outermost first."""

_LANE_ORDER: Final = {role: number for number, role in enumerate(("pp", "tp", "cp", "ep", "dp", "dp-cp", "expert-dp"))}

_MOST_RUNS: Final = 4

Columns = dict[str, list[int]]


class Lane(TypedDict):
    """The communication of a rank on one process group."""

    role: str
    ranks: list[int]  # members
    group: str
    label: str  # role and members


class OutlineRank(TypedDict):
    rank: int
    host: str
    coordinates: dict[str, int]
    label: str
    lanes: list[Lane]


class Outline(TypedDict):
    """The data common to all steps: vocabularies, and the ranks with their communication lanes."""

    residual_ns: dict[str, int] | None  # of the clocks: p50, p99 and max; None if they do not align
    kinds: list[str]
    states: list[str]
    timings: list[str]
    roles: list[str]
    names: list[str]
    ranks: list[OutlineRank]


class RankBoxes(TypedDict):
    """The boxes of one rank in a step, as in the table above."""

    rank_index: int  # in the ranks of the outline
    start: int  # of the step on this rank
    end: int
    work: Columns
    stalls: Columns
    host: Columns
    communication: Columns


class StepBoxes(TypedDict):
    step: int
    base_ns: int
    duration_ns: int
    ranks: list[RankBoxes]


class RankBounds(NamedTuple):
    """A step on one rank; ns after its begin on the first rank."""

    rank_index: int  # in the ranks of the outline
    start: int
    end: int
    own_ns: int  # of it outside of stalls


class Representatives(NamedTuple):
    """Two ranks that stand for a stage, by index in the outline; the same one twice if it is alone."""

    median: int
    slowest: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank, prepared for finding the rows of a step."""

    index: int
    trace: RankTrace
    matched: RankMatches
    order: Int64  # rows sorted by step
    sorted_steps: npt.NDArray[np.int32]  # their steps
    stalled_on: Int64  # by stall row, the row of its communication; −1 for none and for other rows
    ready: Int64  # by stall row, arrival of the last participant
    lane_of_row: Int64  # index of the communication lane; −1 for other rows
    lanes: list[Lane]
    unfinished: npt.NDArray[np.bool_]

    def rows(self, step: int) -> Int64:
        """Return rows of a step, in the order of the spans: by start, at equal starts the longer one first."""
        first, end = np.searchsorted(self.sorted_steps, [step, step + 1])
        return np.sort(self.order[first:end])

    def own_ns(self, step: int) -> int:
        """Return the time of a step outside of stalls."""
        spans, rows = self.trace.spans, self.rows(step)
        length = spans.end[rows] - spans.start[rows]
        kind = spans.kind[rows]
        return int(length[kind == schema.STEP].sum() - length[kind == schema.STALL].sum())


class Timeline:
    """The steps of an aligned run, one at a time."""

    def __init__(self, run: Run, matches: Matches, roles: Roles, residual_ns: Mapping[str, int] | None) -> None:
        """Prepare a run on one clock; ``residual_ns`` has p50, p99 and max, or is None if clocks do not align."""
        self._run = run
        self._roles = roles
        self._residual_ns = None if residual_ns is None else dict(residual_ns)
        self._ranks = [_prepare(index, trace, matches) for index, trace in enumerate(run.ranks.values())]
        self._bounds = [_step_bounds(rank.trace.spans) for rank in self._ranks]

    @classmethod
    def of_analysis(cls, analysis: Analysis) -> Timeline:
        """Return the steps that the numbers of an analysis are about."""
        return cls(analysis.run, analysis.matches, analysis.roles, _residual(analysis.alignment))

    @classmethod
    def of_recording(cls, run: Run, wanted: StepRange | None = None) -> Timeline:
        """Return everything recorded, with warm-up and incomplete steps; as one step if it has none.

        ``wanted`` limits the steps shown; communication is matched over all of them.
        """
        run = infer_steps(run) or run
        alignment = align(run)
        has_steps = any((trace.spans.kind == schema.STEP).any() for trace in run.ranks.values())
        aligned = apply(run if has_steps else whole_recording_as_step(run), alignment)
        matches = match(aligned, clocks_agree=alignment.refused is None)
        if wanted is not None:
            chosen = {rank: wanted.mask(trace.spans.step) for rank, trace in aligned.ranks.items()}
            aligned, matches = select(aligned, matches, chosen)
        return cls(aligned, matches, find_roles(aligned), _residual(alignment))

    @property
    def steps(self) -> list[int]:
        """Return the steps that any rank recorded, ascending."""
        return sorted({step for bounds in self._bounds for step in bounds})

    def base_ns(self, step: int) -> int:
        """Return when the first rank began the step."""
        return min(bounds[step][0] for bounds in self._bounds if step in bounds)

    def duration_ns(self, step: int) -> int:
        """Return the time from the first rank's start of the step to the last rank's end."""
        return _duration_ns(self._bounds, step)

    def outline(self) -> Outline:
        """Return the data common to all steps: vocabularies, ranks with communication lanes, clock residual."""
        return {
            "residual_ns": self._residual_ns,
            "kinds": list(schema.KINDS),
            "states": list(STATES),
            "timings": list(schema.TIMINGS),
            "roles": list(self._roles.words),
            "names": self._run.names,
            "ranks": [
                {
                    "rank": rank.trace.rank,
                    "host": rank.trace.metadata.node,
                    "coordinates": dict(rank.trace.coordinates),
                    "label": rank_label(rank.trace),
                    "lanes": rank.lanes,
                }
                for rank in self._ranks
            ],
        }

    def step(self, step: int, ranks: Collection[int] | None = None) -> StepBoxes:
        """Return the boxes of one step; of all ranks, or of these, by their index in the outline.

        Raises:
            KeyError: no rank recorded the step.
        """
        if not any(step in bounds for bounds in self._bounds):
            raise KeyError(step)
        base = self.base_ns(step)
        present = [
            (rank, bounds[step])
            for rank, bounds in zip(self._ranks, self._bounds, strict=True)
            if step in bounds and (ranks is None or rank.index in ranks)
        ]
        return {
            "step": step,
            "base_ns": base,
            "duration_ns": self.duration_ns(step),
            "ranks": [self._columns(rank, step, bounds, base) for rank, bounds in present],
        }

    def bounds(self, step: int) -> list[RankBounds]:
        """Return the begin and the end of a step on each rank that recorded it, in the order of the outline."""
        base = self.base_ns(step)
        return [
            RankBounds(rank.index, bounds[step][0] - base, bounds[step][1] - base, rank.own_ns(step))
            for rank, bounds in zip(self._ranks, self._bounds, strict=True)
            if step in bounds
        ]

    def num_boxes(self, step: int) -> dict[int, int]:
        """Return the number of spans of a step on each rank that recorded it, by index: about that of its boxes."""
        pairs = zip(self._ranks, self._bounds, strict=True)
        return {rank.index: len(rank.rows(step)) for rank, bounds in pairs if step in bounds}

    def _columns(self, rank: _Rank, step: int, bounds: tuple[int, int], base: int) -> RankBoxes:
        spans = rank.trace.spans
        rows = rank.rows(step)
        kind, lane = spans.kind[rows], spans.lane[rows]
        is_communication = communication_rows(spans)[rows]
        on_compute = (lane == schema.COMPUTE) & (kind != schema.STEP) & ~is_communication
        communication = rows[is_communication & ~replayed_rows(spans)[rows]]
        nested = rows[on_compute]
        depth = _depths(spans.start[nested], spans.end[nested])
        stalled = spans.kind[nested] == schema.STALL
        host = rows[(lane == schema.HOST) & ~is_communication]
        return {
            "rank_index": rank.index,
            "start": bounds[0] - base,
            "end": bounds[1] - base,
            "work": _boxes(spans, nested[~stalled], base) | {"depth": depth[~stalled].tolist()},
            "stalls": self._stalls(rank, nested[stalled], depth[stalled], communication, base),
            "host": _boxes(spans, host, base),
            "communication": _communication(rank, communication, base),
        }

    def _stalls(self, rank: _Rank, rows: Int64, depth: Int64, communication: Int64, base: int) -> Columns:
        spans = rank.trace.spans
        role = self._roles.ranks[rank.trace.rank].role[rows]
        is_bubble = (role == self._roles.code(PIPELINE)) & is_p2p(self._run, spans)[rows]
        before = np.where(is_bubble, BUBBLE, WAIT)
        cut = np.clip(rank.ready[rows], spans.start[rows], spans.end[rows])
        start = np.stack([spans.start[rows], cut], axis=1).reshape(-1)
        end = np.stack([cut, spans.end[rows]], axis=1).reshape(-1)
        state = np.stack([before, np.full(len(rows), TRANSFER)], axis=1).reshape(-1)
        kept = end > start
        kept[::2] |= spans.end[rows] == spans.start[rows]  # a stall of no length stays one piece
        piece = np.repeat(np.arange(len(rows)), 2)[kept]
        row = rows[piece]
        return {
            "state": state[kept].tolist(),
            "role": role[piece].tolist(),
            "communication": _positions(communication, rank.stalled_on[row]).tolist(),
            "start": (start[kept] - base).tolist(),
            "duration": (end[kept] - start[kept]).tolist(),
            "microbatch": spans.microbatch[row].tolist(),
            "chunk": spans.chunk[row].tolist(),
            "stage": spans.stage[row].tolist(),
            "depth": depth[piece].tolist(),
        }


def _residual(alignment: Alignment) -> Mapping[str, int] | None:
    return None if alignment.refused else alignment.residual_ns


def rank_label(trace: RankTrace) -> str:
    """Return a label like ``rank 3 · pp1 dp0 tp0 · node0``; dimensions of size 1 are left out."""
    shown = [name for name in _COORDINATES if trace.parallel.get(name, 2) > 1 and name in trace.coordinates]
    coordinates = " ".join(f"{name}{trace.coordinates[name]}" for name in shown)
    return " · ".join(filter(None, [f"rank {trace.rank}", coordinates, trace.metadata.node]))


def _prepare(index: int, trace: RankTrace, matches: Matches) -> _Rank:
    spans = trace.spans
    order = np.argsort(spans.step, kind="stable")
    stalls = np.flatnonzero(spans.kind == schema.STALL)
    stalled_on = np.full(len(spans), -1, np.int64)
    stalled_on[stalls] = communication_of(spans, stalls)
    matched = matches.ranks[trace.rank]
    lane_of_row, lanes = _communication_lanes(trace, np.flatnonzero(timed_rows(spans)))
    return _Rank(
        index,
        trace,
        matched,
        order,
        spans.step[order],
        stalled_on,
        matched.stall_ready,
        lane_of_row,
        lanes,
        unfinished_rows(trace),
    )


def representatives(bounds: Sequence[RankBounds], stages: Sequence[int]) -> dict[int, Representatives]:
    """Return the median and the slowest rank of each stage by own work; ``stages`` is by index in the outline."""
    of_stage: dict[int, list[RankBounds]] = {}
    for rank_bounds in bounds:
        of_stage.setdefault(stages[rank_bounds.rank_index], []).append(rank_bounds)
    by_stage = {}
    for stage, ranks in of_stage.items():
        by_work = sorted(ranks, key=lambda rank_bounds: (rank_bounds.own_ns, rank_bounds.rank_index))
        by_stage[stage] = Representatives(by_work[(len(by_work) - 1) // 2].rank_index, by_work[-1].rank_index)
    return by_stage


def typical_step(durations: Mapping[int, int]) -> int:
    """Return the step of median duration."""
    return sorted(durations, key=lambda step: (durations[step], step))[(len(durations) - 1) // 2]


def step_durations(run: Run, steps: Sequence[int]) -> dict[int, int]:
    """Return the length of each of these steps, the mean over its ranks; of an aligned run, its steps are enough.

    Each rank's own step ends when the next begins, so lengths add up to the time of the run, as the extent from the
    first rank's begin to the last one's end, in which steps overlap, does not.
    """
    numbers = np.unique(np.array(steps, np.int64))
    total, ranks = np.zeros((2, len(numbers)), np.int64)
    for block in run.blocks:
        spans = block.spans
        rows = np.flatnonzero(spans.kind == schema.STEP)
        rows = rows[np.isin(spans.step[rows], numbers)]
        at = np.searchsorted(numbers, spans.step[rows])
        np.add.at(total, at, spans.end[rows] - spans.start[rows])
        np.add.at(ranks, at, 1)
    return dict(zip(numbers.tolist(), (total // np.maximum(ranks, 1)).tolist(), strict=True))


def _duration_ns(bounds: Sequence[Mapping[int, tuple[int, int]]], step: int) -> int:
    of_ranks = [of_rank[step] for of_rank in bounds if step in of_rank]
    return max(end for _, end in of_ranks) - min(start for start, _ in of_ranks)


def _step_bounds(spans: Spans) -> dict[int, tuple[int, int]]:
    rows = np.flatnonzero(spans.kind == schema.STEP)
    columns = (spans.step[rows].tolist(), spans.start[rows].tolist(), spans.end[rows].tolist())
    return {step: (start, end) for step, start, end in zip(*columns, strict=True)}


def _depths(start: Int64, end: Int64) -> Int64:
    depths = np.empty(len(start), np.int64)
    open_ends: list[int] = []
    for row, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        depths[row] = len(open_ends)
        open_ends.append(finish)
    return depths


def _sublanes(lane: Int64, start: Int64, end: Int64) -> list[int]:
    """Return the first sublane of its lane that is free when each interval, sorted by start, begins."""
    chosen = []
    ends_of_lane: dict[int, list[int]] = {}
    for number, begin, finish in zip(lane.tolist(), start.tolist(), end.tolist(), strict=True):
        ends = ends_of_lane.setdefault(number, [])
        free = next((position for position, last in enumerate(ends) if last <= begin), len(ends))
        ends[free : free + 1] = [finish]
        chosen.append(free)
    return chosen


def _positions(rows: Int64, wanted: Int64) -> Int64:
    """Return the position of each wanted row among the ascending ``rows``; −1 if it is not one of them."""
    if not len(rows):
        return np.full(len(wanted), -1)
    position = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return np.where(rows[position] == wanted, position, -1)


def _boxes(spans: Spans, rows: Int64, base: int) -> Columns:
    return {
        "kind": spans.kind[rows].tolist(),
        "name": spans.name[rows].tolist(),
        "start": (spans.start[rows] - base).tolist(),
        "duration": (spans.end[rows] - spans.start[rows]).tolist(),
        "microbatch": spans.microbatch[rows].tolist(),
        "chunk": spans.chunk[rows].tolist(),
        "stage": spans.stage[rows].tolist(),
    }


def _communication(rank: _Rank, rows: Int64, base: int) -> Columns:
    spans, matched = rank.trace.spans, rank.matched
    lane = rank.lane_of_row[rows]
    known = matched.complete[rows] & ~rank.unfinished[rows]
    joined = matched.participants[rows] > 1
    boxes = _boxes(spans, rows, base)
    del boxes["kind"]
    return boxes | {
        "lane": lane.tolist(),
        "sublane": _sublanes(lane, spans.start[rows], spans.end[rows]),
        "bytes": spans.bytes[rows].tolist(),
        "dtype": spans.dtype[rows].tolist(),
        "peer": np.where(spans.peer[rows] < OUTSIDE, spans.peer[rows], schema.NOT_APPLICABLE).tolist(),
        "seq": spans.seq[rows].tolist(),
        "wait": np.where(known & spans.start_exact[rows], matched.wait_ns(spans)[rows], -1).tolist(),
        "transfer": np.where(known, matched.transfer_ns(spans)[rows], -1).tolist(),
        "join": np.where(joined, matched.bucket[rows], -1).tolist(),
        "last": np.where(joined, matched.last_rank[rows], -1).tolist(),
        "is_async": spans.is_async[rows].astype(np.int8).tolist(),
        "timing": spans.timing[rows].tolist(),
        "start_exact": spans.start_exact[rows].astype(np.int8).tolist(),
        "end_exact": spans.end_exact[rows].astype(np.int8).tolist(),
        "transfer_exact": matched.transfer_exact(spans)[rows].astype(np.int8).tolist(),
        "finished": (~rank.unfinished[rows]).astype(np.int8).tolist(),
    }


def _communication_lanes(trace: RankTrace, rows: Int64) -> tuple[Int64, list[Lane]]:
    """Return one lane per process group, by role; point-to-point goes to the group whose role it has."""
    spans = trace.spans
    p2p = spans.kind[rows] == schema.P2P
    key = pack((spans.group[rows], p2p, np.where(p2p, spans.peer[rows], -1)))
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    groups = [_group_of(trace, int(row), is_p2p=bool(spans.kind[row] == schema.P2P)) for row in rows[first]]
    ordered = sorted(
        set(groups), key=lambda group: (_LANE_ORDER.get(group.role, len(_LANE_ORDER)), group.role, group.id)
    )
    lane_of_row = np.full(len(spans), -1, np.int64)
    if groups:
        lane_of_row[rows] = np.array([ordered.index(group) for group in groups])[inverse.reshape(-1)]
    lanes: list[Lane] = [
        {
            "role": group.role,
            "ranks": list(group.ranks),
            "group": group.name,
            "label": _label(group),
        }
        for group in ordered
    ]
    return lane_of_row, lanes


def _label(group: Group) -> str:
    if group.is_over_worlds:
        return f"{group.name if group.role == UNKNOWN else group.role} · {describe_group(group, group.id).words}"
    return f"{group.role} · {members(group.ranks)}"


def _group_of(trace: RankTrace, row: int, *, is_p2p: bool) -> Group:
    """Return the group that gives a communication its role (:mod:`commtrace.analysis.matching.roles`)."""
    number, peer = int(trace.spans.group[row]), int(trace.spans.peer[row])
    if is_p2p:
        holding = [group for group in trace.groups.values() if group.role == PIPELINE and peer in group.ranks]
        if holding:
            return min(holding, key=lambda group: (group.size, group.ordinal, group.id))
    unknown = Group(number, (trace.rank,), 0, UNKNOWN)
    return trace.groups.get(number, unknown)


def members(ranks: Sequence[int]) -> str:
    """Return ranks in short: ``0–3, 8``, or ``0, 8, …, 504`` if there are many."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words) if len(words) <= _MOST_RUNS else ", ".join([*words[:2], "…", words[-1]])
