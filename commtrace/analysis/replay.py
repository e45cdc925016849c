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

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from commtrace.errors import CommtraceError
from commtrace.trace.spans import Int64


class ReplayError(CommtraceError):
    """What was recorded cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A directed acyclic graph, ordered for replay.

    Attributes:
        num_nodes: nodes are numbered from 0.
        sources: node from which each edge starts.
        targets: node to which it leads.
    """

    num_nodes: int
    sources: Int64
    targets: Int64
    _edge_order: Int64
    _node_order: Int64
    _position: Int64
    _levels: tuple[_Level, ...]

    @classmethod
    def from_edges(cls, num_nodes: int, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> ReplayGraph:
        """Order the graph.

        Raises:
            ReplayError: the edges form a circle.
        """
        level = _levels(num_nodes, sources, targets)
        node_order = np.argsort(level, kind="stable")
        position = np.empty(num_nodes, np.int64)
        position[node_order] = np.arange(num_nodes)
        place = position[targets]
        edge_order = np.argsort(place, kind="stable")
        levels = _level_slices(level[node_order], place[edge_order], position[sources[edge_order]])
        return cls(num_nodes, sources, targets, edge_order, node_order, position, levels)

    def times(self, weights: npt.NDArray[np.int64], origins: Int64 | None = None) -> npt.NDArray[np.int64]:
        """The instant of every node.

        Args:
            weights: per edge; of shape (edges,) or (edges, scenarios).
            origins: per node, the instant of those without an edge into them; 0 by default.

        Returns:
            Instants of shape (nodes,) or (nodes, scenarios).
        """
        ordered = weights[self._edge_order]
        shape: tuple[int, ...] = (self.num_nodes, *weights.shape[1:])
        times: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        if origins is not None:
            times += origins[self._node_order].reshape(-1, *([1] * (weights.ndim - 1)))
        for level in self._levels:
            arrivals = times[level.sources] + ordered[level.edges]
            if level.heads is not None:
                arrivals = np.maximum.reduceat(arrivals, level.heads, axis=0)
            times[level.nodes] = arrivals
        return times[self._position]


@dataclass(frozen=True, slots=True)
class JoinedGraph:
    """Graphs without an edge between them, numbered one behind the other."""

    graphs: tuple[ReplayGraph, ...]

    @property
    def num_nodes(self) -> int:
        return sum(graph.num_nodes for graph in self.graphs)

    def times(self, weights: npt.NDArray[np.int64], origins: Int64 | None = None) -> npt.NDArray[np.int64]:
        """The instant of every node; see :meth:`ReplayGraph.times`."""
        edges = np.cumsum([len(graph.sources) for graph in self.graphs])[:-1]
        nodes = np.cumsum([graph.num_nodes for graph in self.graphs])[:-1]
        starts = [None] * len(self.graphs) if origins is None else np.split(origins, nodes)
        return np.concatenate(
            [
                graph.times(own, start)
                for graph, own, start in zip(self.graphs, np.split(weights, edges), starts, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes whose edges all come from earlier levels; ``heads`` is None where each has one edge."""

    nodes: slice
    edges: slice
    sources: Int64
    heads: Int64 | None


def _levels(num_nodes: int, sources: Int64, targets: Int64) -> Int64:
    """The longest path, in edges, that leads to each node."""
    by_source = np.argsort(sources, kind="stable")
    successors = targets[by_source]
    first = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=num_nodes))])
    waiting = np.bincount(targets, minlength=num_nodes)
    level = np.zeros(num_nodes, np.int64)
    frontier = np.flatnonzero(waiting == 0)
    reached, depth = len(frontier), 0
    while len(frontier):
        depth += 1
        following = successors[_concatenated_ranges(first[frontier], first[frontier + 1])]
        np.subtract.at(waiting, following, 1)
        frontier = np.unique(following[waiting[following] == 0])
        level[frontier] = depth
        reached += len(frontier)
    if reached < num_nodes:
        raise ReplayError(
            f"{num_nodes - reached} of {num_nodes} recorded events wait for one another in a circle: communications "
            "of different ranks were matched wrongly, or spans are missing."
        )
    return level


def _concatenated_ranges(first: Int64, end: Int64) -> Int64:
    """``arange(first[0], end[0])``, ``arange(first[1], end[1])``, … in one array."""
    lengths = end - first
    offsets = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(first - offsets, lengths))


def _level_slices(level_of_node: Int64, targets: Int64, sources: Int64) -> tuple[_Level, ...]:
    """The slices of nodes and edges of each level but the first, whose nodes no edge leads to."""
    node_bounds = np.searchsorted(level_of_node, np.arange(level_of_node[-1] + 2 if len(level_of_node) else 1))
    edge_bounds = np.searchsorted(targets, node_bounds)
    is_head = np.ones(len(targets), np.bool_)
    is_head[1:] = targets[1:] != targets[:-1]
    levels = []
    for (node, node_end), (edge, edge_end) in zip(pairwise(node_bounds[1:]), pairwise(edge_bounds[1:]), strict=True):
        heads = np.flatnonzero(is_head[edge:edge_end])
        several = len(heads) < edge_end - edge
        levels.append(
            _Level(slice(node, node_end), slice(edge, edge_end), sources[edge:edge_end], heads if several else None)
        )
    return tuple(levels)
