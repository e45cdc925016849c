"""Replay a dependency graph with other durations: ``time[target] = max(time[source] + weight)`` over incoming edges.

A node is an instant, such as the end of a stall or the arrival of the last participant of a communication.

>>> import numpy as np
>>> graph = ReplayGraph.from_edges(3, np.array([0, 0, 1]), np.array([1, 2, 2]))
>>> graph.times(np.array([5, 7, 4])).tolist()
[0, 5, 9]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import concatenated_ranges, pack
from commtrace.errors import CommtraceError
from commtrace.trace.blocks import bounds_of
from commtrace.trace.spans import Int32, Int64

_Integers = npt.NDArray[np.integer]


class ReplayError(CommtraceError):
    """The recording cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class Levels:
    """A directed acyclic graph whose nodes and edges are in the order in which it is replayed."""

    num_nodes: int
    _levels: tuple[_Level, ...]

    @property
    def num_bytes(self) -> int:
        return sum(level.sources.nbytes for level in self._levels)

    def times(self, weights: Int64, origins: Int64 | None = None) -> Int64:
        """Return the instant of every node, shape (nodes, …); ``weights`` has the shape (edges, …).

        ``origins`` are the instants of nodes without incoming edges, shaped like the result; 0 by default.
        """
        columns = weights.shape[1:]
        times: Int64 = np.zeros((self.num_nodes, *columns), np.int64)
        if origins is not None:
            roots = self._levels[0].blocks[0].nodes.start if self._levels else self.num_nodes
            times[:roots] = origins[:roots]
        for level in self._levels:
            arrivals = times[level.sources]
            arrivals += weights[level.edges]
            for block in level.blocks:
                arrivals[block.edges].reshape(block.degree, -1, *columns).max(axis=0, out=times[block.nodes])
        return times


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A directed acyclic graph, ordered for replay; nodes are numbered from 0."""

    order: Order
    levels: Levels

    @classmethod
    def from_edges(cls, num_nodes: int, sources: _Integers, targets: _Integers) -> ReplayGraph:
        """Order the graph with these edges. Raise ReplayError if they form a circle."""
        degree = np.bincount(targets, minlength=num_nodes)
        level = _levels(num_nodes, sources, targets, degree)
        # Within a level, nodes with equally many incoming edges are neighbours.
        node_order = _order(pack((level, degree)))
        position = np.empty(num_nodes, np.int32)
        position[node_order] = np.arange(num_nodes)
        blocks = _Blocks.of(level[node_order], degree[node_order])
        edge_order = blocks.edges(_order(targets), (np.cumsum(degree) - degree)[node_order])
        levels = tuple(blocks.levels(position[sources[edge_order]]))
        return cls(Order(edge_order, node_order), Levels(num_nodes, levels))

    def times(self, weights: Int64, origins: Int64 | None = None) -> Int64:
        """Return the instant of every node, shape (nodes,) or (nodes, scenarios).

        ``weights`` has the shape (edges,) or (edges, scenarios). ``origins`` are the instants of nodes without incoming
        edges, shaped like the result; 0 by default.
        """
        order = self.order
        times: Int64 = np.empty((self.levels.num_nodes, *weights.shape[1:]), np.int64)
        begin = None if origins is None else origins[order.nodes]
        times[order.nodes] = self.levels.times(weights[order.edges], begin)
        return times


@dataclass(frozen=True, slots=True)
class StepsGraph:
    """Graphs of steps, without an edge between two steps; equal ones are ordered and replayed together."""

    num_nodes: int
    _parts: tuple[_AlikeSteps, ...]

    def times(self, weights: Int64, origins: Int64 | None = None) -> Int64:
        """Return the instant of every node; see :meth:`ReplayGraph.times`."""
        times = np.empty(self.num_nodes, np.int64)
        for part in self._parts:
            begin = None if origins is None else origins[part.nodes]
            times[part.nodes] = part.levels.times(weights[part.edges], begin)
        return times


class _AlikeSteps(NamedTuple):
    """Steps with the same dependencies, one column each; or all steps that are like no other one, without columns."""

    levels: Levels
    edges: Int32  # numbers in the whole graph, in the order of the replay
    nodes: Int32  # numbers in the whole graph, in the order of the replay

    @classmethod
    def of(cls, graph: ReplayGraph, edges: Int32, nodes: Int32) -> _AlikeSteps:
        """Return these steps; ``edges`` and ``nodes`` are numbers in the whole graph, in the order of their steps."""
        return cls(graph.levels, edges[graph.order.edges], nodes[graph.order.nodes])


def graph_of_steps(sources: _Integers, targets: _Integers, step: _Integers) -> StepsGraph:
    """Return the graph with these edges, each within one step; ``step`` is of each node, from 0.

    Steps with the same edges, in any order, are replayed together: nearly all steps of a job are alike.

    >>> graph_of_steps(np.array([0, 2]), np.array([1, 3]), np.array([0, 0, 1, 1])).times(np.array([5, 7])).tolist()
    [0, 5, 0, 7]

    Raises:
        ReplayError: the edges form a circle.
    """
    nodes, sizes = _order(step), np.bincount(step)
    node_bounds = bounds_of(sizes)
    within = np.empty(len(step), np.int32)
    within[nodes] = np.arange(len(step)) - np.repeat(node_bounds[:-1], sizes)
    nodes_of_steps = [nodes[first:end] for first, end in pairwise(node_bounds)]
    edges_of_steps = _edges_of_steps(within[sources], within[targets], step[sources], len(sizes))

    alike: dict[tuple[int, bytes, bytes], list[int]] = {}
    for number, (edges, size) in enumerate(zip(edges_of_steps, sizes.tolist(), strict=True)):
        ends = _digest(within[sources[edges]]), _digest(within[targets[edges]])
        alike.setdefault((size, *ends), []).append(number)
    parts = []
    for numbers in (several for several in alike.values() if len(several) > 1):
        first = edges_of_steps[numbers[0]]
        graph = ReplayGraph.from_edges(int(sizes[numbers[0]]), within[sources[first]], within[targets[first]])
        columns = (
            np.stack([items[number] for number in numbers], axis=1) for items in (edges_of_steps, nodes_of_steps)
        )
        parts.append(_AlikeSteps.of(graph, *columns))
    others = [numbers[0] for numbers in alike.values() if len(numbers) == 1]
    if others:  # steps that are like no other one, together
        node, edge = (
            np.concatenate([items[number] for number in others]) for items in (nodes_of_steps, edges_of_steps)
        )
        position = np.empty(len(step), np.int32)
        position[node] = np.arange(len(node))
        graph = ReplayGraph.from_edges(len(node), position[sources[edge]], position[targets[edge]])
        parts.append(_AlikeSteps.of(graph, edge, node))
    return StepsGraph(len(step), tuple(parts))


def _edges_of_steps(sources: Int32, targets: Int32, step: _Integers, num_steps: int) -> list[Int32]:
    """Return the numbers of the edges of each step, by source and target within the step."""
    edges = _order(pack((step, sources, targets)))
    bounds = bounds_of(np.bincount(step, minlength=num_steps))
    return [edges[first:end] for first, end in pairwise(bounds)]


def _order(keys: npt.NDArray[np.integer]) -> Int32:
    """Return the order that sorts the keys, as 32 bits: a graph has the size of a window, of which much is indices."""
    return np.argsort(keys, kind="stable").astype(np.int32)


def _digest(numbers: Int32) -> bytes:
    return hashlib.blake2b(numbers.data, digest_size=16).digest()


class Order(NamedTuple):
    """The order in which a graph is replayed."""

    edges: Int32  # numbers, in that order
    nodes: Int32  # numbers, in that order


class _Level(NamedTuple):
    """Nodes whose edges all come from earlier levels."""

    edges: slice
    sources: Int32  # of each edge
    blocks: tuple[_Block, ...]


class _Block(NamedTuple):
    """Nodes of a level with equally many incoming edges."""

    degree: int
    nodes: slice
    edges: slice  # within the level: the first edge of each node, then the second of each, …


class _Blocks(NamedTuple):
    """Runs of ordered nodes of one level with equally many incoming edges."""

    node: Int64  # the first of each run, then the number of all nodes
    edge: Int64  # the first of each run, then the number of all edges
    level: Int32
    degree: Int64

    @classmethod
    def of(cls, level: Int32, degree: Int64) -> _Blocks:
        head = np.ones(len(level), np.bool_)
        head[1:] = (level[1:] != level[:-1]) | (degree[1:] != degree[:-1])
        first = np.flatnonzero(head)
        node = np.append(first, len(level))
        edge = np.concatenate([[0], np.cumsum(np.diff(node) * degree[first])])
        return cls(node, edge, level[first], degree[first])

    def edges(self, by_target: Int32, first: Int64) -> Int32:
        """Return the edges in the order of the blocks; ``first`` is each node's first edge among ``by_target``."""
        order = np.empty(len(by_target), np.int32)
        for begin, end, edge, degree in zip(
            self.node[:-1].tolist(), self.node[1:].tolist(), self.edge[:-1].tolist(), self.degree.tolist(), strict=True
        ):
            if not degree:
                continue
            first_edge = first[begin:end]
            nth = (first_edge + np.arange(degree)[:, None]).reshape(-1)
            order[edge : edge + len(nth)] = by_target[nth]
        return order

    def levels(self, sources: Int32) -> Iterator[_Level]:
        """Yield all levels but the first, whose nodes have no incoming edges."""
        changes = np.flatnonzero(np.diff(self.level, prepend=-1, append=-1)).tolist()
        node, edge, degrees = self.node.tolist(), self.edge.tolist(), self.degree.tolist()
        for first, end in pairwise(changes[1:]):
            begin = edge[first]
            blocks = tuple(
                _Block(degrees[at], slice(node[at], node[at + 1]), slice(edge[at] - begin, edge[at + 1] - begin))
                for at in range(first, end)
            )
            yield _Level(slice(begin, edge[end]), sources[begin : edge[end]], blocks)


def _levels(num_nodes: int, sources: _Integers, targets: _Integers, degree: Int64) -> Int32:
    """Return the length, in edges, of the longest path to each node; ``degree`` counts incoming edges."""
    by_source = _order(sources)
    successors = targets[by_source]
    first = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=num_nodes))])
    waiting = degree.astype(np.int32)
    level = np.zeros(num_nodes, np.int32)
    listed = np.empty(num_nodes, np.int32)
    frontier = np.flatnonzero(waiting == 0)
    reached, depth = len(frontier), 0
    while len(frontier):
        depth += 1
        following = successors[concatenated_ranges(first[frontier], first[frontier + 1])]
        np.subtract.at(waiting, following, np.int32(1))
        # A node may follow several of these: it is listed once, where it was written last.
        ready = following[waiting[following] == 0]
        listed[ready] = number = np.arange(len(ready), dtype=np.int32)
        frontier = ready[listed[ready] == number]
        level[frontier] = depth
        reached += len(frontier)
    if reached < num_nodes:
        raise ReplayError(
            f"{num_nodes - reached} of {num_nodes} recorded events wait for one another in a circle: communications "
            "of different ranks were matched wrongly, or spans are missing."
        )
    return level
