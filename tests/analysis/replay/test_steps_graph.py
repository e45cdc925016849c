"""Steps that do the same are replayed as one graph, whatever the order of their edges; others as they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.replay.graph import ReplayError, ReplayGraph, graph_of_steps
from commtrace.trace.spans import Int64

Edges = list[tuple[int, int]]

DIAMOND: Edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
CHAIN: Edges = [(0, 1), (1, 2), (2, 3)]


def columns(edges: Edges) -> tuple[Int64, Int64]:
    sources, targets = np.array(edges or np.zeros((0, 2)), np.int64).T
    return sources, targets


def behind(steps: list[Edges], nodes: int = 4) -> tuple[Edges, Int64]:
    """The edges of steps of so many nodes, one behind the other; and the step of each node."""
    edges = [(a + nodes * step, b + nodes * step) for step, own in enumerate(steps) for a, b in own]
    return edges, np.repeat(np.arange(len(steps)), nodes)


def test_steps_that_are_alike_are_columns_of_one_graph() -> None:
    edges, step = behind([DIAMOND, DIAMOND[::-1], DIAMOND])

    graph = graph_of_steps(*columns(edges), step)

    assert [part.nodes.shape for part in graph._parts] == [(4, 3)]
    # The edges of the second step are listed backwards.
    weights = np.array([1, 2, 10, 20, 200, 100, 2, 1, 5, 5, 5, 6])
    assert graph.times(weights).tolist() == [0, 1, 2, 22, 0, 1, 2, 202, 0, 5, 5, 11]


def test_nodes_may_be_numbered_in_any_order() -> None:
    graph = graph_of_steps(np.array([3, 2]), np.array([0, 1]), np.array([0, 1, 1, 0]))

    assert graph.times(np.array([5, 7]), origins=np.array([0, 0, 100, 10])).tolist() == [15, 107, 100, 10]


def test_a_step_that_differs_is_replayed_beside_the_others() -> None:
    edges, step = behind([DIAMOND, CHAIN, DIAMOND])

    graph = graph_of_steps(*columns(edges), step)

    assert [part.nodes.shape for part in graph._parts] == [(4, 2), (4,)]
    weights = np.arange(1, 12)
    assert graph.times(weights).tolist() == ReplayGraph.from_edges(12, *columns(edges)).times(weights).tolist()


def test_steps_that_are_like_no_other_are_replayed_together() -> None:
    edges, step = behind([DIAMOND, CHAIN])

    graph = graph_of_steps(*columns(edges), step)

    assert [part.nodes.shape for part in graph._parts] == [(8,)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_circle_cannot_be_replayed(steps: int) -> None:
    edges, step = behind([[(0, 1), (1, 0)]] * steps, nodes=2)

    with pytest.raises(ReplayError, match="2 of 2 recorded events"):
        graph_of_steps(*columns(edges), step)


def ascending(nodes: int) -> st.SearchStrategy[Edges]:
    pairs = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    return st.lists(pairs.filter(lambda pair: pair[0] < pair[1]), max_size=8)


@given(st.lists(ascending(4), min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=9), st.data())
def test_times_are_those_of_the_whole_graph(sorts: list[Edges], chosen: list[int], data: st.DataObject) -> None:
    edges, step = behind([sorts[one % len(sorts)] for one in chosen])
    edges = data.draw(st.permutations(edges))
    number = np.array(data.draw(st.permutations(range(len(step)))), np.int64)
    step_of = np.empty(len(step), np.int64)
    step_of[number] = step
    sources, targets = (number[column] for column in columns(edges))
    weights = np.array([data.draw(st.integers(0, 50)) for _ in edges], np.int64)
    origins = np.array([data.draw(st.integers(0, 50)) for _ in step], np.int64)

    whole = ReplayGraph.from_edges(len(step), sources, targets)
    found = graph_of_steps(sources, targets, step_of)

    assert found.times(weights, origins).tolist() == whole.times(weights, origins).tolist()
