"""Ranks that pause longer than their peers, in the last minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from commtrace.findings.finding import Finding
from commtrace.live.monitoring.pauses import PauseMemory
from commtrace.live.monitoring.window import WORK, Pause, WindowReport

MS = 1_000_000
STEPS = 8


def joined(pauses: Mapping[int, Sequence[tuple[int, int]]], cause: str, windows: int) -> list[list[Finding]]:
    """Four ranks whose windows have eight steps of half a second; of each rank (step, ms) of its pauses."""
    memory = PauseMemory(world_size=4)
    return [
        memory.take([report(rank, window, pauses.get(rank, ()), cause) for rank in range(4)])
        for window in range(windows)
    ]


def report(rank: int, window: int, pauses: Sequence[tuple[int, int]], cause: str) -> WindowReport:
    first = window * STEPS
    inside = tuple(
        Pause(WORK.index(cause), step, ms * MS, begin_ns=step * 500 * MS)
        for step, ms in pauses
        if first <= step < first + STEPS
    )
    return WindowReport(
        rank, "node0", 0, window, STEPS, first + STEPS - 1, duration_ns=500 * MS, pauses=inside, error_ns=MS
    )


def test_one_that_saves_once_is_named_at_once_and_no_longer() -> None:
    first, second, third = joined({2: [(12, 8_000)]}, "checkpoint", 3)
    assert (first, third) == ([], [])
    (one,) = second
    assert (one.cause, one.ranks, one.who) == ("checkpoint", (2,), "rank 2 on node0")
    assert one.cost_ns == pytest.approx(8_000 * MS / 16)
    assert one.share == pytest.approx(1)
    assert one.line() == "rank 2 on node0, checkpoint: once, in step 12: 8.0 s (100.0%)"
    assert (one.since_step, one.since_ns) == (12, 6_000 * MS)


def test_pauses_that_come_back_cost_what_they_take_from_one_to_the_next() -> None:
    """Half a second in every tenth step is 50 ms per step, wherever windows begin."""
    found_by_window = joined({1: [(step, 500) for step in range(5, 80, 10)]}, "gc", 9)
    costs = [[round((one.cost_ns or 0) / MS, 1) for one in found] for found in found_by_window]
    assert costs == [[], [], [], [], [], [], [50.0], [50.0], [50.0]]
    assert found_by_window[6][0].format_cost() == "in 6 of 56 steps (5, 15, 25, 35, 45, 55): 3.0 s in all (10.0%)"
    assert found_by_window[6][0].since_ns == 2_500 * MS


def test_pauses_are_over_when_the_next_one_is_late() -> None:
    found_by_window = joined({1: [(step, 500) for step in range(5, 60, 10)]}, "gc", 10)
    assert [bool(found) for found in found_by_window] == [*[False] * 6, True, True, False, False]


def test_nobody_is_named_while_all_ranks_save() -> None:
    assert joined({rank: [(12, 8_000)] for rank in range(4)}, "checkpoint", 3) == [[], [], []]


def test_collecting_a_few_times_is_chance() -> None:
    assert joined({3: [(12, 500), (20, 600)]}, "gc", 4) == [[], [], [], []]


def test_a_loss_below_two_percent_is_not_named() -> None:
    assert joined({0: [(4, 70), (12, 70)]}, "evaluation", 2)[1] == []
    assert joined({0: [(4, 90), (12, 90)]}, "evaluation", 2)[1] != []


def test_ranks_that_pause_in_the_same_steps_are_one_and_cost_what_one_of_them_does() -> None:
    """Two ranks save for 4 and 8 s in step 12, side by side."""
    _, (one,), _ = joined({1: [(12, 4_000)], 2: [(12, 8_000)]}, "checkpoint", 3)
    assert [(member.rank, member.excess_ns * 16 / MS) for member in one.members] == [(2, 8_000), (1, 4_000)]
    assert one.cost_ns == pytest.approx(8_000 * MS / 16)
    assert one.format_cost() == "once, in step 12: 12 s (100.0%)"


@pytest.mark.parametrize(("others", "is_named"), [((), True), ((20,), False)])
def test_pauses_are_named_on_a_rank_that_chance_hits_so_often_once_in_a_thousand(
    others: Sequence[int], is_named: bool
) -> None:
    """Six of six stalls hit one of four ranks by chance in 4 / 4⁶ of all cases, six of seven in 4 · 22 / 4⁷."""
    hits = {1: [(step, 500) for step in range(5, 60, 10)], 3: [(step, 500) for step in others]}
    assert bool(joined(hits, "data", 7)[6]) == is_named
