"""What is remembered of stages and links while they are well."""

from __future__ import annotations

from commtrace.analysis.replay.step_statistics import LinkTraffic, TransferLink
from commtrace.analysis.stragglers.normal import Usual
from commtrace.live.monitoring.past import JobPast

LINK = LinkTraffic("send", 1_000_000, 2, TransferLink((0, 1), is_directed=True))


def past_of(*windows: Usual) -> Usual:
    past = JobPast()
    for one in windows:
        past.add(one)
    return past.usual


def test_the_past_of_a_stage_is_the_median_of_its_healthy_windows() -> None:
    found_by_window = past_of(*(Usual({0: ns, 1: 90.0}) for ns in (100.0, 101.0, 130.0)), Usual({0: 102.0}))
    assert found_by_window == Usual({0: 101.5, 1: 90.0}, {}, "past")


def test_links_have_a_past_after_two_windows_which_is_that_of_the_fast_ones() -> None:
    windows = [Usual({}, {LINK: ns}) for ns in (8.0, 1.0, 1.0, 1.0, 8.0)]
    assert past_of(*windows[:1]).transfer_ns == {}
    assert past_of(*windows).transfer_ns == {LINK: 1.0}
    assert past_of(Usual(), windows[0]).transfer_ns == {LINK: 8.0}


def test_only_the_newest_windows_count() -> None:
    assert past_of(*(Usual({0: float(number)}) for number in range(40))).quickest_ns == {0: 31.5}
