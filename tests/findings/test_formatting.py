"""Ranks and times as a sentence names them."""

from __future__ import annotations

import pytest

from commtrace.findings.formatting import format_duration, format_ranks

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("time_ns", "words"),
    [
        (999_999, "less than 1 ms"),
        (3_000_000, "3 ms"),
        (SECOND // 2, "0.5 s"),
        (42 * SECOND, "42 s"),
        (420 * SECOND, "7 min"),
        (11_520 * SECOND, "3.2 h"),
        (47 * 3600 * SECOND, "47.0 h"),
        (26_457 * 3600 * SECOND, "1102 days"),
    ],
)
def test_times_have_the_unit_that_people_think_in(time_ns: int, words: str) -> None:
    assert format_duration(time_ns) == words


def test_ranks_are_shown_in_ranges() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([7, 0, 1, 2, 3, 7]) == "ranks 0–3, 7"
