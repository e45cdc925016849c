"""Operations of different ranks are joined by what they are, and the last to arrive is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.analysis.matching.match import RankMatches, blame_ns, communication_of, match
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob

WORLD = group("dp", 0, 1, 2)
PAIR = group("pp", 0, 1)


def only(run: Run, rank: int, **options: Any) -> dict[str, Any]:
    """What was found for a rank's only row."""
    found = match(run, **options).ranks[rank]
    assert len(found.bucket) == 1
    return {name: getattr(found, name)[0].item() for name in RankMatches.__slots__}


def test_a_collective_waits_for_its_last_participant() -> None:
    starts = {0: 10, 1: 35, 2: 20}
    run = make_run({rank: [collective("all_reduce", WORLD, 0, start, 50)] for rank, start in starts.items()}, [WORLD])
    matches = match(run)
    for rank, start in starts.items():
        found, spans = matches.ranks[rank], run.ranks[rank].spans
        assert found.last_start.tolist() == [35]
        assert found.last_rank.tolist() == [1]
        assert found.participants.tolist() == [3]
        assert found.complete.all()
        assert not found.mismatched.any()
        assert found.wait_ns(spans).tolist() == [35 - start]
        assert found.transfer_ns(spans).tolist() == [15]


def test_collectives_are_joined_by_number_not_by_order_or_time() -> None:
    rows = {
        0: [collective("all_reduce", PAIR, 7, 0, 10), collective("all_reduce", PAIR, 8, 20, 30)],
        1: [collective("all_reduce", PAIR, 8, 100, 110), collective("all_reduce", PAIR, 9, 120, 130)],
    }
    matches = match(make_run(rows, [PAIR]))
    assert matches.ranks[0].complete.tolist() == [False, True]
    assert matches.ranks[1].complete.tolist() == [True, False]
    assert matches.ranks[0].bucket[1] == matches.ranks[1].bucket[0]
    assert len({*matches.ranks[0].bucket.tolist(), *matches.ranks[1].bucket.tolist()}) == 3


def test_groups_of_the_same_members_do_not_mix() -> None:
    first, second = group("dp", 0, 1), group("dp", 0, 1, ordinal=1)
    rows = {rank: [collective("all_reduce", (first, second)[rank], 0, 0, 10)] for rank in (0, 1)}
    assert not match(make_run(rows, [first, second])).ranks[0].complete.any()


def test_a_receive_waits_for_its_send() -> None:
    run = make_run({0: [p2p("send", PAIR, 1, 0, 40, 60)], 1: [p2p("recv", PAIR, 0, 0, 10, 60)]}, [PAIR])
    assert only(run, 1)["last_start"] == 40
    assert only(run, 1)["ready"] == 40
    assert only(run, 0)["ready"] == 40
    assert only(run, 0)["complete"]
    assert only(run, 1)["last_rank"] == 0


def test_a_send_that_waits_for_its_receiver() -> None:
    run = make_run({0: [p2p("send", PAIR, 1, 0, 10, 60)], 1: [p2p("recv", PAIR, 0, 0, 40, 60)]}, [PAIR])
    assert only(run, 0)["ready"] == 40


def test_a_send_that_was_over_before_its_receiver_came_did_not_wait() -> None:
    run = make_run({0: [p2p("send", PAIR, 1, 0, 10, 20)], 1: [p2p("recv", PAIR, 0, 0, 40, 60)]}, [PAIR])
    found = match(run).ranks[0]
    assert found.last_start.tolist() == [40]
    assert found.wait_ns(run.ranks[0].spans).tolist() == [0]
    assert found.transfer_ns(run.ranks[0].spans).tolist() == [10]


def test_a_broadcast_that_a_member_left_before_the_last_came_did_not_wait_for_it() -> None:
    run = make_run(
        {0: [collective("broadcast", PAIR, 0, 10, 20)], 1: [collective("broadcast", PAIR, 0, 40, 60)]}, [PAIR]
    )
    assert match(run).ranks[0].wait_ns(run.ranks[0].spans).tolist() == [0]


def test_messages_in_both_directions_do_not_meet_each_other() -> None:
    rows = {
        0: [p2p("send", PAIR, 1, 0, 0, 5), p2p("recv", PAIR, 1, 0, 0, 50)],
        1: [p2p("send", PAIR, 0, 0, 45, 50), p2p("recv", PAIR, 0, 0, 0, 5)],
    }
    matches = match(make_run(rows, [PAIR]))
    for rank in (0, 1):
        assert matches.ranks[rank].participants.tolist() == [2, 2]
        assert sorted(matches.ranks[rank].last_start.tolist()) == [0, 45]


def test_the_nth_send_meets_the_nth_receive_of_the_same_pair() -> None:
    rows = {
        0: [p2p("send", PAIR, 1, 0, 0, 5), p2p("send", PAIR, 1, 1, 30, 35)],
        1: [p2p("recv", PAIR, 0, 0, 1, 5), p2p("recv", PAIR, 0, 1, 10, 35)],
    }
    assert match(make_run(rows, [PAIR])).ranks[1].last_start.tolist() == [1, 30]


def test_a_member_that_was_not_recorded_leaves_the_match_incomplete() -> None:
    rows = {rank: [collective("all_reduce", WORLD, 0, start, 50)] for rank, start in {0: 10, 1: 30}.items()}
    found = only(make_run(rows, [WORLD], world_size=3), 0)
    assert (found["participants"], found["complete"], found["ready"]) == (2, False, 30)


def test_a_group_that_nobody_described_is_incomplete() -> None:
    run = make_run({rank: [collective("all_reduce", PAIR, 0, 0, 5)] for rank in (0, 1)}, [])
    assert not only(run, 0)["complete"]


@pytest.mark.parametrize(
    ("difference", "mismatched"),
    [
        ({"name": "all_gather"}, True),
        ({"bytes": 4}, True),
        ({"dtype": "bfloat16"}, True),
        ({"bytes": -1}, False),
        ({"dtype": -1}, False),
        ({"bytes": 4, "self_bytes": 0}, False),  # a sparse tensor
        ({}, False),
    ],
)
def test_participants_that_disagree_are_reported(difference: Row, mismatched: bool) -> None:
    one = collective("all_reduce", PAIR, 0, 0, 5)
    sparse = {name: value for name, value in difference.items() if name == "self_bytes"}
    run = make_run({0: [{**one, **sparse}], 1: [{**one, **difference}]}, [PAIR])
    assert [only(run, rank)["mismatched"] for rank in (0, 1)] == [mismatched, mismatched]


def test_ranks_may_bring_different_amounts_to_an_all_to_all() -> None:
    rows = {rank: [collective("all_to_all", PAIR, 0, 0, 5, bytes=rank)] for rank in (0, 1)}
    assert not only(make_run(rows, [PAIR]), 0)["mismatched"]


def test_two_sends_are_no_message() -> None:
    rows = {0: [p2p("send", PAIR, 1, 0, 0, 5)], 1: [{**p2p("recv", PAIR, 0, 0, 0, 5), "bytes": 3}]}
    assert only(make_run(rows, [PAIR]), 0)["mismatched"]


def test_members_of_a_bracket_of_collectives_are_told_apart() -> None:
    rows = {
        rank: [
            collective("all_gather", PAIR, 0, 10 * rank, 50, op_in_seq=0, bytes=8),
            collective("all_gather", PAIR, 0, 10 * rank, 50, op_in_seq=1, bytes=16),
        ]
        for rank in (0, 1)
    }
    found = match(make_run(rows, [PAIR])).ranks[0]
    assert found.participants.tolist() == [2, 2]
    assert found.complete.all()
    assert not found.mismatched.any()
    assert found.last_start.tolist() == [10, 10]


def test_a_bracket_of_messages_is_ready_when_its_last_member_is() -> None:
    """Rank 1 sends up and receives from below in one call; the receive comes late, so the call does."""
    low, high = group("pp", 0, 1, 2), group("tp", 1, 2)
    rows = {
        0: [p2p("send", low, 1, 0, 70, 80, id=1)],
        1: [
            p2p("send", low, 2, 0, 10, 80, id=1, op_in_seq=0),
            p2p("recv", low, 0, 0, 10, 80, id=2, op_in_seq=1),
            p2p("send", low, 2, 1, 90, 95, id=3, op_in_seq=0),
        ],
        2: [p2p("recv", low, 1, 0, 20, 80, id=1), p2p("recv", low, 1, 1, 90, 95, id=2)],
    }
    found = match(make_run(rows, [low, high])).ranks[1]
    assert found.last_start.tolist() == [20, 70, 90]
    assert found.ready.tolist() == [70, 70, 90]


def test_rows_that_are_no_communication_are_left_alone() -> None:
    run = make_run({0: [span("forward", 5, 9)]})
    found = only(run, 0)
    assert (found["bucket"], found["participants"], found["last_start"], found["ready"]) == (-1, 0, 5, 5)


def test_without_common_clocks_the_shortest_duration_marks_the_last_to_arrive() -> None:
    rows = {0: [collective("all_reduce", PAIR, 0, 1_000, 1_050)], 1: [collective("all_reduce", PAIR, 0, 90, 100)]}
    run = make_run(rows, [PAIR], nodes={0: "a", 1: "b"})
    waiting, last = (only(run, rank, clocks_agree=False) for rank in (0, 1))
    assert (waiting["last_start"], waiting["ready"], waiting["complete"]) == (1_040, 1_040, True)
    assert (last["last_start"], last["ready"], last["complete"]) == (90, 90, True)
    assert waiting["last_rank"] == last["last_rank"] == 1


def test_without_common_clocks_messages_between_hosts_are_not_compared() -> None:
    rows = {0: [p2p("send", PAIR, 1, 0, 1_000, 1_050)], 1: [p2p("recv", PAIR, 0, 0, 90, 100)]}
    apart = only(make_run(rows, [PAIR], nodes={0: "a", 1: "b"}), 1, clocks_agree=False)
    assert (apart["complete"], apart["ready"], apart["last_rank"], apart["participants"]) == (False, 90, -1, 2)
    together = only(make_run(rows, [PAIR]), 1, clocks_agree=False)
    assert together["complete"]


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 5), st.integers(-(10**15), 10**15))
def test_a_whole_pipeline_matches_and_a_constant_on_the_clocks_changes_nothing(
    stages: int, microbatches: int, data_parallel: int, transfer: int, start: int
) -> None:
    job = PipelineJob(stages, microbatches, data_parallel, transfer_ns=transfer, start_ns=start)
    run, at_zero = job.run(), PipelineJob(stages, microbatches, data_parallel, transfer_ns=transfer).run()
    shifted, plain = match(run), match(at_zero)
    for rank, trace in run.ranks.items():
        communications = np.isin(trace.spans.kind, (6, 7))
        assert shifted.ranks[rank].complete[communications].all()
        assert not shifted.ranks[rank].mismatched.any()
        wait = shifted.ranks[rank].wait_ns(trace.spans)
        assert (wait == plain.ranks[rank].wait_ns(at_zero.ranks[rank].spans)).all()
        assert (wait + shifted.ranks[rank].transfer_ns(trace.spans) == trace.spans.end - trace.spans.start)[
            communications
        ].all()


@pytest.mark.parametrize("apart", [1, 10**15, 2**61 - 1])
def test_stalls_find_what_they_wait_for_however_far_apart_the_ids_are(apart: int) -> None:
    rows = {}
    for rank, starts in enumerate([(10, 40), (30, 20)]):
        first, second = (
            collective("all_reduce", PAIR, seq, start, 60, id=(1 + seq + rank) * apart)
            for seq, start in enumerate(starts)
        )
        lost = collective("all_reduce", PAIR, 2, 5, 60, id=4 * apart)
        rows[rank] = [stall(second, 0, 50), stall(lost, 1, 50), stall(first, 2, 50), first, second]
    run = make_run(rows, [PAIR])

    matches = match(run)

    for rank in rows:
        assert matches.ranks[rank].stall_ready[:3].tolist() == [40, 1, 30]
        assert matches.ranks[rank].stall_complete.tolist() == [True, False, True, False, False]
        communications = communication_of(run.ranks[rank].spans, np.arange(3))
        assert [int(run.ranks[rank].spans.seq[row]) if row >= 0 else None for row in communications] == [1, None, 0]


def test_the_last_one_is_to_blame_for_all_who_waited() -> None:
    """0 waits 30 and 1 waits 10 for rank 2; then 1 and 2 wait 5 each for rank 0."""
    world = group("world", 0, 1, 2)
    first = {0: 0, 1: 20, 2: 30}
    second = {0: 105, 1: 100, 2: 100}
    run = make_run(
        {
            rank: [
                collective("all_reduce", world, 0, first[rank], 50),
                collective("all_reduce", world, 1, second[rank], 120),
            ]
            for rank in range(3)
        },
        [world],
    )

    assert blame_ns(run, match(run)) == {2: 40, 0: 10}


def test_nobody_is_to_blame_for_what_was_not_seen() -> None:
    world = group("world", 0, 1)
    run = make_run({0: [collective("all_reduce", world, 0, 0, 50)]}, [world], world_size=2)

    assert blame_ns(run, match(run)) == {}


def test_the_bound_of_a_start_makes_the_arrival_of_the_last_one_a_bound_for_all() -> None:
    rows = {
        rank: [
            collective("all_reduce", PAIR, 0, 10 * rank, 50, start_exact=rank == 0),
            collective("all_reduce", PAIR, 1, 60 + rank, 90, end_exact=rank == 0),
        ]
        for rank in (0, 1)
    }
    run = make_run(rows, [PAIR])
    first, second = match(run).ranks.values()

    assert first.ready_exact.tolist() == second.ready_exact.tolist() == [False, True]
    assert first.transfer_exact(run.ranks[0].spans).tolist() == [False, True]
    assert second.transfer_exact(run.ranks[1].spans).tolist() == [False, False]
    # Rank 0 waited until 10 at least. How long rank 1 waited is not known, and it is no wait for anybody.
    assert first.wait_ns(run.ranks[0].spans).tolist() == [10, 1]
    assert second.wait_ns(run.ranks[1].spans).tolist() == [0, 0]
    assert blame_ns(run, match(run)) == {1: 11}


def test_a_stall_knows_whether_its_communication_has_an_exact_arrival() -> None:
    late = collective("all_reduce", PAIR, 0, 0, 50, id=1, start_exact=False)
    known = collective("all_reduce", PAIR, 1, 60, 90, id=2)
    own = match(make_run({rank: [late, stall(late, 20, 50), known, stall(known, 60, 90)] for rank in (0, 1)}, [PAIR]))

    assert own.ranks[0].stall_ready_exact.tolist() == [True, False, True, True]


def test_members_of_a_bracket_share_what_is_known_of_their_start() -> None:
    """They run together: what is a bound for one is a bound for all."""
    send, receive = p2p("send", PAIR, 1, 0, 10, 90, id=1), p2p("recv", PAIR, 1, 0, 10, 90, id=2, op_in_seq=1)
    rows = {
        0: [send, receive],
        1: [p2p("recv", PAIR, 0, 0, 5, 90, id=1), p2p("send", PAIR, 0, 0, 50, 90, id=2, start_exact=False)],
    }

    assert match(make_run(rows, [PAIR])).ranks[0].ready_exact.tolist() == [False, False]


def test_without_common_clocks_the_shortest_duration_must_be_exact() -> None:
    rows = {0: [collective("all_reduce", PAIR, 0, 0, 50)], 1: [collective("all_reduce", PAIR, 0, 30, 50)]}
    nodes = {0: "a", 1: "b"}
    assert only(make_run(rows, [PAIR], nodes=nodes), 0, clocks_agree=False)["ready_exact"]
    rows[1][0]["end_exact"] = False
    assert not only(make_run(rows, [PAIR], nodes=nodes), 0, clocks_agree=False)["ready_exact"]
    assert only(make_run(rows, [PAIR], nodes=nodes), 0)["ready_exact"]
