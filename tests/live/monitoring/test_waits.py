"""Blocks of steps of made ranks: how much of their stalls was certainly waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from commtrace.live.monitoring.waits import (
    MOST_GROUPS,
    NO_BLOCK,
    BlockReport,
    BlockTime,
    BlockWaits,
    Least,
    LeastTimes,
    Split,
)
from commtrace.live.summary import GroupSummary, StepSummary

MS = 1_000_000
GROUP = 77


def step(
    number: int, rank: int, duration: float, stalled: float | None = None, *, seq: int | None = None
) -> StepSummary:
    """A step of whose all_reduces one was so many ms in flight, and stalled for as long, or for so many ms."""
    stalled = duration if stalled is None else stalled
    seq = number if seq is None else seq
    in_flight_ns, stalled_ns = round(duration * MS), round(stalled * MS)
    reduced = GroupSummary(GROUP, 0, "all_reduce", "dp", 3, seq, in_flight_ns, stalled_ns, num_bytes=100)
    return StepSummary("r", rank, number, number * 100 * MS, 100 * MS, {}, {}, collectives=(reduced,))


def blocks(of_rank: Mapping[int, Sequence[tuple[float, float]]], seq: Mapping[int, int] = {}) -> dict[int, BlockWaits]:
    """Ranks that have ended a block: by step, duration and stall of the call; then they have begun the next one."""
    found = {}
    for rank, calls in of_rank.items():
        waits = found[rank] = BlockWaits()
        waits.resize(len(calls))
        for number, call in enumerate([*calls, calls[0]]):
            waits.add(step(number, rank, *call, seq=seq.get(rank)))
    return found


def judged(ranks: Mapping[int, BlockWaits], steps: int = 2) -> dict[int, dict[tuple[str, str], Split]]:
    joined = LeastTimes(4.0)
    joined.steps = steps
    least = joined.join((rank, waits.newest) for rank, waits in ranks.items())
    for waits in ranks.values():
        waits.settle(least)
    return {rank: waits.split for rank, waits in ranks.items()}


KEY = ("all_reduce", "dp")


def test_every_call_is_split_exactly_whoever_is_the_last() -> None:
    # Transfer takes 3 ms in the first step and 5 ms in the second; ranks 2 and 0 are last.
    ranks = blocks({0: [(20, 20), (5, 5)], 1: [(10, 10), (15, 15)], 2: [(3, 3), (25, 25)]})
    assert judged(ranks) == {
        0: {KEY: Split(17 * MS, 8 * MS)},
        1: {KEY: Split((7 + 10) * MS, 8 * MS)},
        2: {KEY: Split(20 * MS, 8 * MS)},
    }


def test_only_the_stalled_time_of_an_overlapped_call_is_split() -> None:
    ranks = blocks({0: [(20, 5)] * 2, 1: [(20, 1)] * 2, 2: [(4, 2)] * 2})
    assert judged(ranks) == {
        0: {KEY: Split(2 * 1 * MS, 2 * 4 * MS)},
        1: {KEY: Split(0, 2 * 1 * MS)},
        2: {KEY: Split(0, 2 * 2 * MS)},
    }


def test_a_block_is_judged_once() -> None:
    ranks = blocks({0: [(20, 20)] * 2})
    for _ in range(3):
        ranks[0].settle([Least(2, 0, GROUP, 0, 1, (3 * MS, 3 * MS))])
    assert ranks[0].split[KEY] == Split(34 * MS, 6 * MS)
    assert ranks[0].groups == []


@pytest.mark.parametrize(
    "least",
    [
        pytest.param(Least(4, 0, GROUP, 0, 1, (6, 6)), id="blocks of another size"),
        pytest.param(Least(2, 1, GROUP, 0, 1, (6, 6)), id="another block"),
        pytest.param(Least(2, 0, 5, 0, 1, (6, 6)), id="another group"),
        pytest.param(Least(2, 0, GROUP, 1, 1, (6, 6)), id="another operation"),
        pytest.param(Least(2, 0, GROUP, 0, 3, (6, 6)), id="other calls"),
    ],
)
def test_least_times_of_another_block_are_not_taken(least: Least) -> None:
    ranks = blocks({0: [(20, 20)] * 2})
    ranks[0].settle([least])
    assert ranks[0].split == {}


def test_nothing_is_known_until_all_members_have_told_and_where_their_calls_differ() -> None:
    calls = {rank: [(20.0, 20.0)] * 2 for rank in range(3)}
    assert judged(blocks({rank: calls[rank] for rank in (0, 1)})) == {0: {}, 1: {}}
    assert judged(blocks(calls, seq={0: 7, 1: 7, 2: 8})) == {0: {}, 1: {}, 2: {}}


def test_eight_steps_of_a_long_block_are_reported() -> None:
    (waits,) = blocks({0: [(float(number), 0.0) for number in range(64)]}).values()
    (time,) = waits.newest.times
    assert time.durations_ns == tuple(number * MS for number in range(0, 64, 8))


def test_members_may_tell_a_block_in_different_windows() -> None:
    ranks = blocks({0: [(20, 20)] * 2, 1: [(10, 10)] * 2, 2: [(3, 3)] * 2})
    joined = LeastTimes(4.0)
    joined.steps = 2
    least = [(rank, waits.newest) for rank, waits in ranks.items()]
    assert joined.join(least[:2]) == []
    assert joined.join(least) == [Least(2, 0, GROUP, 0, 1, (3 * MS, 3 * MS))]
    assert [one for _ in range(10) for one in joined.join(least[:2])] == []


def test_a_call_whose_end_was_not_seen_makes_its_group_incomparable() -> None:
    waits = BlockWaits()
    waits.resize(2)
    for number in range(3):
        waits.add(step(number, 0, -1e-6 if number == 1 else 20))
    assert waits.newest == BlockReport(2, 0, ())


def test_a_block_that_lacks_a_step_is_not_told() -> None:
    waits = BlockWaits()
    waits.resize(2)
    for number in (1, 2, 3, 5):
        waits.add(step(number, 0, 20))
    assert (waits.newest.number, len(waits.newest.times)) == (1, 1)
    waits.resize(4)
    assert waits.newest == NO_BLOCK


def test_before_the_length_of_a_block_is_known_nothing_is_gathered() -> None:
    waits = BlockWaits()
    for number in range(5):
        waits.add(step(number, 0, 20))
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
        many = [GroupSummary(group, 0, "all_reduce", "dp", 3, 1, 9, 9, num_bytes=10 * group) for group in range(1, 12)]
        waits.add(StepSummary("r", 0, number, 0, 9, {}, {}, collectives=tuple(many)))
    assert [time.group for time in waits.newest.times] == list(range(11, 11 - MOST_GROUPS, -1))


def test_a_block_survives_its_message() -> None:
    block = BlockReport(16, 3, (BlockTime(2**62, 1, 8, 32, (10**12, 5)),))
    assert msgspec.json.decode(msgspec.json.encode(block), type=BlockReport) == block
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'[1, 2, [["x"]]]', type=BlockReport)
