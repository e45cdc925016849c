"""The link between two nodes that carries less than the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.communication.links import NodeLink, NodeTraffic, find_slow_links, measure_links, usual_gbps
from commtrace.analysis.matching.match import match
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p

MIB = 1 << 20
MESSAGES = NodeTraffic("send", 2, 20)
WORLD = group("world", 0, 1, 2)


def exchange(times: Mapping[tuple[int, int], int], num_bytes: int = MIB, calls: int = 3) -> Run:
    """Ranks 0, 1, 2 on nodes a, b, c; each message begins when both ends are there, and takes so many ns."""
    rows: dict[int, list[Row]] = {0: [], 1: [], 2: []}
    begin = 0
    for seq in range(calls):
        for (source, target), taken in times.items():
            end = begin + taken
            rows[source].append(p2p("send", WORLD, target, seq, begin, end, bytes=num_bytes))
            rows[target].append(p2p("recv", WORLD, source, seq, begin - 5, end, bytes=num_bytes))
            begin = end + 100
    return make_run(rows, [WORLD], nodes={0: "a", 1: "b", 2: "c"})


def links_of(run: Run) -> list[NodeLink]:
    return measure_links(run, match(run)).links()


def link(source: str, target: str, gbps: float, traffic: NodeTraffic = MESSAGES) -> NodeLink:
    return NodeLink(traffic, source, target, 3, gbps)


def test_a_message_is_of_the_link_from_its_sender_to_its_receiver() -> None:
    assert links_of(exchange({(0, 1): MIB, (1, 0): 2 * MIB})) == [link("a", "b", 1.0), link("b", "a", 0.5)]


def test_messages_that_are_small_or_few_say_nothing_about_a_link() -> None:
    assert links_of(exchange({(0, 1): MIB}, num_bytes=MIB - 1)) == []
    assert links_of(exchange({(0, 1): MIB}, calls=2)) == []


def test_a_collective_is_of_a_link_where_its_group_is_on_two_nodes() -> None:
    pair = group("dp", 0, 1)
    rows = {
        rank: [collective("all_reduce", own, seq, 0 + seq * 4 * MIB, (seq * 4 + 2) * MIB, bytes=MIB) for seq in range(3)
               for own in (pair, WORLD) if rank in own.ranks]
        for rank in range(3)
    }  # fmt: skip
    run = make_run(rows, [pair, WORLD], nodes={0: "a", 1: "b", 2: "c"})

    assert links_of(run) == [link("a", "b", 0.5, NodeTraffic("all_reduce", 2, 20))]


def test_one_direction_is_slow() -> None:
    slow = find_slow_links([link("a", "b", 0.1), link("b", "a", 1.0)])

    assert slow is not None
    assert (slow.links, slow.usual_gbps, slow.within_nodes) == ((link("a", "b", 0.1),), 1.0, False)
    assert slow.common_node is None


def test_a_bad_node_of_three_is_what_its_links_have_in_common() -> None:
    times = {(0, 1): MIB, (1, 0): MIB, (0, 2): 8 * MIB, (2, 0): 9 * MIB, (1, 2): 8 * MIB, (2, 1): 7 * MIB}
    slow = find_slow_links(links_of(exchange(times)))

    assert slow is not None
    assert [(one.source, one.target) for one in slow.links] == [("c", "a"), ("a", "c"), ("b", "c"), ("c", "b")]
    assert (slow.usual_gbps, slow.common_node) == (1.0, "c")


def test_the_only_pair_of_nodes_is_compared_with_what_passes_within_them() -> None:
    pair, inside = link("a", "b", 0.1), link("a", "a", 1.0)
    slow = find_slow_links([pair, inside])

    assert slow is not None
    assert (slow.links, slow.usual_gbps, slow.within_nodes) == ((pair,), 1.0, True)


@given(
    st.lists(
        st.builds(
            link,
            st.just("a"),
            st.sampled_from(["a", "b"]),
            st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
            st.sampled_from([MESSAGES, NodeTraffic("all_reduce", 2, 20)]),
        ),
        max_size=25,
    )
)
def test_the_usual_time_is_the_upper_quartile_of_the_others(links: list[NodeLink]) -> None:
    expected = []
    for number, one in enumerate(links):
        others = [
            other.gbps
            for place, other in enumerate(links)
            if place != number and (other.traffic, other.target) == (one.traffic, one.target)
        ]
        expected.append(float(np.percentile(others, 75, method="higher")) if others else None)

    assert usual_gbps(links) == expected


@pytest.mark.parametrize(
    "links",
    [
        [],
        [link("a", "b", 0.1)],  # nothing to compare with
        [link("a", "b", 0.6), link("b", "a", 1.0)],
        [link("a", "b", 0.1), link("b", "a", 1.0, NodeTraffic("send", 2, 21))],  # of another size
        # All links between nodes are alike, and slower than memory: that is how clusters are.
        [link("a", "b", 0.1), link("a", "c", 0.1), link("b", "c", 0.1), link("a", "a", 1.0)],
    ],
)
def test_no_link_is_named(links: list[NodeLink]) -> None:
    assert find_slow_links(links) is None


@pytest.mark.parametrize("column", ["start_exact", "end_exact"])
def test_bounds_say_nothing_about_a_link(column: str) -> None:
    """Of four messages from a to b one seems to take four times as long."""
    run = exchange({(0, 1): MIB}, calls=4)
    spans = run.ranks[1].spans
    last = np.arange(4) == 3
    bound = spans.replace(end=spans.end + last * 3 * MIB, **{column: ~last})
    changed = {**run.ranks, 1: replace(run.ranks[1], spans=bound)}

    assert links_of(replace(run, ranks=changed)) == [link("a", "b", 1.0)]
