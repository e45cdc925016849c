"""Replays a dependency graph with other durations: the engine under the pipeline and the what-if analysis.

A node is an instant (a rank goes on after a stall, the last participant of a communication has arrived), an edge says
"not before that long after": ``time[target] = max(time[source] + weight)`` over the edges into it. Changing weights and
computing the times again answers what would have happened.

>>> import numpy as np
>>> graph = ReplayGraph.from_edges(3, np.array([0, 0, 1]), np.array([1, 2, 2]))
>>> graph.times(np.array([5, 7, 4])).tolist()
[0, 5, 9]

Nodes are processed level by level, all nodes of a level (of all ranks and all steps) at once. Weights may have a second
dimension: one column per scenario.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import concatenated_ranges, pack
from commtrace.errors import CommtraceError
from commtrace.trace.order import stable_order
from commtrace.trace.spans import Int64


class ReplayError(CommtraceError):
    """The recording cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A directed acyclic graph, ordered for replay.

    Attributes:
        num_nodes: nodes are numbered from 0.
        num_edges: how many edges there are.
        copies: of how many equal graphs it consists, which are replayed at once, each in a column of its own.
    """

    num_nodes: int
    num_edges: int
    _order: _Order
    _levels: tuple[_Level, ...]
    copies: int = 1

    @classmethod
    def from_edges(cls, num_nodes: int, sources: Int64, targets: Int64) -> ReplayGraph:
        """Order the graph that has an edge from each of ``sources`` to each of ``targets``.

        Raises:
            ReplayError: the edges form a circle.
        """
        degree = np.bincount(targets, minlength=num_nodes)
        level = _levels(num_nodes, sources, targets, degree)
        # Nodes that as many edges lead to stand together within their level.
        node_order = stable_order(pack((level, degree)))
        position = inverse(node_order)
        blocks = _Blocks.of(level[node_order], degree[node_order])
        edge_order = blocks.edges(stable_order(targets), (np.cumsum(degree) - degree)[node_order])
        levels = tuple(blocks.levels(position[sources[edge_order]]))
        return cls(num_nodes, len(sources), _Order(edge_order, node_order, position), levels)

    def repeated(self, nodes: Int64, edges: Int64) -> ReplayGraph:
        """Copies of this graph; these are, row by row, the numbers of the nodes and edges of each."""
        new = nodes.T.take(self._order.nodes, axis=0).reshape(-1)
        order = _Order(edges.T.take(self._order.edges, axis=0).reshape(-1), new, inverse(new))
        return ReplayGraph(nodes.size, edges.size, order, self._levels, len(nodes))

    def times(
        self, weights: npt.NDArray[np.int64], origins: Int64 | None = None, nodes: Int64 | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the instant of every node.

        Args:
            weights: per edge; of shape (edges,) or (edges, scenarios).
            origins: per node, the instant of those without an edge into them; 0 by default.
            nodes: only the instants of these are wanted.

        Returns:
            Instants of shape (nodes,) or (nodes, scenarios).
        """
        scenarios = weights.shape[1:]
        columns = (self.copies, *scenarios) if self.copies > 1 else scenarios
        times: npt.NDArray[np.int64] = np.empty((self.num_nodes, *scenarios), np.int64)
        roots = self._order.nodes[: self._num_roots]
        times[: len(roots)] = 0 if origins is None else origins[roots].reshape(-1, *(1 for _ in scenarios))
        self._replay(weights.take(self._order.edges, axis=0).reshape(-1, *columns), times.reshape(-1, *columns))
        return times.take(self._order.position if nodes is None else self._order.position[nodes], axis=0)

    @property
    def _num_roots(self) -> int:
        """Nodes that no edge leads to, the first ones in the order of replay."""
        return self._levels[0].blocks[0][1].start * self.copies if self._levels else self.num_nodes

    def _replay(self, weights: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> None:
        """Fill in the times of all nodes that edges lead to; both in the order of replay, of shape (…, columns)."""
        columns = times.shape[1:]
        for level in self._levels:
            arrivals = times.take(level.sources, axis=0)
            arrivals += weights[level.edges]
            for degree, nodes, edges in level.blocks:
                if degree == 1:
                    times[nodes] = arrivals[edges]
                else:
                    arrivals[edges].reshape(degree, -1, *columns).max(axis=0, out=times[nodes])


@dataclass(frozen=True, slots=True)
class JoinedGraph:
    """Graphs without an edge between them.

    Attributes:
        edges, nodes: of each graph, the numbers that its edges and nodes have in the whole.
    """

    graphs: tuple[ReplayGraph, ...]
    edges: tuple[Int64, ...]
    nodes: tuple[Int64, ...]

    @property
    def num_nodes(self) -> int:
        return sum(graph.num_nodes for graph in self.graphs)

    def times(
        self, weights: npt.NDArray[np.int64], origins: Int64 | None = None, nodes: Int64 | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the instant of every node; see :meth:`ReplayGraph.times`."""
        times = np.empty((self.num_nodes, *weights.shape[1:]), np.int64)
        for graph, edges, own in zip(self.graphs, self.edges, self.nodes, strict=True):
            times[own] = graph.times(weights[edges], None if origins is None else origins[own])
        return times if nodes is None else times[nodes]


class _Order(NamedTuple):
    """In which order a graph is replayed.

    Attributes:
        edges, nodes: the number of each edge and node in that order.
        position: of each node, its place in that order.
    """

    edges: Int64
    nodes: Int64
    position: Int64


class _Level(NamedTuple):
    """Nodes whose edges all come from earlier levels.

    Attributes:
        edges: those that lead to them; ``sources`` is where each comes from.
        blocks: of nodes with equally many edges: how many, which nodes, and their edges among those of the level:
            first one of each node, then the second one of each, ….
    """

    edges: slice
    sources: Int64
    blocks: tuple[tuple[int, slice, slice], ...]


class _Blocks(NamedTuple):
    """Runs of ordered nodes that are of one level and have equally many edges.

    Attributes:
        node, edge: the first of each, and behind the last one how many there are.
        level, degree: of each.
    """

    node: Int64
    edge: Int64
    level: Int64
    degree: Int64

    @classmethod
    def of(cls, level: Int64, degree: Int64) -> _Blocks:
        """From the ordered nodes."""
        head = np.ones(len(level), np.bool_)
        head[1:] = (level[1:] != level[:-1]) | (degree[1:] != degree[:-1])
        first = np.flatnonzero(head)
        node = np.append(first, len(level))
        edge = np.concatenate([[0], np.cumsum(np.diff(node) * degree[first])])
        return cls(node, edge, level[first], degree[first])

    def edges(self, by_target: Int64, first: Int64) -> Int64:
        """Return the order of edges that blocks need: the first one into each of their nodes, then the second of each,
        ….

        Args:
            by_target: edges by the node that they lead to.
            first: of each ordered node, its first one among these.
        """
        order = np.empty(len(by_target), np.int64)
        for begin, end, edge, degree in zip(
            self.node[:-1].tolist(), self.node[1:].tolist(), self.edge[:-1].tolist(), self.degree.tolist(), strict=True
        ):
            if not degree:
                continue
            own = first[begin:end]
            nth = own if degree == 1 else (own + np.arange(degree)[:, None]).reshape(-1)
            order[edge : edge + len(nth)] = by_target[nth]
        return order

    def levels(self, sources: Int64) -> Iterator[_Level]:
        """Yield all levels but the first, whose nodes no edge leads to."""
        changes = np.flatnonzero(np.diff(self.level, prepend=-1, append=-1)).tolist()
        node, edge, degrees = self.node.tolist(), self.edge.tolist(), self.degree.tolist()
        for first, end in pairwise(changes[1:]):
            begin = edge[first]
            blocks = tuple(
                (degrees[at], slice(node[at], node[at + 1]), slice(edge[at] - begin, edge[at + 1] - begin))
                for at in range(first, end)
            )
            yield _Level(slice(begin, edge[end]), sources[begin : edge[end]], blocks)


def inverse(order: Int64) -> Int64:
    """Return where each number stands in an order."""
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position


def _levels(num_nodes: int, sources: Int64, targets: Int64, degree: Int64) -> Int64:
    """Return the longest path, in edges, that leads to each node; ``degree`` counts the edges into each."""
    by_source = stable_order(sources)
    successors = targets[by_source]
    first = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=num_nodes))])
    waiting = degree.astype(np.int32)
    level = np.zeros(num_nodes, np.int64)
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
