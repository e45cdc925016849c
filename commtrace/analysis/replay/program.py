"""Build the dependency graph of a recorded run, which can be replayed with other durations.

Per rank and step, the compute lane is a chain of work and stalls; communications start on it. A communication ends, on
each participant, its *transfer* after the last participant started: its measured end minus the latest start. So waiting
is no duration. A participant that was done before the last one started (an eager send, the root of a broadcast) ends
its own duration after its own start. Steps are replayed one by one, each from a common start of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.matching.match import Matches
from commtrace.analysis.replay.edges import (
    Edges,
    Joins,
    ReplayTransfers,
    StallNodes,
    connect,
    join_launches,
    no_longer_than_their_stalls,
    work_between,
    worked_before,
)
from commtrace.analysis.replay.graph import ReplayError, StepsGraph, graph_of_steps
from commtrace.analysis.replay.lanes import Lanes, Launches, ReadLanes, concatenate_lanes, read_lanes
from commtrace.analysis.replay.segments import LaneRows, WorkSegments
from commtrace.analysis.replay.step_bounds import StepBounds
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run, told_stage
from commtrace.trace.spans import Int32, Int64


@dataclass(frozen=True)
class Program:
    """The dependency graph of some steps of a run, and the measured durations."""

    step_of_node: Int32  # index
    edges: Edges
    segments: WorkSegments
    transfers: ReplayTransfers
    stalls: StallNodes
    piece_ns: Int64
    piece_segment: Int32
    steps: Int64  # numbers, ascending
    ranks: Int64  # ascending
    first_node: Int64  # start of each step, shape (ranks, steps)
    last_node: Int64  # end of each step, shape (ranks, steps)
    start_ns: Int64  # the same as measured, shape (ranks, steps)
    end_ns: Int64
    between_ns: Int64  # of the recorded step, before ``start_ns``

    @classmethod
    def of(cls, run: Run, joined: JoinedLanes, steps: Int64) -> Program:
        """Connect the lanes of these steps, which were read from ``run``."""
        lanes, _, joins = joined
        edges, stalls = connect(lanes, joins)
        return cls(
            step_of_node=_step_of_node(lanes, joins),
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
            between_ns=lanes.between_ns,
        )

    @cached_property
    def graph(self) -> StepsGraph:
        return graph_of_steps(self.edges.source, self.edges.target, self.step_of_node)

    def times(
        self,
        segment_ns: npt.NDArray[np.int64] | None = None,
        transfer_ns: npt.NDArray[np.int64] | None = None,
        origins: Int64 | None = None,
    ) -> Int64:
        """Return the instants of all nodes (None: as measured); ``origins`` are those of ``first_node``, else 0."""
        return self.graph.times(self._weights(self._work_ns(segment_ns), transfer_ns), self._origins(origins))

    def step_times(
        self, segment_ns: npt.NDArray[np.int64] | None = None, transfer_ns: npt.NDArray[np.int64] | None = None
    ) -> Int64:
        """Return the replayed duration of every step, ns: the latest end of all ranks after a common start.

        With the time between it and the step before, as it was measured.
        """
        times = self.graph.times(self._weights(self._work_ns(segment_ns), transfer_ns))
        return np.asarray(times[self.last_node].max(axis=0) + self.between_step_times())

    def measured_step_times(self) -> Int64:
        """Return the recorded duration of every step, ns: the mean over ranks."""
        return np.asarray(np.rint((self.end_ns - self.start_ns + self.between_ns).mean(axis=0)), np.int64)

    def between_step_times(self) -> Int64:
        """Return the time between every step and the one before, which no replay changes, ns: the mean over ranks."""
        return np.asarray(np.rint(self.between_ns.mean(axis=0)), np.int64)

    def scaled_pieces(self, segment_ns: Int64 | None) -> Int64:
        """Return the duration of each piece with these durations of segments, ns."""
        if segment_ns is None:
            return self.piece_ns
        measured = np.maximum(self.segments.total_ns, 1)
        scaled = (segment_ns / measured)[self.piece_segment]
        scaled *= self.piece_ns
        return np.rint(scaled, out=scaled).astype(np.int64)

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
    """Build the dependency graph of steps that every rank recorded whole; by default of all such steps.

    Raises:
        ReplayError: no step was recorded by all ranks, or the recording contradicts itself.
    """
    if steps is None:
        steps = common_steps(run)
    if not len(steps):
        raise ReplayError("No step was recorded by all ranks, so nothing can be replayed.")
    return Program.of(run, join_lanes(run, matches, steps), steps)


class JoinedLanes(NamedTuple):
    """The lanes of all ranks with the communications that join them: what a program is made of."""

    lanes: Lanes
    launches: Launches
    joins: Joins


def join_lanes(run: Run, matches: Matches, steps: Int64) -> JoinedLanes:
    """Read the lanes of these steps, which every rank recorded, and join their communications."""
    lanes, launches = _lanes(run, matches, StepBounds.of(run, steps))
    joins = join_launches(run, launches, clocks_agree=matches.clocks_agree)
    return JoinedLanes(lanes, launches, no_longer_than_their_stalls(joins, lanes.waits))


def _step_of_node(lanes: Lanes, joins: Joins) -> Int32:
    """Return the index of the step of each node: those of the lanes, then those of the joins."""
    ranks, steps = lanes.first_node.shape
    per_step = (lanes.last_node - lanes.first_node + 1).reshape(-1)
    return np.concatenate([np.repeat(np.tile(np.arange(steps, dtype=np.int32), ranks), per_step), joins.step])


def _lanes(run: Run, matches: Matches, bounds: StepBounds) -> ReadLanes:
    parts = []
    for block in run.blocks:
        stages = np.array([class_of(run.ranks[rank]) for rank in block.ranks], np.int64)
        rows = LaneRows.of(run, block)
        parts.append(read_lanes(rows, matches, stages, bounds.of_ranks(rows.ranks)))
    return concatenate_lanes(parts)


def common_steps(run: Run) -> Int64:
    """Return numbers of the steps that every rank recorded, ascending."""
    steps_of_ranks = [np.unique(trace.spans.step[trace.spans.kind == schema.STEP]) for trace in run.ranks.values()]
    steps, ranks = np.unique(np.concatenate([np.zeros(0, np.int32), *steps_of_ranks]), return_counts=True)
    return np.asarray(steps[ranks == len(steps_of_ranks)], np.int64)


def stage_of(trace: RankTrace) -> int:
    """Return the pipeline stage of a rank; 0 if nothing tells it."""
    return told_stage(trace) or 0


def class_of(trace: RankTrace) -> int:
    """Return a number that is equal for ranks that do the same work: the stage, or what messages show."""
    return stage_of(trace) if trace.work_class is None else trace.work_class
