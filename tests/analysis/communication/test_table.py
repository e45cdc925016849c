from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.breakdown.partition import partition
from commtrace.analysis.communication.table import (
    Communication,
    Detail,
    communication_table,
    with_exact_rates,
)
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.roles import find_roles
from commtrace.trace.metadata import Group
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.json_reading import read_back
from tests.pipeline_factory import PipelineJob

PAIR = group("dp", 0, 1)


def table(run: Run) -> dict[tuple[str, str], Communication]:
    """The rows by role and operation."""
    matches, roles = match(run), find_roles(run)
    rows = communication_table(run, matches, partition(run, matches, roles), roles)
    assert len({(row.role, row.operation, row.group_size) for row in rows}) == len(rows)
    return {(row.role, row.operation): row for row in rows}


def step(*rows: Row) -> list[Row]:
    return [span("step", 0, 10_000, step=0), *rows]


def test_a_row_computed_by_hand() -> None:
    """Rank 0 comes at 100 and stalls, rank 1 comes at 400 and computes until 600; both are done at 800."""
    mine = collective("all_reduce", PAIR, 0, 100, 800, id=1, bytes=1_200)
    theirs = collective("all_reduce", PAIR, 0, 400, 800, id=1, bytes=1_200, is_async=True)
    run = make_run({0: step(mine, stall(mine, 100, 800)), 1: step(theirs, stall(theirs, 600, 800))}, [PAIR])
    assert table(run)["dp", "all_reduce"].to_json() == {
        "role": "dp",
        "operation": "all_reduce",
        "group_size": 2,
        "inter_node": False,
        "count": 2,
        "bytes": 2_400,
        "unsized": 0,
        "duration_ns": {"p50": 400, "p99": 700, "max": 700, "sum": 1_100},
        "durations_are_bounds": False,
        "algbw_gbps": 2_400 / 800,  # two calls of 1200 bytes, 400 ns of transfer each
        "busbw_gbps": 2_400 / 800,
        "bandwidth_time": "transfer",
        "bandwidth_is_bound": False,
        "needed_busbw_gbps": None,  # no rank computed
        "exposed_ns": 900,
        "exposed_ratio": 900 / 1_100,
        "hidden_ns": 200,
        "wait_ns": 300,
        "unfinished": 0,
        "unmatched": 0,
        "mismatched": 0,
        "replayed": 0,
        "upper_bounds": 0,
    }


def test_the_bandwidth_that_would_hide_it_is_bytes_over_compute() -> None:
    """Each of two ranks reduces 1200 bytes (factor 1) and computes for 600 ns: 2 bytes per ns."""
    rows = {}
    for rank in (0, 1):
        reduce = collective("all_reduce", PAIR, 0, 600, 800, id=1, bytes=1_200)
        rows[rank] = step(span("forward", 0, 600, step=0), reduce, stall(reduce, 600, 800))
    assert table(make_run(rows, [PAIR]))["dp", "all_reduce"].needed_busbw_gbps == 2.0


@pytest.mark.parametrize(("gbps", "seconds", "hides"), [(300, 0.053, True), (25, 0.64, False), (50, 0.32, True)])
def test_a_network_is_fast_enough_where_it_carries_what_is_needed(gbps: float, seconds: float, hides: bool) -> None:
    """16 GB of gradients and 0.42 s of compute, by NVLink, at 200 and at 400 Gbit/s."""
    compute, transfer = 420_000_000, round(16 / gbps * 1e9)
    end = compute + transfer
    reduce = collective("all_reduce", PAIR, 0, compute, end, id=1, bytes=16 * 10**9, step=0)
    rows = [span("step", 0, end, step=0), span("forward", 0, compute, step=0), reduce, stall(reduce, compute, end)]
    row = table(make_run({0: rows, 1: rows}, [PAIR]))["dp", "all_reduce"]

    assert read_back(row.to_json())["duration_ns"]["max"] == transfer == pytest.approx(seconds * 1e9, rel=0.01)
    assert row.busbw_gbps == pytest.approx(gbps)
    assert row.needed_busbw_gbps == pytest.approx(16 / 0.42)
    assert row.busbw_gbps is not None
    assert row.needed_busbw_gbps is not None
    assert (row.busbw_gbps > row.needed_busbw_gbps) == hides == (transfer < compute)


def test_hidden_communication_needs_no_other_bandwidth() -> None:
    rows = {
        rank: step(span("forward", 0, 600, step=0), collective("all_reduce", PAIR, 0, 100, 300, id=1, bytes=1_200))
        for rank in (0, 1)
    }
    assert table(make_run(rows, [PAIR]))["dp", "all_reduce"].needed_busbw_gbps is None


def test_communication_within_a_node_and_between_nodes_are_two_rows() -> None:
    inside, outside = group("dp", 0, 1), group("dp", 1, 2)
    rows = {
        0: step(collective("all_reduce", inside, 0, 0, 100, id=1)),
        1: step(
            collective("all_reduce", inside, 0, 0, 100, id=1), collective("all_reduce", outside, 0, 100, 400, id=2)
        ),
        2: step(collective("all_reduce", outside, 0, 100, 400, id=2)),
    }
    run = make_run(rows, [inside, outside], nodes={0: "a", 1: "a", 2: "b"})
    matches, roles = match(run), find_roles(run)
    found = communication_table(run, matches, partition(run, matches, roles), roles)
    assert sorted((row.inter_node, row.count, row.busbw_gbps) for row in found) == [
        (False, 2, 1024 / 100),
        (True, 2, 1024 / 300),
    ]


def test_a_group_of_which_a_member_was_not_recorded_has_no_known_reach() -> None:
    run = make_run({0: step(collective("all_reduce", PAIR, 0, 0, 100))}, [PAIR], world_size=2)
    assert table(run)["dp", "all_reduce"].inter_node is None


def test_a_message_reaches_as_far_as_its_peer() -> None:
    world = group("pp", 0, 1, 2)
    rows = {
        0: step(p2p("send", world, 1, 0, 0, 10), p2p("send", world, 2, 0, 10, 20)),
        1: step(p2p("recv", world, 0, 0, 0, 10)),
        2: step(p2p("recv", world, 0, 0, 10, 20)),
    }
    run = make_run(rows, [world], nodes={0: "a", 1: "a", 2: "b"})
    matches, roles = match(run), find_roles(run)
    found = communication_table(run, matches, partition(run, matches, roles), roles)
    assert sorted((row.operation, row.inter_node) for row in found) == [
        ("recv", False), ("recv", True), ("send", False), ("send", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [(0, (0, 1)), (1, (1, 2)), (1023, (512, 1024)), (1024, (1024, 2048)), (1 << 40, (1 << 40, 1 << 41))],
)
def test_calls_are_told_apart_by_size(num_bytes: int, size: tuple[int, int]) -> None:
    run = make_run({0: step(collective("all_reduce", PAIR, 0, 0, 100, bytes=num_bytes))}, [PAIR], world_size=2)
    matches, roles = match(run), find_roles(run)
    (row,) = communication_table(run, matches, partition(run, matches, roles), roles, detail=Detail.SIZE)
    assert row.size == size
    assert (row.to_json()["bytes_from"], row.to_json()["bytes_to"]) == size


def test_one_large_call_is_told_from_a_thousand_small_ones_of_the_same_bytes() -> None:
    large = collective("all_reduce", PAIR, 0, 0, 40_000_000, bytes=4 * 10**9)
    small = [
        collective("all_reduce", PAIR, 1 + number, start, start + 400_000, bytes=4 * 10**6)
        for number, start in enumerate(range(40_000_000, 440_000_000, 400_000))
    ]
    rows = [span("step", 0, 440_000_000, step=0), large, *small]
    run = make_run({0: rows, 1: rows}, [PAIR])
    matches, roles = match(run), find_roles(run)
    found = communication_table(run, matches, partition(run, matches, roles), roles, detail=Detail.SIZE)

    assert {row.size: (row.count, row.num_bytes, row.busbw_gbps) for row in found} == {
        (2**31, 2**32): (2, 8 * 10**9, 100.0),
        (2**21, 2**22): (2_000, 8 * 10**9, 10.0),
    }


def by_size(run: Run) -> dict[tuple[str, tuple[int, int] | None], tuple[int, int]]:
    """Calls and exposed time by operation and size."""
    matches, roles = match(run), find_roles(run)
    rows = communication_table(run, matches, partition(run, matches, roles), roles, detail=Detail.SIZE)
    return {(row.operation, row.size): (row.count, row.exposed_ns) for row in rows}


def test_a_stall_has_the_size_of_its_call() -> None:
    small = collective("all_reduce", PAIR, 0, 0, 100, id=1, bytes=8)
    large = collective("all_reduce", PAIR, 1, 100, 900, id=2, bytes=4_096)
    run = make_run({0: step(small, stall(small, 10, 100), large, stall(large, 300, 900))}, [PAIR], world_size=2)
    assert by_size(run) == {("all_reduce", (8, 16)): (1, 90), ("all_reduce", (4_096, 8_192)): (1, 600)}


def test_a_stall_on_a_bracket_has_the_size_of_the_whole() -> None:
    members = [collective("all_reduce", PAIR, 0, 0, 100, op_in_seq=index, bytes=600, id=index) for index in (0, 1)]
    run = make_run({0: step(*members, stall(members[1], 10, 100))}, [PAIR], world_size=2)
    assert by_size(run) == {("all_reduce", (1_024, 2_048)): (1, 90)}


def test_the_size_of_what_was_not_recorded_is_unknown() -> None:
    lost = collective("all_reduce", PAIR, 0, 0, 100, id=1, bytes=8)
    assert by_size(make_run({0: step(stall(lost, 10, 100))}, [PAIR], world_size=2)) == {("all_reduce", None): (0, 90)}


def test_calls_are_told_apart_by_group() -> None:
    pairs = [group("tp", 0, 1), group("tp", 2, 3)]
    rows = {
        rank: step(collective("all_reduce", pairs[rank // 2], 0, 0, 100 * (1 + rank // 2), id=1)) for rank in range(4)
    }
    run = make_run(rows, pairs)
    matches, roles = match(run), find_roles(run)
    found = communication_table(run, matches, partition(run, matches, roles), roles, detail=Detail.GROUP)
    assert [(row.ranks, row.duration_max_ns) for row in found] == [((2, 3), 200), ((0, 1), 100)]


def test_unmatched_calls_divide_by_their_duration_and_say_so() -> None:
    run = make_run({0: step(collective("all_gather", PAIR, 0, 0, 100, bytes=1_000))}, [PAIR], world_size=2)
    row = table(run)["dp", "all_gather"]
    assert (row.bandwidth_time, row.algbw_gbps, row.busbw_gbps) == ("duration", 10.0, 5.0)
    assert (row.wait_ns, row.unmatched) == (None, 1)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (collective("barrier", PAIR, 0, 0, 100, bytes=-1), PAIR),
        (collective("all_reduce", group("tp", 0), 0, 0, 100), group("tp", 0)),
        (collective("all_reduce", PAIR, 0, 100, 100), PAIR),
    ],
    ids=["barrier", "group of one", "no time"],
)
def test_operations_without_a_bandwidth_show_none(row: Row, where: Group) -> None:
    run = make_run({0: step(row)}, [where], world_size=2)
    (found,) = table(run).values()
    assert (found.algbw_gbps, found.busbw_gbps, found.bandwidth_time) == (None, None, None)


def test_an_uneven_all_to_all_sends_what_it_does_not_keep() -> None:
    rows = {
        rank: step(collective("all_to_all", PAIR, 0, 0, 100, bytes=1_000, self_bytes=kept))
        for rank, kept in {0: 400, 1: 600}.items()
    }
    row = table(make_run(rows, [PAIR]))["dp", "all_to_all"]
    assert (row.algbw_gbps, row.busbw_gbps) == (1_000 / 200, 1_000 / 200)


def test_a_coalesced_bracket_counts_once_per_operation_with_the_bytes_of_its_members() -> None:
    members = [
        collective(name, PAIR, 0, 0, 100, op_in_seq=index, bytes=size, id=index)
        for index, (name, size) in enumerate([("all_gather", 100), ("all_gather", 300), ("all_reduce", 50)])
    ]
    run = make_run({0: step(*members, stall(members[0], 50, 100))}, [PAIR], world_size=2)
    gather, reduce = table(run)["dp", "all_gather"], table(run)["dp", "all_reduce"]
    assert (gather.count, gather.num_bytes, gather.duration_sum_ns) == (1, 400, 100)
    assert (reduce.count, reduce.num_bytes, reduce.duration_sum_ns) == (1, 50, 100)
    # The lane stalled on the bracket: what ran meanwhile is not hidden, whichever member the stall names.
    assert (gather.hidden_ns, reduce.hidden_ns) == (50, 50)


def test_a_call_that_never_ended_has_no_duration() -> None:
    run = make_run(
        {0: step(collective("all_reduce", PAIR, 0, 0, 0, id=9))},
        [PAIR],
        world_size=2,
        details={9: '{"unfinished": true}'},
    )
    row = table(run)["dp", "all_reduce"]
    assert (row.count, row.unfinished, row.duration_p50_ns, row.duration_sum_ns) == (1, 1, None, 0)
    assert row.exposed_ratio is None


def test_percentiles_are_durations_that_occurred() -> None:
    rows = [collective("all_reduce", PAIR, number, 0, number + 1) for number in range(200)]
    row = table(make_run({0: step(*rows)}, [PAIR]))["dp", "all_reduce"]
    assert (row.duration_p50_ns, row.duration_p99_ns, row.duration_max_ns) == (100, 198, 200)


def test_time_lost_to_what_was_not_recorded_is_in_the_table_without_a_call() -> None:
    lost = collective("all_reduce", PAIR, 0, 10, 30, id=1)
    row = table(make_run({0: step(stall(lost, 10, 30))}, [PAIR]))["dp", "all_reduce"]
    assert (row.count, row.exposed_ns) == (0, 20)


def test_groups_of_different_sizes_are_different_rows() -> None:
    small, large = group("dp", 0, 1), group("dp", 0, 1, 2)
    rows = step(collective("all_reduce", small, 0, 0, 1), collective("all_reduce", large, 0, 2, 3))
    run = make_run({0: rows}, [small, large], world_size=3)
    matches, roles = match(run), find_roles(run)
    found = communication_table(run, matches, partition(run, matches, roles), roles)
    assert sorted(row.group_size or 0 for row in found) == [2, 3]


def test_messages_count_on_both_sides() -> None:
    pipeline = group("pp", 0, 1)
    rows = {0: step(p2p("send", pipeline, 1, 0, 0, 100)), 1: step(p2p("recv", pipeline, 0, 0, 50, 100))}
    found = table(make_run(rows, [pipeline]))
    assert {key: (row.count, row.wait_ns) for key, row in found.items()} == {
        ("pp", "send"): (1, 50),
        ("pp", "recv"): (1, 0),
    }


def test_the_table_exposes_as_much_as_the_partition() -> None:
    run = PipelineJob(3, 5, data_parallel=2, transfer_ns=1_000, all_reduce_ns=70_000, extra_forward_ns={2: 900}).run()
    matches, roles = match(run), find_roles(run)
    parts = partition(run, matches, roles)
    exposed = sum(row.exposed_ns for row in communication_table(run, matches, parts, roles))
    kinds = ("exposed wait", "exposed transfer", "bubble")
    assert exposed == np.sum([parts.total(kind) for kind in kinds])


def test_nothing_communicated_is_an_empty_table() -> None:
    assert table(make_run({0: step(span("forward", 0, 10))})) == {}


def in_flight(*exact: tuple[bool, bool]) -> Run:
    """Two ranks with calls of 100 ns and 1200 bytes one after another; by call, whether start and end are exact."""
    calls = [
        collective(
            "all_reduce", PAIR, seq, 100 * seq, 100 * seq + 100, id=seq, bytes=1_200, start_exact=start, end_exact=end
        )
        for seq, (start, end) in enumerate(exact)
    ]
    return make_run({rank: step(*calls) for rank in (0, 1)}, [PAIR])


def test_an_end_that_nothing_measured_is_counted_as_an_upper_bound() -> None:
    """Of four calls behind compute two are over at an unknown time; one is stalled on to its end, one measured."""
    calls = [
        collective("all_reduce", PAIR, seq, 100 * seq, 100 * seq + 50, id=seq, is_async=True, end_exact=seq > 1)
        for seq in range(4)
    ]
    run = make_run({0: step(*calls, stall(calls[2], 200, 250))}, [PAIR], world_size=2)

    row = table(run)["dp", "all_reduce"]
    assert (row.count, row.upper_bounds, row.hidden_ns) == (4, 2, 150)
    assert not row.durations_are_bounds


@pytest.mark.parametrize("bound", [(False, True), (True, False), (False, False)])
def test_medians_and_bandwidths_are_of_exact_calls_if_there_are_any(bound: tuple[bool, bool]) -> None:
    mixed = make_run(
        {
            rank: step(
                collective("all_reduce", PAIR, 0, 0, 100, bytes=1_200),
                collective("all_reduce", PAIR, 1, 100, 900, bytes=1_200, start_exact=bound[0], end_exact=bound[1]),
            )
            for rank in (0, 1)
        },
        [PAIR],
    )

    row = table(mixed)["dp", "all_reduce"]

    assert (row.busbw_gbps, row.bandwidth_time, row.bandwidth_is_bound) == (12.0, "transfer", False)
    assert (row.duration_p50_ns, row.duration_max_ns, row.durations_are_bounds) == (100, 100, False)
    assert (row.count, row.upper_bounds, row.duration_sum_ns) == (4, 2, 1_800)


@pytest.mark.parametrize("last", [4, 1_200])
def test_a_few_exact_bytes_do_not_stand_for_many(last: int) -> None:
    """Twenty buckets of gradients, of which the last or the reduction of the loss alone has a measured end."""
    calls = [
        collective(
            "all_reduce", PAIR, seq, 100 * seq, 100 * seq + 80, id=seq,
            bytes=1_200 if seq < 20 else last, end_exact=seq == 20,
        )
        for seq in range(21)
    ]  # fmt: skip
    row = table(make_run({rank: step(*calls) for rank in (0, 1)}, [PAIR]))["dp", "all_reduce"]

    assert (row.bandwidth_is_bound, row.durations_are_bounds) == (True, True)
    assert row.busbw_gbps == pytest.approx((20 * 1_200 + last) / (21 * 80))
    assert (row.duration_p50_ns, row.upper_bounds) == (80, 40)


def test_exact_calls_with_half_of_the_bytes_stand_for_all() -> None:
    calls = [
        collective("all_reduce", PAIR, 0, 0, 100, id=0, bytes=2_400),
        collective("all_reduce", PAIR, 1, 100, 900, id=1, bytes=1_200, end_exact=False),
        collective("all_reduce", PAIR, 2, 900, 1_700, id=2, bytes=1_200, end_exact=False),
    ]
    row = table(make_run({rank: step(*calls) for rank in (0, 1)}, [PAIR]))["dp", "all_reduce"]

    assert (row.busbw_gbps, row.bandwidth_is_bound) == (24.0, False)
    assert (row.duration_p50_ns, row.durations_are_bounds) == (100, False)


def test_rates_from_bounds_alone_are_marked_as_lower_bounds() -> None:
    row = table(in_flight((False, True), (True, False)))["dp", "all_reduce"]

    assert (row.busbw_gbps, row.bandwidth_is_bound) == (12.0, True)
    assert (row.duration_p50_ns, row.durations_are_bounds, row.upper_bounds) == (100, True, 4)


def test_the_bound_of_one_member_makes_the_transfer_of_all_a_bound() -> None:
    """Rank 1 began then or later: how long rank 0 waited for it is not known, but how long it was in flight is."""
    mine = collective("all_reduce", PAIR, 0, 100, 800, bytes=1_200)
    theirs = collective("all_reduce", PAIR, 0, 400, 800, bytes=1_200, start_exact=False)

    row = table(make_run({0: step(mine), 1: step(theirs)}, [PAIR]))["dp", "all_reduce"]

    assert (row.busbw_gbps, row.bandwidth_time, row.bandwidth_is_bound) == (3.0, "transfer", True)
    assert (row.duration_p50_ns, row.upper_bounds) == (700, 1)
    assert row.wait_ns == 300  # at least: that of rank 1 is not known


def test_without_bounds_nothing_is_called_one() -> None:
    row = table(in_flight((True, True), (True, True)))["dp", "all_reduce"]

    assert (row.upper_bounds, row.bandwidth_is_bound, row.durations_are_bounds) == (0, False, False)


def test_rows_of_bounds_do_not_stand_for_a_role_that_has_others() -> None:
    exact, bound = (table(in_flight((end, end)))["dp", "all_reduce"] for end in (True, False))

    assert with_exact_rates([exact, bound]) == [exact]
    assert with_exact_rates([bound]) == [bound]


def test_a_row_of_a_few_exact_bytes_does_not_stand_for_its_role() -> None:
    exact, bound = (table(in_flight((end, end)))["dp", "all_reduce"] for end in (True, False))
    small = replace(exact, operation="broadcast", num_bytes=4)

    assert with_exact_rates([small, bound]) == [small, bound]
    assert with_exact_rates([small, exact, bound]) == [small, exact]
