"""What ranks lose to pauses in single steps: who pauses more than others, how often, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from commtrace.live.monitoring.pause_memory import PauseMemory, RankPauses
from commtrace.live.monitoring.window import WORK, Pause, WindowReport

MS = 1_000_000
STEPS = 8


def joined(pauses: Mapping[int, Sequence[tuple[int, int]]], cause: str, windows: int) -> list[list[RankPauses]]:
    """Four ranks whose windows have eight steps of half a second; of each rank (step, ms) of its pauses."""
    memory = PauseMemory()
    return [
        memory.take([report(rank, window, pauses.get(rank, ()), cause) for rank in range(4)])
        for window in range(windows)
    ]


def report(rank: int, window: int, pauses: Sequence[tuple[int, int]], cause: str) -> WindowReport:
    first = window * STEPS
    inside = tuple(Pause(WORK.index(cause), step, ms * MS) for step, ms in pauses if first <= step < first + STEPS)
    return WindowReport(
        rank, "node0", 0, window, STEPS, first + STEPS - 1, duration_ns=500 * MS, pauses=inside, error_ns=MS
    )


def test_one_that_saves_once_is_named_at_once_and_no_longer() -> None:
    first, second, third = joined({2: [(12, 8_000)]}, "checkpoint", 3)
    assert (first, third) == ([], [])
    (one,) = second
    assert (one.rank, one.cause, one.steps) == (2, "checkpoint", 16)
    assert one.cost_ns == pytest.approx(8_000 * MS / 16)
    assert one.when.in_words() == "once, in step 12: 8.0 s"


def test_pauses_that_come_back_cost_what_they_take_from_one_to_the_next() -> None:
    """Half a second in every tenth step is 50 ms per step, wherever windows begin."""
    told = joined({1: [(step, 500) for step in range(5, 60, 10)]}, "gc", 7)
    costs = [[round(one.cost_ns / MS, 1) for one in found] for found in told]
    assert costs == [[], [], [], [], [50.0], [50.0], [50.0]]
    assert told[4][0].when.in_words() == "in 4 of 40 steps (5, 15, 25, 35): 2.0 s in all"


def test_pauses_are_over_when_the_next_one_is_late() -> None:
    told = joined({1: [(step, 500) for step in (5, 15, 25, 35)]}, "gc", 8)
    assert [bool(found) for found in told] == [False, False, False, False, True, True, False, False]


def test_where_all_ranks_save_nobody_is_named() -> None:
    assert joined({rank: [(12, 8_000)] for rank in range(4)}, "checkpoint", 3) == [[], [], []]


def test_collecting_a_few_times_is_chance() -> None:
    assert joined({3: [(12, 500), (20, 600)]}, "gc", 4) == [[], [], [], []]


def test_what_costs_less_than_two_percent_is_not_named() -> None:
    assert joined({0: [(4, 70), (12, 70)]}, "evaluation", 2)[1] == []
    assert joined({0: [(4, 90), (12, 90)]}, "evaluation", 2)[1] != []
