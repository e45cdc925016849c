"""Blocks of steps of made ranks: how much of what they stood still was certainly waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from commtrace.live.summary import GroupSummary, StepSummary
from commtrace.live.waits import (
    MOST_GROUPS,
    NO_BLOCK,
    Block,
    BlockTime,
    BlockWaits,
    Least,
    LeastTimes,
    Split,
    from_list,
    to_list,
)

MS = 1_000_000
GROUP = 77


def step(number: int, rank: int, *calls: tuple[int, int], group: int = GROUP, unfinished: int = 0) -> StepSummary:
    """A step with all_reduces of so many ms in flight and so many ms stood still for."""
    duration, stalled = (sum(call[which] for call in calls) * MS for which in (0, 1))
    reduced = GroupSummary(group, 0, "all_reduce", "dp", 3, len(calls), duration, stalled, 100, unfinished)
    return StepSummary("r", rank, number, number * 100 * MS, 100 * MS, {}, {}, collectives=(reduced,))


def blocks(times: Mapping[int, Sequence[tuple[int, int]]], steps: int = 2) -> dict[int, BlockWaits]:
    """Ranks that have made the same call in every step of a block, and have begun the next one."""
    found = {}
    for rank, calls in times.items():
        waits = found[rank] = BlockWaits()
        waits.resize(steps)
        for number in range(steps + 1):
            waits.add(step(number, rank, *calls))
    return found


def judged(ranks: Mapping[int, BlockWaits], steps: int = 2) -> dict[int, dict[tuple[str, str], Split]]:
    joined = LeastTimes(4.0)
    joined.steps = steps
    told = joined.join((rank, waits.newest) for rank, waits in ranks.items())
    for waits in ranks.values():
        waits.settle(told)
    return {rank: waits.split for rank, waits in ranks.items()}


def test_where_one_rank_is_always_last_the_split_is_exact() -> None:
    # Transfer takes 3 ms; rank 2 is last, the others wait for 17 and 7 ms.
    ranks = blocks({0: [(20, 20)], 1: [(10, 10)], 2: [(3, 3)]})
    key = ("all_reduce", "dp")
    assert judged(ranks) == {
        0: {key: Split(2 * 17 * MS, 2 * 3 * MS)},
        1: {key: Split(2 * 7 * MS, 2 * 3 * MS)},
        2: {key: Split(0, 2 * 3 * MS)},
    }


def test_where_ranks_take_turns_being_last_no_more_is_claimed_than_is_certain() -> None:
    # In turn each is last; transfers take 3 ms: ranks 0 and 1 have waited for 10 ms in every step, rank 2 for 20.
    ranks = blocks({0: [(13, 13), (3, 3)], 1: [(3, 3), (13, 13)], 2: [(13, 13), (13, 13)]})
    split = judged(ranks)
    assert split[0]["all_reduce", "dp"] == Split(0, 2 * 16 * MS)
    assert split[2]["all_reduce", "dp"] == Split(2 * 10 * MS, 2 * 16 * MS)


def test_of_an_overlapped_call_only_what_was_stood_still_is_split() -> None:
    ranks = blocks({0: [(20, 5)], 1: [(20, 1)], 2: [(4, 2)]})
    split = judged(ranks)
    assert split[0]["all_reduce", "dp"] == Split(2 * 1 * MS, 2 * 4 * MS)
    assert split[1]["all_reduce", "dp"] == Split(0, 2 * 1 * MS)
    assert split[2]["all_reduce", "dp"] == Split(0, 2 * 2 * MS)


def test_a_block_is_judged_once() -> None:
    ranks = blocks({0: [(20, 20)], 1: [(10, 10)], 2: [(3, 3)]})
    least = [Least(2, 0, GROUP, 0, 2, 6 * MS)]
    for _ in range(3):
        ranks[0].settle(least)
    assert ranks[0].split["all_reduce", "dp"] == Split(34 * MS, 6 * MS)
    assert ranks[0].groups == []


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(Least(4, 0, GROUP, 0, 2, 6), id="blocks of another size"),
        pytest.param(Least(2, 1, GROUP, 0, 2, 6), id="another block"),
        pytest.param(Least(2, 0, 5, 0, 2, 6), id="another group"),
        pytest.param(Least(2, 0, GROUP, 1, 2, 6), id="another operation"),
        pytest.param(Least(2, 0, GROUP, 0, 3, 6), id="other calls"),
    ],
)
def test_what_is_told_of_something_else_is_not_taken(told: Least) -> None:
    ranks = blocks({0: [(20, 20)]})
    ranks[0].settle([told])
    assert ranks[0].split == {}


def test_nothing_is_known_until_all_members_have_told_and_where_their_calls_differ() -> None:
    ranks = blocks({0: [(20, 20)], 1: [(10, 10)]})
    assert judged(ranks) == {0: {}, 1: {}}
    ranks = blocks({0: [(20, 20)], 1: [(10, 10)], 2: [(3, 3), (1, 1)]})
    assert judged(ranks) == {0: {}, 1: {}, 2: {}}


def test_members_may_tell_a_block_in_different_windows() -> None:
    ranks = blocks({0: [(20, 20)], 1: [(10, 10)], 2: [(3, 3)]})
    joined = LeastTimes(4.0)
    joined.steps = 2
    told = [(rank, waits.newest) for rank, waits in ranks.items()]
    assert joined.join(told[:2]) == []
    assert joined.join(told) == [Least(2, 0, GROUP, 0, 2, 6 * MS)]
    assert [one for _ in range(10) for one in joined.join(told[:2])] == []


def test_a_call_whose_end_was_not_seen_makes_its_group_incomparable() -> None:
    waits = BlockWaits()
    waits.resize(2)
    for number in range(3):
        waits.add(step(number, 0, (20, 20), unfinished=number == 1))
    assert waits.newest == Block(2, 0, ())


def test_a_block_that_lacks_a_step_is_not_told() -> None:
    waits = BlockWaits()
    waits.resize(2)
    for number in (1, 2, 3, 5):
        waits.add(step(number, 0, (20, 20)))
    assert (waits.newest.number, len(waits.newest.times)) == (1, 1)
    waits.resize(4)
    assert waits.newest == NO_BLOCK


def test_before_the_length_of_a_block_is_known_nothing_is_gathered() -> None:
    waits = BlockWaits()
    for number in range(5):
        waits.add(step(number, 0, (20, 20)))
    assert waits.newest == NO_BLOCK


@pytest.mark.parametrize(
    ("step_ms", "steps"), [(0, 0), (10, 512), (80, 64), (100, 64), (1_000, 4), (3_000, 2), (4_000, 1), (60_000, 1)]
)
def test_a_block_lasts_one_to_two_windows(step_ms: int, steps: int) -> None:
    joined = LeastTimes(4.0)
    joined.size_blocks(step_ms * MS)
    assert joined.steps == steps
    joined.size_blocks(int(step_ms * 1.5) * MS)
    assert joined.steps == steps, "it does not change with every hiccup"


def test_only_the_largest_groups_are_told_and_all_members_choose_the_same() -> None:
    waits = BlockWaits()
    waits.resize(1)
    for number in range(2):
        many = [GroupSummary(group, 0, "all_reduce", "dp", 3, 1, 9, 9, 10 * group) for group in range(1, 12)]
        waits.add(StepSummary("r", 0, number, 0, 9, {}, {}, collectives=tuple(many)))
    assert [time.group for time in waits.newest.times] == list(range(11, 11 - MOST_GROUPS, -1))


def test_a_block_survives_the_store() -> None:
    block = Block(16, 3, (BlockTime(2**62, 1, 8, 32, 10**12),))
    assert from_list(to_list(block)) == block
    with pytest.raises((TypeError, ValueError)):
        from_list([1, 2, [["x"]]])
