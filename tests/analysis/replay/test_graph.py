"""A replayed graph: exact instants, other weights, circles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.replay.graph import ReplayError, ReplayGraph


def test_a_node_waits_for_the_latest_of_its_edges() -> None:
    graph = ReplayGraph.from_edges(4, np.array([0, 1, 2, 2]), np.array([2, 2, 3, 3]))

    assert graph.times(np.array([5, 8, 1, 2])).tolist() == [0, 0, 8, 10]


def test_nodes_without_edges_start_at_their_origin() -> None:
    graph = ReplayGraph.from_edges(3, np.array([0, 1]), np.array([2, 2]))

    assert graph.times(np.array([5, 1]), origins=np.array([0, 10, 0])).tolist() == [0, 10, 11]


def test_scenarios_are_columns() -> None:
    graph = ReplayGraph.from_edges(3, np.array([0, 1]), np.array([1, 2]))

    assert graph.times(np.array([[5, 50], [1, 10]])).tolist() == [[0, 0], [5, 50], [6, 60]]


def test_a_circle_cannot_be_replayed() -> None:
    with pytest.raises(ReplayError, match="2 of 3 recorded events wait for one another in a circle"):
        ReplayGraph.from_edges(3, np.array([0, 1, 2]), np.array([1, 2, 1]))


def test_a_graph_without_edges() -> None:
    graph = ReplayGraph.from_edges(2, np.zeros(0, np.int64), np.zeros(0, np.int64))

    assert graph.times(np.zeros(0, np.int64)).tolist() == [0, 0]


@given(st.integers(2, 12), st.data())
def test_any_graph_gives_the_longest_paths(nodes: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=30))
    edges = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    weights = data.draw(st.lists(st.integers(0, 100), min_size=len(edges), max_size=len(edges)))
    shuffled = data.draw(st.permutations(range(nodes)))
    longest = [0] * nodes
    for (source, target), weight in sorted(zip(edges, weights, strict=True)):
        longest[target] = max(longest[target], longest[source] + weight)

    sources, targets = np.array([(shuffled[a], shuffled[b]) for a, b in edges] or np.zeros((0, 2)), np.int64).T
    times = ReplayGraph.from_edges(nodes, sources, targets).times(np.array(weights, np.int64))

    assert [times[shuffled[node]] for node in range(nodes)] == longest
