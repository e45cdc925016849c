"""The verdict on an alarm of the monitor, by what ranks noted with clocks of their own."""

from __future__ import annotations

from typing import Any

import pytest

from bench import monitor_clean


@pytest.mark.parametrize(
    ("rank", "slow_until", "honest"),
    [
        pytest.param(2, 108.0, True, id="it was slow"),
        pytest.param(1, 108.0, False, id="another one was"),
        pytest.param(2, 92.0, False, id="it was slow long before"),
    ],
)
def test_an_alarm_is_honest_where_the_ranks_own_clock_agrees(rank: int, slow_until: float, honest: bool) -> None:
    notes = {
        own: [
            monitor_clean.Note(90.0 + 0.1 * step, 0.1, 0.08 if own == 2 and 90.0 + 0.1 * step < slow_until else 0.07)
            for step in range(250)
        ]
        for own in range(4)
    }
    finding = {"kind": "slow", "ranks": [rank], "since_ns": 100 * 10**9}
    alarm: dict[str, Any] = {"kind": "found", "time_ns": 109 * 10**9, "finding": finding}
    assert monitor_clean.is_honest(alarm, notes, 4.0) is honest


def test_a_rank_that_is_called_silent_in_a_clean_run_is_a_false_alarm() -> None:
    assert not monitor_clean.is_honest({"kind": "found", "time_ns": 9, "finding": {"kind": "silent"}}, {}, 4.0)
