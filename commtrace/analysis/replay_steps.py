"""The graph of a run whose steps do the same over and over: ordered once, replayed with one column per step.

Which events depend on which is the same in nearly all steps of a job; only the durations differ. Steps are recognised
as alike by their edges, whatever the order in which these were listed; the order of replay is found for one of them.

>>> graph = graph_of_steps(np.array([0, 2]), np.array([1, 3]), np.array([0, 0, 1, 1]))
>>> graph.times(np.array([5, 7])).tolist()
[0, 5, 0, 7]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.keys import pack
from commtrace.analysis.replay import JoinedGraph, ReplayError, ReplayGraph
from commtrace.trace.blocks import bounds_of
from commtrace.trace.order import stable_order
from commtrace.trace.spans import Int64

_MOST_SORTS: Final = 4
"""Of steps that are told apart. What is like none of these is replayed as it is."""


def graph_of_steps(sources: Int64, targets: Int64, step: Int64) -> ReplayGraph | JoinedGraph:
    """The graph that has an edge from each of ``sources`` to each of ``targets``; its times are those of the graph
    that :meth:`ReplayGraph.from_edges` makes of these.

    Args:
        sources, targets: both of one step.
        step: of each node, from 0.

    Raises:
        ReplayError: the edges form a circle.
    """
    graph = _Steps.of(sources, targets, step)
    alike, rest = graph.sorts()
    if not alike:
        return ReplayGraph.from_edges(len(step), sources, targets)
    try:
        graphs = [graph.copies(steps) for steps in alike]
        if rest:
            graphs.append(graph.as_they_are(rest))
    except ReplayError:
        return ReplayGraph.from_edges(len(step), sources, targets)  # fails likewise, and counts all events
    nodes, edges = ([numbers(steps) for steps in [*alike, rest]] for numbers in (graph.nodes, graph.edges))
    if len(graphs) == 1:
        return graphs[0].renumbered(nodes[0], edges[0])
    return JoinedGraph(tuple(graphs), tuple(edges[: len(graphs)]), tuple(nodes[: len(graphs)]))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Nodes and edges, step by step.

    Attributes:
        node_order: the nodes, by step; ``node_bounds`` tells where each step begins among them.
        edge_order: the edges, by step, by source and by target; ``edge_bounds`` as before.
        source, target: of the edges in this order: numbers of nodes within their step.
    """

    node_order: Int64
    node_bounds: Int64
    edge_order: Int64
    edge_bounds: Int64
    source: Int64
    target: Int64

    @classmethod
    def of(cls, sources: Int64, targets: Int64, step: Int64) -> _Steps:
        node_order = stable_order(step)
        node_bounds = bounds_of(np.bincount(step))
        within = np.empty(len(step), np.int64)
        within[node_order] = np.arange(len(step)) - np.repeat(node_bounds[:-1], np.diff(node_bounds))
        step_of_edge, source, target = step.take(sources), within.take(sources), within.take(targets)
        edge_order = stable_order(pack((step_of_edge, source, target)))
        edge_bounds = bounds_of(np.bincount(step_of_edge, minlength=len(node_bounds) - 1))
        return cls(node_order, node_bounds, edge_order, edge_bounds, source.take(edge_order), target.take(edge_order))

    def sorts(self) -> tuple[list[list[int]], list[int]]:
        """The steps, those together that are alike; and the steps that are like few others or none."""
        sorts: list[list[int]] = []
        rest: list[int] = []
        for step in range(len(self.node_bounds) - 1):
            like = next((own for own in sorts if self._are_alike(own[0], step)), None)
            if like is not None:
                like.append(step)
            elif len(sorts) < _MOST_SORTS:
                sorts.append([step])
            else:
                rest.append(step)
        rest += [own[0] for own in sorts if len(own) == 1]
        return [own for own in sorts if len(own) > 1], sorted(rest)

    def _are_alike(self, one: int, other: int) -> bool:
        return len(self._own_nodes(one)) == len(self._own_nodes(other)) and all(
            np.array_equal(column[self._own(one)], column[self._own(other)]) for column in (self.source, self.target)
        )

    def copies(self, steps: Sequence[int]) -> ReplayGraph:
        """The graph of these steps, which are alike, numbered one step behind the other."""
        return self._graph(steps[:1]).repeated(len(steps))

    def as_they_are(self, steps: Sequence[int]) -> ReplayGraph:
        """The graph of these steps, numbered likewise."""
        return self._graph(steps)

    def _graph(self, steps: Sequence[int]) -> ReplayGraph:
        begins = bounds_of([len(self._own_nodes(step)) for step in steps])
        source, target = (
            np.concatenate([column[self._own(step)] + begin for step, begin in zip(steps, begins, strict=False)])
            for column in (self.source, self.target)
        )
        return ReplayGraph.from_edges(int(begins[-1]), source, target)

    def nodes(self, steps: Sequence[int]) -> Int64:
        """The nodes of these steps, one step behind the other."""
        return np.concatenate([self.node_order[:0], *(self._own_nodes(step) for step in steps)])

    def edges(self, steps: Sequence[int]) -> Int64:
        """Their edges."""
        return np.concatenate([self.edge_order[:0], *(self.edge_order[self._own(step)] for step in steps)])

    def _own(self, step: int) -> slice:
        return slice(self.edge_bounds[step], self.edge_bounds[step + 1])

    def _own_nodes(self, step: int) -> Int64:
        return self.node_order[self.node_bounds[step] : self.node_bounds[step + 1]]
