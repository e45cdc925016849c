"""Findings are named when they last, and cleared when they are gone."""

from __future__ import annotations

from msgspec.structs import replace

from commtrace.findings.finding import Finding
from commtrace.live.monitoring.standing import StandingFindings
from tests.live.findings import slow_finding


def stage(at: float, cause: str = "stage_imbalance") -> Finding:
    return slow_finding(
        2,
        who="stage 1 (ranks 2–3)",
        place="stage",
        cause=cause,
        members=(),
        since_step=-1,
        since_ns=round(at * 1e9),
        cost_ns=30e6,
        share=0.25,
        gpu_hours_per_day=1.2,
    )


def test_a_loss_seen_twice_is_named_once_and_cleared_when_it_is_gone() -> None:
    standing = StandingFindings(windows_to_name=2)
    by_time = [standing.join([stage(at - 4)] if at < 20 else [], at, "GPU") for at in (8.0, 12.0, 16.0, 20.0, 24.0)]
    assert [[event.kind for event in events] for events in by_time] == [[], ["found"], [], ["recovered"], []]
    assert by_time[1][0].sentence == (
        "Straggler: stage 1 (ranks 2–3), stage imbalance: 30 ms per step (25.0% of it), 1.2 GPU-hours per day, for 8.0 "
        "s, since 00:00:04 UTC. Evidence. Do this."
    )
    assert (
        by_time[3][0].sentence
        == "Stage 1 (ranks 2–3) no longer slows the job (stage imbalance) at 00:00:20 UTC, after 16 s."
    )
    assert standing.named == []


def test_that_another_rank_of_a_stage_is_the_slowest_is_no_news() -> None:
    standing = StandingFindings(windows_to_name=1)
    by_time = [standing.join([replace(stage(0), ranks=ranks)], 4.0, "GPU") for ranks in ((2, 3), (3, 2), (2, 3, 4))]
    assert [[event.kind for event in events] for events in by_time] == [["found"], [], ["changed"]]


def test_that_the_input_of_ranks_is_longer_and_they_are_not_slow_is_news() -> None:
    standing = StandingFindings(windows_to_name=1)
    causes = ("compute", "backward", "sequence_length_imbalance", "sequence_length_imbalance")
    by_time = [standing.join([replace(stage(0, cause), ranks=(2, 3))], 4.0, "GPU") for cause in causes]
    assert [[event.kind for event in events] for events in by_time] == [["found"], [], ["changed"], []]


def test_one_that_is_seen_now_and_then_is_not_named() -> None:
    standing = StandingFindings(windows_to_name=2)
    assert [standing.join([stage(0)] if at % 2 else [], at, "GPU") for at in range(8)] == [[]] * 8


def test_a_finding_that_could_not_be_looked_for_stands() -> None:
    standing = StandingFindings(windows_to_name=1)
    standing.join([stage(0, "communication")], 4.0, "GPU")
    assert standing.join([], 8.0, "GPU", kept=("communication",)) == []
    assert [one.cause for one in standing.named] == ["communication"]
    assert [event.kind for event in standing.join([], 12.0, "GPU")] == ["recovered"]


def test_a_finding_keeps_its_id_while_it_changes_and_no_other_one_gets_it() -> None:
    standing = StandingFindings(windows_to_name=1)
    by_time = [
        standing.join([slow_finding(1, ranks=ranks) for ranks in sets], 4.0, "GPU")
        for sets in ([(1, 2, 3)], [(2, 3)], [(2, 3), (1,)])
    ]
    ids = [[(event.kind, event.finding.id) for event in events] for events in by_time]
    assert ids == [
        [("found", "slow/ranks/compute/1")],
        [("changed", "slow/ranks/compute/1")],
        [("found", "slow/ranks/compute/1+2")],
    ]


def test_a_link_that_only_its_past_shows_to_be_slow_is_named_after_four_windows() -> None:
    link = replace(stage(0.0, cause="communication"), place="link", who="group of ranks 0–3")
    for norm, first in (("past", 4), ("majority", 2)):
        standing = StandingFindings(windows_to_name=2)
        named = [bool(standing.join([replace(link, norm=norm)], 4.0 * window, "GPU")) for window in range(1, 6)]
        assert named.index(True) + 1 == first
        assert sum(named) == 1


def test_the_cost_is_the_mean_over_the_last_windows() -> None:
    standing = StandingFindings(windows_to_name=1, windows_of_cost=4)
    costs = []
    for at, cost_ms in enumerate((10, 20, 30, 40, 50)):
        standing.join([replace(stage(0), cost_ns=cost_ms * 1e6, share=cost_ms / 100)], 4.0 * at, "GPU")
        (named,) = standing.named
        costs.append((round((named.cost_ns or 0) / 1e6), round(named.share or 0, 3)))

    assert costs == [(10, 0.1), (15, 0.15), (20, 0.2), (25, 0.25), (35, 0.35)]


def test_the_cost_begins_anew_with_other_ranks() -> None:
    standing = StandingFindings(windows_to_name=1, windows_of_cost=4)
    for ranks, cost_ms in (((2, 3), 10), ((2, 3, 4), 50)):
        standing.join([replace(stage(0), ranks=ranks, cost_ns=cost_ms * 1e6)], 4.0, "GPU")

    assert [named.cost_ns for named in standing.named] == [50e6]
