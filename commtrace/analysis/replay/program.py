"""A recorded run as a dependency graph that can be replayed with other durations.

Per rank and step the compute lane is a chain of work and stalls on communications. A communication starts at a position
of that chain; it ends, on each participant, its *transfer* after the last participant started.

* The transfer of a participant is its measured end minus the latest start, so waiting is not a duration but follows
  from the graph.
* A participant that was done before the last one started (the eager send of a small message, the root of a broadcast)
  did not depend on it: it ends its own duration after its own start. Those that start later still depend on it.
* Steps are replayed one by one, each from a common start of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.edges import (
    Edges,
    Joins,
    StallNodes,
    Transfers,
    connect,
    join_launches,
    work_between,
    worked_before,
)
from commtrace.analysis.replay.graph import ReplayError, StepsGraph, graph_of_steps
from commtrace.analysis.replay.lanes import Lanes, ReadLanes, concatenate_lanes, read_lanes
from commtrace.analysis.replay.segments import LaneRows, Segments, same_work
from commtrace.analysis.replay.step_bounds import StepBounds
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int32, Int64


@dataclass(frozen=True, slots=True)
class Program:
    """The dependency graph of some steps of a run, and the measured durations.

    Attributes:
        steps: the step numbers, ascending.
        ranks: the ranks, ascending.
        first_node, last_node: start and end of each step on each rank, shape (ranks, steps).
        start_ns, end_ns: the same instants as measured, shape (ranks, steps).
        work: of each segment, a number from 0 that those share which are the same work (:func:`same_work`).
    """

    graph: StepsGraph
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
    work: Int64

    def times(
        self,
        segment_ns: npt.NDArray[np.int64] | None = None,
        transfer_ns: npt.NDArray[np.int64] | None = None,
        origins: Int64 | None = None,
    ) -> Int64:
        """Return instants of all nodes with these durations; the measured ones where None.

        ``origins`` are those of ``first_node``, shape (ranks, steps); 0 by default.
        """
        return self.graph.times(self._weights(self._work_ns(segment_ns), transfer_ns), self._origins(origins))

    def stall_waits(self, chosen: Int64, segment_ns: Int64 | None = None, transfer_ns: Int64 | None = None) -> Int64:
        """Return how long the lane stood in each of these stalls before the last participant had started.

        Every step of every rank starts when it was measured to start.
        """
        work_ns = self._work_ns(segment_ns)
        stalls, lane_edge = self.stalls, self.stalls.lane_edge[chosen]
        join = stalls.join_node[chosen]
        times = self.graph.times(self._weights(work_ns, transfer_ns), self._origins(self.start_ns))
        begin = times[self.edges.source[lane_edge]] + work_ns[lane_edge]
        ready = np.where(join >= 0, times[join], begin)
        return np.asarray(np.maximum(np.minimum(ready, times[stalls.node[chosen]]) - begin, 0))

    def step_times(
        self, segment_ns: npt.NDArray[np.int64] | None = None, transfer_ns: npt.NDArray[np.int64] | None = None
    ) -> Int64:
        """Return the replayed duration of every step, ns: the latest end of all ranks after a common start."""
        times = self.graph.times(self._weights(self._work_ns(segment_ns), transfer_ns))
        return np.asarray(times[self.last_node].max(axis=0))

    def measured_step_times(self) -> Int64:
        """Return the recorded duration of every step, ns: the mean over ranks."""
        return np.asarray(np.rint((self.end_ns - self.start_ns).mean(axis=0)), np.int64)

    def scaled_pieces(self, segment_ns: Int64 | None) -> Int64:
        """Return what each piece lasts where its segment lasts this long, ns."""
        if segment_ns is None:
            return self.piece_ns
        measured = np.maximum(self.segments.total_ns, 1)
        return np.rint(self.piece_ns * (segment_ns / measured)[self.piece_segment]).astype(np.int64)

    def _origins(self, origins: Int64 | None) -> Int64 | None:
        if origins is None:
            return None
        at = np.zeros(self.graph.num_nodes, np.int64)
        at[self.first_node] = origins
        return at

    def _weights(self, work_ns: Int64, transfer_ns: Int64 | None) -> Int64:
        return self.edges.weights(work_ns, self.transfers.ns if transfer_ns is None else transfer_ns)

    def _work_ns(self, segment_ns: Int64 | None) -> Int64:
        if segment_ns is None:
            return self.edges.work_ns
        before = worked_before(self.scaled_pieces(segment_ns))
        return work_between(before, self.edges.first_piece, self.edges.end_piece)


def build_program(run: Run, matches: Matches, steps: Int64 | None = None) -> Program:
    """Build the dependency graph of steps.

    Args:
        run: with aligned clocks.
        matches: its communications, joined.
        steps: numbers of steps that every rank recorded whole, ascending; all of these where None.

    Raises:
        ReplayError: no step was recorded by all ranks, or what was recorded contradicts itself.
    """
    if steps is None:
        steps = common_steps(run)
    if not len(steps):
        raise ReplayError("No step was recorded by all ranks, so nothing can be replayed.")
    lanes, launches = _lanes(run, matches, StepBounds.of(run, steps))
    joins = join_launches(run, launches, clocks_agree=matches.clocks_agree)
    edges, stalls = connect(lanes, joins)
    return Program(
        graph=graph_of_steps(edges.source, edges.target, _step_of_node(lanes, joins)),
        edges=edges,
        segments=lanes.segments,
        transfers=joins.transfers,
        stalls=stalls,
        piece_ns=lanes.piece_ns,
        piece_segment=lanes.piece_segment,
        steps=steps,
        ranks=np.array(sorted(run.ranks), np.int64),
        first_node=lanes.first_node,
        last_node=lanes.last_node,
        start_ns=lanes.step_start,
        end_ns=lanes.step_end,
        work=same_work(lanes.segments),
    )


def _step_of_node(lanes: Lanes, joins: Joins) -> Int64:
    ranks, steps = lanes.first_node.shape
    per_step = (lanes.last_node - lanes.first_node + 1).reshape(-1)
    return np.concatenate([np.repeat(np.tile(np.arange(steps), ranks), per_step), joins.step])


def _lanes(run: Run, matches: Matches, bounds: StepBounds) -> ReadLanes:
    parts = []
    for block in run.blocks:
        stages = np.array([stage_of(run.ranks[rank]) for rank in block.ranks], np.int64)
        rows = LaneRows.of(run, block)
        parts.append(read_lanes(rows, matches, stages, bounds.of_ranks(rows.ranks)))
    return concatenate_lanes(parts)


def common_steps(run: Run) -> Int64:
    """Return numbers of the steps that every rank recorded, ascending."""
    own = [np.unique(trace.spans.step[trace.spans.kind == schema.STEP]) for trace in run.ranks.values()]
    return reduce(np.intersect1d, own).astype(np.int64) if own else np.zeros(0, np.int64)


def stage_of(trace: RankTrace) -> int:
    """Return the pipeline stage of a rank: as the framework told, else as its forward rows say, else 0."""
    if "pp" in trace.coordinates:
        return int(trace.coordinates["pp"])
    spans = trace.spans
    stages = spans.stage[(spans.kind == schema.FORWARD) & (spans.stage >= 0)]
    return int(stages[0]) if len(stages) else 0


def by_rank(program: Program, rank: Int32, row: Int32, values: Callable[[int], npt.NDArray[Any]]) -> Int64:
    """Return the value of its rank at each row; ranks come in ascending runs."""
    picked = np.empty(len(rank), np.int64)
    # Ranks come in ascending runs.
    heads = np.flatnonzero(np.diff(rank, prepend=-1))
    known = {number: values(number) for number in program.ranks.tolist()}
    for first, end in pairwise([*heads.tolist(), len(rank)]):
        picked[first:end] = known[int(rank[first])][row[first:end]]
    return picked
