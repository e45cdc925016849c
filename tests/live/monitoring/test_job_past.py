"""What is remembered of stages and links while they are well."""

from __future__ import annotations

from commtrace.analysis.stragglers.transfers import Link, Traffic
from commtrace.analysis.stragglers.usual import Usual
from commtrace.live.monitoring.job_past import JobPast

LINK = Traffic("send", 1_000_000, 2, Link((0, 1), is_directed=True))


def past_of(*windows: Usual) -> Usual:
    past = JobPast()
    for one in windows:
        past.add(one)
    return past.usual


def test_of_a_stage_the_median_of_the_windows_in_which_it_was_well() -> None:
    told = past_of(*(Usual({0: ns, 1: 90.0}) for ns in (100.0, 101.0, 130.0)), Usual({0: 102.0}))
    assert told == Usual({0: 101.5, 1: 90.0}, {}, "past")


def test_links_have_a_past_after_two_windows_which_is_that_of_the_fast_ones() -> None:
    windows = [Usual({}, {LINK: ns}) for ns in (8.0, 1.0, 1.0, 1.0, 8.0)]
    assert past_of(*windows[:1]).transfer_ns == {}
    assert past_of(*windows).transfer_ns == {LINK: 1.0}
    assert past_of(Usual(), windows[0]).transfer_ns == {LINK: 8.0}


def test_only_the_newest_windows_count() -> None:
    assert past_of(*(Usual({0: float(number)}) for number in range(40))).quickest_ns == {0: 31.5}
