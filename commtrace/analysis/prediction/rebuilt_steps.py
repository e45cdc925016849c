"""Rebuild steps from their parts, with another order or length of forwards and backwards.

Forwards and backwards make a graph of each pipeline. What follows the last backward (gradient reduction, optimizer) is
replayed as recorded, joined across ranks, from the instant at which each rank gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.prediction.changes import Changes
from commtrace.analysis.prediction.durations import Durations
from commtrace.analysis.prediction.parts import LaneParts, PipelineParts
from commtrace.analysis.prediction.pipeline_graph import PipelineGraph, pipeline_graph, places_in_a_loop
from commtrace.analysis.prediction.recorded_steps import RecordedSteps
from commtrace.analysis.replay.edges import work_between, worked_before
from commtrace.analysis.replay.graph import ReplayGraph
from commtrace.errors import ConfigurationError
from commtrace.trace.schedule import BACKWARD, FORWARD, INPUT, WEIGHTS, Action
from commtrace.trace.spans import Bool, Int64

HALF: Final = 0.5
"""Share of a backward for the gradients of weights, where the run does not tell."""


class LaneWork(NamedTuple):
    """What one rank does in a rebuilt step."""

    actions: tuple[Action, ...]
    busy_ns: Int64  # of each action
    gap_ns: Int64  # before each action
    template: tuple[Action, ...]  # the recorded action that each one stands for


@dataclass(frozen=True, slots=True)
class StageLengths:
    """How forwards and backwards of a stage change in length, and what parts of them take."""

    forward: float = 1.0  # as a factor of what they took
    backward: float = 1.0
    repeated: float = 1.0  # share of a forward that a recomputation repeats
    weights: float = HALF  # share of a backward for the gradients of weights, where the run does not tell


def work_as_recorded(parts: LaneParts) -> LaneWork:
    """Return the recorded actions in their order."""
    return LaneWork(parts.actions, parts.busy_ns, parts.gap_ns, parts.actions)


def changed_work(
    parts: LaneParts, order: Sequence[Action] | None, chunks: int, changes: Changes, lengths: StageLengths
) -> LaneWork:
    """Return the actions of a rank in ``order``, None for the recorded one, with changed lengths.

    Microbatches beyond the recorded ones take the times of the recorded ones again, in turn.
    """
    table = _ActionTable.of(parts, changes, lengths)
    if order is None:
        busy = [table.ns(table.split(action), parts.chunks) for action in parts.actions]
        return LaneWork(parts.actions, np.array(busy, np.int64), parts.gap_ns, parts.actions)
    busy = [table.ns(action, chunks) for action in order]
    letters = [action.letter for action in order]
    mean_gaps = parts.mean_gaps(set(pairwise(letters)))
    gaps = [float(parts.gap_ns[0]), *(mean_gaps[pair] for pair in pairwise(letters))]
    return LaneWork(
        tuple(order),
        np.array(busy, np.int64),
        np.rint(gaps).astype(np.int64),
        tuple(table.template(action) for action in order),
    )


@dataclass(frozen=True, slots=True)
class _ActionTable:
    """The times of forwards, backwards and their weights' part, by recorded microbatch and chunk."""

    microbatches: tuple[int, ...]
    chunks: int
    forward: Mapping[tuple[int, int], int]
    backward: Mapping[tuple[int, int], int]
    weights: Mapping[tuple[int, int], int]
    recorded: Mapping[tuple[int, int], Mapping[str, Action]]

    @classmethod
    def of(cls, parts: LaneParts, changes: Changes, lengths: StageLengths) -> _ActionTable:
        forward: dict[tuple[int, int], int] = {}
        backward: dict[tuple[int, int], int] = {}
        weights: dict[tuple[int, int], int] = {}
        recorded: dict[tuple[int, int], dict[str, Action]] = {}
        for action, busy, repeated in zip(
            parts.actions, parts.busy_ns.tolist(), parts.recompute_ns.tolist(), strict=True
        ):
            key = action.microbatch, action.chunk
            recorded.setdefault(key, {})[action.letter] = action
            if action.letter == FORWARD:
                forward[key] = round(busy * lengths.forward)
                continue
            kept = busy - repeated if changes.recompute is False else busy
            share = round(kept * lengths.backward)
            backward[key] = backward.get(key, 0) + share
            if action.letter == WEIGHTS:
                weights[key] = share
        lacking = sorted(set(forward) ^ set(backward))
        if lacking:
            raise ConfigurationError(
                f"microbatch {lacking[0][0]} has a forward or a backward only, so the schedule cannot be changed"
            )
        if changes.weight_share is not None:
            weights = {key: round(total * changes.weight_share) for key, total in backward.items()}
        elif not weights:
            weights = {key: round(total * lengths.weights) for key, total in backward.items()}
        if changes.recompute:
            backward = {key: total + round(forward[key] * lengths.repeated) for key, total in backward.items()}
        return cls(parts.microbatches, parts.chunks, forward, backward, weights, recorded)

    def ns(self, action: Action, chunks: int) -> int:
        """Return the time of an action, with so many chunks on each stage."""
        of_letter = {
            FORWARD: self._share(self.forward, action, chunks),
            WEIGHTS: self._share(self.weights, action, chunks),
        }
        if action.letter in of_letter:
            return of_letter[action.letter]
        whole = self._share(self.backward, action, chunks)
        return whole - of_letter[WEIGHTS] if action.letter == INPUT else whole

    def split(self, action: Action) -> Action:
        """Return a recorded action; a backward beside which its weights' part was recorded is that of the inputs."""
        is_part = action.letter == BACKWARD and WEIGHTS in self.recorded[action.microbatch, action.chunk]
        return action._replace(letter=INPUT) if is_part else action

    def template(self, action: Action) -> Action:
        """Return the recorded action that this one stands for."""
        microbatch = self._microbatch(action)
        by_letter = self.recorded[microbatch, min(action.chunk, self.chunks - 1)]
        for letter in (action.letter, BACKWARD, INPUT):
            if letter in by_letter and (letter == action.letter or action.letter != FORWARD):
                return by_letter[letter]
        return next(iter(by_letter.values()))

    def _microbatch(self, action: Action) -> int:
        return self.microbatches[action.microbatch % len(self.microbatches)]

    def _share(self, table: Mapping[tuple[int, int], int], action: Action, chunks: int) -> int:
        microbatch = self._microbatch(action)
        if chunks == self.chunks:
            return table[microbatch, action.chunk]
        total = sum(table[microbatch, chunk] for chunk in range(self.chunks))
        return total * (action.chunk + 1) // chunks - total * action.chunk // chunks


class RebuiltSteps(NamedTuple):
    """Rebuilt steps: the instants of all their nodes, ns from the start of each step."""

    times: Int64  # of the nodes of the recorded graph after the last action, and of the one before it
    begin: tuple[tuple[Int64, ...], ...]  # of each action, by index of the rank, then of the step
    ready: tuple[tuple[Int64, ...], ...]  # when the rank came to wait for each action's input
    phase_ns: Int64  # of each step: until the last action of any rank ends
    step_ns: Int64


def rebuild_steps(
    recorded: RecordedSteps,
    durations: Durations,
    parts: PipelineParts,
    work: Sequence[Sequence[LaneWork]],
    chunks: int,
    transfer_ns: Sequence[Sequence[float]],
) -> RebuiltSteps:
    """Rebuild all steps; ``work`` and ``transfer_ns`` are by index of the rank, then of the step.

    Raises:
        ReplayError: the actions wait for one another in a circle.
    """
    steps = len(recorded.steps)
    edges = _Edges(len(recorded.lanes.node_piece) + recorded.joins.count)
    places = parts.places if chunks == parts.chunks else places_in_a_loop(parts.stages, chunks)
    graphs: dict[tuple[tuple[Action, ...], ...], PipelineGraph] = {}
    nodes: dict[tuple[int, int], Int64] = {}  # of the ends of actions, by index of the rank and of the step
    ends: dict[tuple[int, int], int] = {}
    for step in range(steps):
        for pipeline in parts.pipelines:
            orders = tuple(work[rank][step].actions for rank in pipeline)
            graph = graphs.get(orders) or graphs.setdefault(orders, pipeline_graph(orders, places))
            first_node = edges.add_pipeline(graph, _weights(graph, pipeline, step, parts, work, transfer_ns))
            for stage, rank in enumerate(pipeline):
                nodes[rank, step] = first_node + graph.end[graph.stage == stage]
                ends[rank, step] = first_node + int(graph.last[stage])
    tail = _Tail.of(recorded, parts)
    tail.connect(edges, recorded, durations, ends)
    times = edges.times()
    end_of = np.array([ends[divmod(at, steps)] for at in range(tail.last_before.size)])
    times[tail.last_before] = times[end_of] - work_between(
        worked_before(durations.piece_ns), recorded.lanes.node_piece[tail.last_before], tail.cut_piece[tail.last_before]
    )
    ranks = range(recorded.lanes.last_node.shape[0])

    def of_all(instants: Callable[[Int64, LaneWork], Int64]) -> tuple[tuple[Int64, ...], ...]:
        return tuple(tuple(instants(nodes[rank, step], work[rank][step]) for step in range(steps)) for rank in ranks)

    return RebuiltSteps(
        times=times,
        begin=of_all(lambda end, lane: times[end] - lane.busy_ns),
        ready=of_all(lambda end, lane: times[end - 1] + lane.gap_ns),
        phase_ns=np.asarray(times[end_of].reshape(len(ranks), steps).max(axis=0)),
        step_ns=recorded.step_ns(times),
    )


def _weights(
    graph: PipelineGraph,
    pipeline: Sequence[int],
    step: int,
    parts: PipelineParts,
    work: Sequence[Sequence[LaneWork]],
    transfer_ns: Sequence[Sequence[float]],
) -> Int64:
    """Return the weights of one pipeline in one step."""
    stages = [work[rank][step] for rank in pipeline]
    transfers = np.array([round(transfer_ns[rank][step]) for rank in pipeline], np.int64)
    delays = parts.send_delay_ns[list(pipeline)]
    return graph.weights(
        np.concatenate([stage.gap_ns for stage in stages]),
        np.concatenate([stage.busy_ns for stage in stages]),
        delays[graph.stage[graph.sender]],
        transfers[graph.stage[graph.receiver]],
        receives_early=parts.receives_early,
    )


class _Edges:
    """A growing list of edges, and of nodes beyond the recorded ones."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._arrays: list[tuple[Int64, Int64, Int64]] = []

    def add(self, source: Int64, target: Int64, weight: Int64) -> None:
        self._arrays.append((source, target, weight))

    def add_pipeline(self, graph: PipelineGraph, weights: Int64) -> int:
        """Add a pipeline. Return the number of its first node."""
        first = self.nodes
        self.nodes += graph.num_nodes
        self.add(graph.source + first, graph.target + first, weights)
        return first

    def times(self) -> Int64:
        source, target, weight = (
            np.concatenate([np.asarray(arrays[at], np.int64) for arrays in self._arrays]) for at in range(3)
        )
        return ReplayGraph.from_edges(self.nodes, source, target).times(weight)


class _Tail(NamedTuple):
    """The part of the recorded graph after the last action of each rank."""

    in_tail: Bool  # of each node of the lanes
    root: Int64  # of each node of the lanes: index of its rank and step
    cut_piece: Int64  # the first piece after the last action, of each node's rank and step
    last_before: Int64  # the last node of the lane before the end of the last action, by rank and step

    @classmethod
    def of(cls, recorded: RecordedSteps, parts: PipelineParts) -> _Tail:
        lanes = recorded.lanes
        ranks, steps = lanes.first_node.shape
        nodes = len(lanes.node_piece)
        in_tail, root, cut = np.zeros(nodes, np.bool_), np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
        last_before = np.zeros(ranks * steps, np.int64)
        for rank in range(ranks):
            for step in range(steps):
                first, last = int(lanes.first_node[rank, step]), int(lanes.last_node[rank, step])
                lane_parts = parts.lanes[rank][step]
                ended = int(lane_parts.end[-1])
                before = int(np.searchsorted(lane_parts.lane.wait_begin, ended, side="left"))
                at = int(lane_parts.lane.wait_end[before - 1]) if before else 0
                node = first + before  # the last one before the end of the last action
                pieces = slice(int(lanes.node_piece[node]), int(lanes.node_piece[node + 1]))
                passed = np.searchsorted(at + np.cumsum(lanes.piece_ns[pieces]), ended, side="right")
                in_tail[node + 1 : last + 1] = True
                root[first : last + 1] = rank * steps + step
                cut[first : last + 1] = pieces.start + int(passed)
                last_before[rank * steps + step] = node
        return cls(in_tail, root, cut, last_before)

    def connect(
        self, edges: _Edges, recorded: RecordedSteps, durations: Durations, ends: Mapping[tuple[int, int], int]
    ) -> None:
        """Add the edges behind the last actions, whose end nodes are given by rank and step."""
        old, lanes = recorded.program.edges, recorded.lanes
        nodes = len(lanes.node_piece)
        steps = lanes.first_node.shape[1]
        roots = np.array([ends[divmod(at, steps)] for at in range(lanes.first_node.size)], np.int64)
        before = worked_before(durations.piece_ns)
        source, target = old.source.astype(np.int64), old.target.astype(np.int64)
        on_lane = source < nodes
        lane = np.where(on_lane, source, 0)
        weights = old.fixed_ns.copy()
        with_work = len(old.first_piece)
        behind = self.in_tail[lane[:with_work]]
        begin = np.where(behind, old.first_piece, self.cut_piece[lane[:with_work]])
        weights[:with_work] += work_between(before, begin, old.end_piece.astype(np.int64))
        first_transfer = len(old) - len(old.transfer)
        weights[first_transfer:] += np.append(durations.transfer_ns, 0)[old.transfer]
        source[:with_work] = np.where(behind, source[:with_work], roots[self.root[lane[:with_work]]])

        for_stages = np.zeros(nodes, np.bool_)
        for_stages[lanes.waits.node[recorded.between_stages]] = True
        to_lane = target < nodes
        wait = np.where(to_lane, target, 0)
        into = np.flatnonzero(~np.isin(np.arange(nodes), lanes.first_node))
        along = np.arange(len(old)) < len(into)
        # Messages between stages were placed anew: what is left of their waits takes no time.
        keep = to_lane & self.in_tail[wait] & (along | ~for_stages[wait])
        needed = np.zeros(nodes + recorded.joins.count, np.bool_)
        needed[source[keep & ~on_lane]] = True
        members = ~on_lane & ~to_lane
        needed[source[members & needed[target]]] = True
        keep |= ~to_lane & needed[target]
        edges.add(source[keep], target[keep], weights[keep])
