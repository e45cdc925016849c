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

from commtrace.analysis.replay.graph import JoinedGraph, ReplayError, ReplayGraph
from commtrace.trace.blocks import bounds_of
from commtrace.trace.order import stable_order
from commtrace.trace.spans import Int64

_MOST_SORTS: Final = 4
"""Of steps that are told apart. What is like none of these is replayed as it is."""


def graph_of_steps(sources: Int64, targets: Int64, step: Int64) -> ReplayGraph | JoinedGraph:
    """Return the graph that has an edge from each of ``sources`` to each of ``targets``; its times are those of the
    graph that :meth:`ReplayGraph.from_edges` makes of these.

    Args:
        sources, targets: both of one step.
        step: of each node, from 0.

    Raises:
        ReplayError: the edges form a circle.
    """
    all_steps = _Steps.of(sources, targets, step)
    alike, rest = all_steps.sorts()
    try:
        once = [all_steps.graph(own[:1]) for own in alike]
        others = [all_steps.graph(rest)] if rest and alike else []
    except ReplayError:
        alike = []  # the whole graph fails likewise, and its message counts all events
    if not alike:
        return ReplayGraph.from_edges(len(step), sources, targets)
    numbers = [all_steps.numbers(own) for own in [*alike, rest][: len(once) + len(others)]]
    if len(numbers) == 1:
        return once[0].repeated(*numbers[0])
    copies = [graph.repeated(*map(_counted, own)) for graph, own in zip(once, numbers, strict=False)]
    nodes, edges = zip(*((nodes.reshape(-1), edges.reshape(-1)) for nodes, edges in numbers), strict=True)
    return JoinedGraph((*copies, *others), edges, nodes)


def _counted(numbers: Int64) -> Int64:
    """As many numbers from 0, row by row."""
    return np.arange(numbers.size).reshape(numbers.shape)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Nodes and edges, step by step.

    Attributes:
        nodes: by step; ``node_bounds`` tells where each step begins among them.
        edges: by step, source and target; ``edge_bounds`` as before.
        ends: of each of these edges, the number of its source within the step, times ``stride``, plus that of its
            target.
        stride: more than any step has nodes.
    """

    nodes: Int64
    node_bounds: Int64
    edges: Int64
    edge_bounds: Int64
    ends: Int64
    stride: int

    @classmethod
    def of(cls, sources: Int64, targets: Int64, step: Int64) -> _Steps:
        nodes, node_bounds = stable_order(step), bounds_of(np.bincount(step))
        sizes = np.diff(node_bounds)
        stride = int(sizes.max(initial=0)) + 1
        within = np.empty(len(step), np.int64)
        within[nodes] = np.arange(len(step)) - np.repeat(node_bounds[:-1], sizes)
        ends = (within + step * stride).take(sources)
        ends *= stride
        ends += within.take(targets)
        edges = stable_order(ends)
        ends = ends.take(edges)
        edge_bounds = np.searchsorted(ends, np.arange(len(sizes) + 1) * stride**2)
        ends -= np.repeat(np.arange(len(sizes)) * stride**2, np.diff(edge_bounds))
        return cls(nodes, node_bounds, edges, edge_bounds, ends, stride)

    def sorts(self) -> tuple[list[list[int]], list[int]]:
        """Return the steps, those together that are alike; and the steps that are like few others or none."""
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
        sizes = np.diff(self.node_bounds)
        return sizes[one] == sizes[other] and np.array_equal(self.ends[self._own(one)], self.ends[self._own(other)])

    def graph(self, steps: Sequence[int]) -> ReplayGraph:
        """Return the graph of these steps, nodes and edges of one numbered behind those of the one before."""
        begins = bounds_of(np.diff(self.node_bounds)[[*steps]])
        ends = [np.divmod(self.ends[self._own(step)], self.stride) for step in steps]
        sources, targets = (
            np.concatenate([column + begin for column, begin in zip(columns, begins[:-1], strict=True)])
            for columns in zip(*ends, strict=True)
        )
        return ReplayGraph.from_edges(int(begins[-1]), sources, targets)

    def numbers(self, steps: Sequence[int]) -> tuple[Int64, Int64]:
        """In that order, which nodes and edges they are: a row for each step if all have equally many."""
        return _of_steps(self.nodes, self.node_bounds, steps), _of_steps(self.edges, self.edge_bounds, steps)

    def _own(self, step: int) -> slice:
        return slice(self.edge_bounds[step], self.edge_bounds[step + 1])


def _of_steps(numbers: Int64, bounds: Int64, steps: Sequence[int]) -> Int64:
    """See :meth:`_Steps.numbers`; no copy of those of steps that follow one another."""
    if steps[-1] - steps[0] + 1 == len(steps):
        own = numbers[bounds[steps[0]] : bounds[steps[-1] + 1]]
    else:
        own = np.concatenate([numbers[bounds[step] : bounds[step + 1]] for step in steps])
    sizes = np.diff(bounds)[[*steps]]
    return own.reshape(len(steps), -1) if (sizes == sizes[0]).all() else own
