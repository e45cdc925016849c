"""A recorded run as a dependency graph that can be replayed with other durations.

Per rank and step the compute lane is a chain: stretches of work, and stalls on communications. A communication starts
at a position of that chain; it ends, on each participant, its *transfer* after the last participant started. Replaying
the measured durations gives the measured times back; replaying others answers "what if".

* The transfer of a participant is its measured end minus the latest start, so waiting is not a duration but follows
  from the graph.
* A participant that was done before the last one started (the eager send of a small message, the root of a broadcast)
  did not depend on it: it ends its own duration after its own start. Those that start later still depend on it.
* Steps are replayed one by one, each from a common start of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.analysis.match import Matches
from commtrace.analysis.replay import JoinedGraph, ReplayError, ReplayGraph, inverse
from commtrace.analysis.replay_joins import RankJoins, Transfers, join_launches, offsets
from commtrace.analysis.replay_lane import Lane, Launches, Segments, read_lane
from commtrace.analysis.step_parts import StepPart, StepWorkers, cut
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans


@dataclass(frozen=True, slots=True)
class Edges:
    """Weight of an edge: pieces ``first_piece`` to ``end_piece`` plus a transfer (−1: none) plus ``fixed_ns``."""

    source: Int64
    target: Int64
    first_piece: Int64
    end_piece: Int64
    transfer: Int64
    fixed_ns: Int64


@dataclass(frozen=True, slots=True)
class StallNodes:
    """The stalls of all lanes: what is needed to say, after a replay, how long each one lasted and why.

    Attributes:
        rank, row, step: which stall it is.
        node: instant at which the lane goes on.
        lane_edge: the edge into it along the lane: when the stall began, but for the edge's ``fixed_ns``.
        join_node: instant at which the last participant had started; −1 where the stall did not depend on others.
    """

    rank: Int64
    row: Int64
    step: Int64
    node: Int64
    lane_edge: Int64
    join_node: Int64


@dataclass(frozen=True, slots=True)
class Program:
    """The dependency graph of some steps of a run, and the measured durations.

    Attributes:
        steps: the step numbers, ascending.
        ranks: the ranks, ascending.
        first_node, last_node: start and end of each step on each rank, shape (ranks, steps).
        start_ns, end_ns: the same instants as measured, shape (ranks, steps).
    """

    graph: ReplayGraph | JoinedGraph
    edges: Edges
    segments: Segments
    transfers: Transfers
    stalls: StallNodes
    piece_ns: Int64
    piece_segment: Int64
    steps: Int64
    ranks: Int64
    first_node: Int64
    last_node: Int64
    start_ns: Int64
    end_ns: Int64

    def times(
        self,
        segment_ns: npt.NDArray[np.int64] | None = None,
        transfer_ns: npt.NDArray[np.int64] | None = None,
        origins: Int64 | None = None,
    ) -> Int64:
        """Instants of all nodes with these durations; the measured ones where None.

        Args:
            segment_ns: per segment, what it shall last.
            transfer_ns: per transfer.
            origins: instants of ``first_node``, shape (ranks, steps); all 0 by default.
        """
        weights = self._weights(segment_ns, transfer_ns)
        if origins is None:
            return self.graph.times(weights)
        at = np.zeros(self.graph.num_nodes, np.int64)
        at[self.first_node] = origins
        return self.graph.times(weights, at)

    def stall_waits(self, times: Int64, segment_ns: Int64 | None = None) -> Int64:
        """Of each stall, how long the lane stood before the last participant had started; ``times`` as replayed."""
        stalls, edges = self.stalls, self.edges
        before = self._worked_before(segment_ns)
        lane = stalls.lane_edge
        begin = times[edges.source[lane]] + before[edges.end_piece[lane]] - before[edges.first_piece[lane]]
        ready = np.where(stalls.join_node >= 0, times[stalls.join_node], begin)
        return np.asarray(np.maximum(np.minimum(ready, times[stalls.node]) - begin, 0))

    def step_times(
        self, segment_ns: npt.NDArray[np.int64] | None = None, transfer_ns: npt.NDArray[np.int64] | None = None
    ) -> Int64:
        """Replayed duration of every step, ns: the latest end of all ranks after a common start."""
        return np.asarray(self.times(segment_ns, transfer_ns)[self.last_node].max(axis=0))

    def measured_step_times(self) -> Int64:
        """Recorded duration of every step, ns: the mean over ranks."""
        return np.asarray(np.rint((self.end_ns - self.start_ns).mean(axis=0)), np.int64)

    def _weights(self, segment_ns: Int64 | None, transfer_ns: Int64 | None) -> Int64:
        before = self._worked_before(segment_ns)
        transfers = np.append(self.transfers.ns if transfer_ns is None else transfer_ns, 0)
        edges = self.edges
        weights = before.take(edges.end_piece)
        weights -= before.take(edges.first_piece)
        weights += transfers[edges.transfer]
        weights += edges.fixed_ns
        return weights

    def _worked_before(self, segment_ns: Int64 | None) -> Int64:
        """Working time in all pieces before each piece."""
        pieces = self.piece_ns
        if segment_ns is not None:
            measured = np.maximum(self.segments.total_ns, 1)
            pieces = np.rint(pieces * (segment_ns / measured)[self.piece_segment]).astype(np.int64)
        return np.concatenate([[0], np.cumsum(pieces)])


def build_program(run: Run, matches: Matches, workers: StepWorkers | None = None) -> Program:
    """The dependency graph of the steps that every rank recorded whole.

    The clocks of the ranks must have been aligned. Workers build it range by range of steps.

    Raises:
        ReplayError: no step was recorded by all ranks, or what was recorded contradicts itself.
    """
    steps = common_steps(run)
    if not len(steps):
        raise ReplayError("No step was recorded by all ranks, so nothing can be replayed.")
    ranges = workers.ranges(steps.tolist()) if workers else []
    if workers is None or len(ranges) < 2:
        return _build(run, matches, steps)
    parts = [cut(run, matches, part) for part in ranges]
    programs = workers.map(
        _build, [(part.run, part.matches, np.array(own)) for part, own in zip(parts, ranges, strict=True)]
    )
    return _joined(programs, parts)


def _build(run: Run, matches: Matches, steps: Int64) -> Program:
    ranks = np.array(sorted(run.ranks), np.int64)
    traces = [run.ranks[int(rank)] for rank in ranks]
    stages = [stage_of(trace) for trace in traces]
    lanes = [read_lane(run, trace, stage, steps) for trace, stage in zip(traces, stages, strict=True)]
    node_offset = offsets([len(lane.node_step) for lane in lanes])
    piece_offset = offsets([len(lane.piece_ns) for lane in lanes])
    joins = join_launches(run, matches, traces, lanes)
    parts = [
        _rank_edges(trace, lane, joins_of_rank, int(nodes), int(pieces))
        for trace, lane, joins_of_rank, nodes, pieces in zip(
            traces, lanes, joins.per_rank, node_offset[:-1], piece_offset[:-1], strict=True
        )
    ]
    edges = _concatenate([*(part.edges for part in parts), _bracket_edges(joins.members)], Edges)
    stalls = _concatenate([part.stalls for part in parts], StallNodes)
    edge_offset = np.repeat(
        offsets([len(part.edges.source) for part in parts])[:-1], [len(part.stalls.row) for part in parts]
    )
    # Joins are numbered behind the nodes of the lanes; so far they were counted from −2 downwards.
    lane_nodes = int(node_offset[-1])
    for nodes in (edges.source, edges.target, stalls.join_node):
        _number_joins(nodes, lane_nodes)
    stalls = replace(stalls, lane_edge=stalls.lane_edge + edge_offset)
    first, last = _step_nodes(lanes, node_offset)
    unordered = ReplayGraph.from_edges(lane_nodes + joins.count, edges.source, edges.target)
    graph, order = unordered.renumbered()
    place_of_edge = inverse(order.edges)
    stalls = replace(
        stalls,
        node=order.position[stalls.node],
        lane_edge=place_of_edge[stalls.lane_edge],
        join_node=np.where(stalls.join_node >= 0, order.position[stalls.join_node], -1),
    )
    segment_offset = offsets([len(lane.segments) for lane in lanes])
    return Program(
        graph=graph,
        edges=_reordered(edges, order.edges, order.position),
        segments=_concatenate([lane.segments for lane in lanes], Segments),
        transfers=joins.transfers,
        stalls=stalls,
        piece_ns=np.concatenate([lane.piece_ns for lane in lanes]),
        piece_segment=np.concatenate(
            [lane.piece_segment + offset for lane, offset in zip(lanes, segment_offset, strict=False)]
        ),
        steps=steps,
        ranks=ranks,
        first_node=order.position[first],
        last_node=order.position[last],
        start_ns=np.stack([lane.step_start for lane in lanes]),
        end_ns=np.stack([lane.step_end for lane in lanes]),
    )


def common_steps(run: Run) -> Int64:
    """Numbers of the steps that every rank recorded, ascending."""
    common: Int64 | None = None
    for trace in run.ranks.values():
        own = np.unique(trace.spans.step[trace.spans.kind == schema.STEP]).astype(np.int64)
        common = own if common is None else np.intersect1d(common, own, assume_unique=True)
    return np.zeros(0, np.int64) if common is None else common


def stage_of(trace: RankTrace) -> int:
    """The pipeline stage of a rank: as the framework told, else as its forward rows say, else 0."""
    if "pp" in trace.coordinates:
        return int(trace.coordinates["pp"])
    spans = trace.spans
    stages = spans.stage[(spans.kind == schema.FORWARD) & (spans.stage >= 0)]
    return int(stages[0]) if len(stages) else 0


def by_rank(program: Program, rank: Int64, row: Int64, values: Callable[[int], npt.NDArray[Any]]) -> Int64:
    """Of each (rank, row), the rank's value at that row."""
    picked = np.empty(len(rank), np.int64)
    # Ranks come in ascending runs: one, or one of every part that the program was joined from.
    heads = np.flatnonzero(np.diff(rank, prepend=-1))
    known = {number: values(number) for number in program.ranks.tolist()}
    for first, end in pairwise([*heads.tolist(), len(rank)]):
        picked[first:end] = known[int(rank[first])][row[first:end]]
    return picked


def _joined(programs: Sequence[Program], parts: Sequence[StepPart]) -> Program:
    """The programs of ascending ranges of steps as one."""
    nodes, edges, pieces, segments, transfers, joins, steps, instances = (
        offsets(sizes)[:-1]
        for sizes in (
            [program.graph.num_nodes for program in programs],
            [len(program.edges.source) for program in programs],
            [len(program.piece_ns) for program in programs],
            [len(program.segments) for program in programs],
            [len(program.transfers) for program in programs],
            [int(program.transfers.join.max(initial=-1)) + 1 for program in programs],
            [len(program.steps) for program in programs],
            [int(program.segments.instance.max(initial=-1)) + 1 for program in programs],
        )
    )
    moved = [
        _moved(program, part, *map(int, places))
        for program, part, *places in zip(programs, parts, nodes, edges, pieces, transfers, joins, steps, strict=True)
    ]
    renumbered = [
        replace(program.segments, step=program.segments.step + step, instance=program.segments.instance + instance)
        for program, step, instance in zip(programs, steps, instances, strict=True)
    ]
    return Program(
        graph=JoinedGraph(tuple(_graphs(programs))),
        edges=_concatenate([own for own, _, _ in moved], Edges),
        segments=_concatenate(renumbered, Segments),
        transfers=_concatenate([own for _, own, _ in moved], Transfers),
        stalls=_concatenate([own for _, _, own in moved], StallNodes),
        piece_ns=np.concatenate([program.piece_ns for program in programs]),
        piece_segment=np.concatenate(
            [program.piece_segment + offset for program, offset in zip(programs, segments, strict=True)]
        ),
        steps=np.concatenate([program.steps for program in programs]),
        ranks=programs[0].ranks,
        first_node=np.hstack([program.first_node + node for program, node in zip(programs, nodes, strict=True)]),
        last_node=np.hstack([program.last_node + node for program, node in zip(programs, nodes, strict=True)]),
        start_ns=np.hstack([program.start_ns for program in programs]),
        end_ns=np.hstack([program.end_ns for program in programs]),
    )


def _graphs(programs: Sequence[Program]) -> Iterator[ReplayGraph]:
    for program in programs:
        assert isinstance(program.graph, ReplayGraph), "parts are not joined twice"
        yield program.graph


def _moved(
    program: Program, part: StepPart, node: int, edge: int, piece: int, transfer: int, join: int, step: int
) -> tuple[Edges, Transfers, StallNodes]:
    """Edges, transfers and stalls of a part with the numbers that they have in the whole."""
    edges, transfers, stalls = program.edges, program.transfers, program.stalls
    return (
        Edges(
            edges.source + node,
            edges.target + node,
            edges.first_piece + piece,
            edges.end_piece + piece,
            np.where(edges.transfer >= 0, edges.transfer + transfer, -1),
            edges.fixed_ns,
        ),
        replace(
            transfers,
            row=by_rank(program, transfers.rank, transfers.row, part.rows.__getitem__),
            step=transfers.step + step,
            join=transfers.join + join,
        ),
        replace(
            stalls,
            row=by_rank(program, stalls.rank, stalls.row, part.rows.__getitem__),
            step=stalls.step + step,
            node=stalls.node + node,
            lane_edge=stalls.lane_edge + edge,
            join_node=np.where(stalls.join_node >= 0, stalls.join_node + node, -1),
        ),
    )


@dataclass(frozen=True, slots=True)
class _RankEdges:
    edges: Edges
    stalls: StallNodes


def _rank_edges(trace: RankTrace, lane: Lane, joins: RankJoins, node_offset: int, piece_offset: int) -> _RankEdges:
    """Edges along one lane, from it to the joins, and back from them to its stalls."""
    spans, launches = trace.spans, joins.launches
    nodes = np.arange(len(lane.node_step))
    into = np.flatnonzero(np.concatenate([[False], lane.node_step[1:] == lane.node_step[:-1]]))
    stall = np.flatnonzero(lane.node_row >= 0)
    row = lane.node_row[stall]
    waited = _launch_of_stall(spans, row, launches, lane.node_step[stall])
    known = waited >= 0
    which = np.where(known, waited, 0)

    start, end = spans.start[row], spans.end[row]
    communication_end = joins.end[which] if len(joins.end) else np.zeros(len(row), np.int64)
    waits = known & (communication_end > start)
    # After a stall that really waited the lane goes on when the communication has ended (and what little the recorder
    # saw between the two); one that found it ended only has a length of its own, which it keeps.
    along = np.zeros(len(nodes), np.int64)
    along[stall] = np.where(waits, 0, end - start)
    back_fixed = np.where(waits, end - communication_end, end - start)

    lane_edges = _edges(into - 1, into, lane.node_piece[into - 1], lane.node_piece[into], None, along[into])
    supplied = np.flatnonzero(joins.join >= 0)
    to_join = _edges(
        launches.node[supplied],
        -2 - joins.join[supplied],
        lane.node_piece[launches.node[supplied]],
        launches.piece[supplied],
        None,
        launches.extra_ns[supplied],
    )
    depends, own = _stall_edges(lane, joins, stall[known], which[known], back_fixed[known])
    edges = _shifted(_concatenate([lane_edges, to_join, depends, own], Edges), node_offset, piece_offset)

    edge_of_node = np.full(len(nodes), -1, np.int64)
    edge_of_node[into] = np.arange(len(into))
    stalls = StallNodes(
        rank=np.full(len(row), trace.rank, np.int64),
        row=row,
        step=lane.node_step[stall],
        node=stall + node_offset,
        lane_edge=edge_of_node[stall],
        join_node=np.where(known & ~_pick(joins.eager, which), -2 - _pick(joins.waits_for, which), -1),
    )
    return _RankEdges(edges, stalls)


def _launch_of_stall(spans: Spans, rows: Int64, launches: Launches, steps: Int64) -> Int64:
    """Index of the launch, in the same step, that each stall waited for; −1 where it is not known.

    Rows that are communications themselves stand for a wait without a length.
    """
    if not len(launches.row):
        return np.full(len(rows), -1)
    wanted = np.where(spans.kind[rows] == schema.STALL, spans.stalled_on[rows], spans.id[rows])
    ids = spans.id[launches.row]
    order = np.argsort(ids, kind="stable")
    found = order[np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)]
    same = (ids[found] == wanted) & (launches.step[found] == steps)
    return np.where(same & (wanted >= 0), found, -1)


def _stall_edges(lane: Lane, joins: RankJoins, node: Int64, which: Int64, fixed_ns: Int64) -> tuple[Edges, Edges]:
    """Edges that let a stall end: from the join, or, where it did not depend on others, from its own launch."""
    eager = _pick(joins.eager, which)
    on_join, on_own = np.flatnonzero(~eager), np.flatnonzero(eager | (_pick(joins.join, which) < 0))
    zeros = np.zeros(len(on_join), np.int64)
    depends = _edges(
        -2 - joins.waits_for[which[on_join]],
        node[on_join],
        zeros,
        zeros,
        joins.transfer[which[on_join]],
        fixed_ns[on_join],
    )
    launch, own = joins.launches, which[on_own]
    alone = _edges(
        launch.node[own],
        node[on_own],
        lane.node_piece[launch.node[own]],
        launch.piece[own],
        joins.transfer[own],
        launch.extra_ns[own] + fixed_ns[on_own],
    )
    return depends, alone


def _edges(
    source: Int64, target: Int64, first_piece: Int64, end_piece: Int64, transfer: Int64 | None, fixed_ns: Int64
) -> Edges:
    none = np.full(len(source), -1, np.int64)
    return Edges(source, target, first_piece, end_piece, none if transfer is None else transfer, fixed_ns)


def _bracket_edges(members: tuple[Int64, Int64]) -> Edges:
    """A bracket has started when each of its members has."""
    member, bracket = members
    zeros = np.zeros(len(member), np.int64)
    return _edges(-2 - member, -2 - bracket, zeros, zeros, None, zeros)


def _shifted(edges: Edges, node_offset: int, piece_offset: int) -> Edges:
    """The edges with the lane's nodes and pieces numbered in the whole program; joins keep their negative numbers."""
    return Edges(
        np.where(edges.source >= 0, edges.source + node_offset, edges.source),
        np.where(edges.target >= 0, edges.target + node_offset, edges.target),
        edges.first_piece + piece_offset,
        edges.end_piece + piece_offset,
        edges.transfer,
        edges.fixed_ns,
    )


def _reordered(edges: Edges, order: Int64, position: Int64) -> Edges:
    """The edges in another order, between nodes with other numbers."""
    return Edges(
        position[edges.source[order]],
        position[edges.target[order]],
        edges.first_piece[order],
        edges.end_piece[order],
        edges.transfer[order],
        edges.fixed_ns[order],
    )


def _number_joins(nodes: Int64, lane_nodes: int) -> None:
    """Give joins, counted from −2 downwards, their numbers behind the nodes of the lanes; in place."""
    np.subtract(lane_nodes - 2, nodes, out=nodes, where=nodes <= -2)


def _step_nodes(lanes: Sequence[Lane], node_offset: Int64) -> tuple[Int64, Int64]:
    edges_of_steps = [
        np.flatnonzero(lane.node_row < 0) + offset for lane, offset in zip(lanes, node_offset, strict=False)
    ]
    return np.stack([nodes[::2] for nodes in edges_of_steps]), np.stack([nodes[1::2] for nodes in edges_of_steps])


def _pick(values: npt.NDArray[Any], index: Int64) -> npt.NDArray[Any]:
    """``values[index]``, also where there are no values and the index is a placeholder."""
    return values[index] if len(values) else np.zeros(len(index), values.dtype)


_Columns = TypeVar("_Columns", Edges, Segments, StallNodes, Transfers)


def _concatenate(parts: Sequence[_Columns], kind: type[_Columns]) -> _Columns:
    return kind(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(kind)))
