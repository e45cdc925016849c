"""Windows of a job that is made up: who is named, when, why, and who is not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from commtrace.findings.finding import NOT_JUDGED, SILENT, SLOW, Finding
from commtrace.findings.status import CHANGED, CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring.sampled_replay import Price, Priced, SampledReplay
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import WorkSum
from commtrace.trace.metadata import DeviceState
from tests.live.monitoring.window_reports import MS, SECONDS, report


def found_by(watch: Watch) -> list[Finding]:
    return [finding for finding in watch.findings if finding.kind == SLOW]


def reasons(watch: Watch) -> list[str]:
    return [finding.evidence for finding in watch.findings if finding.kind == NOT_JUDGED]


def watched(
    windows: int,
    slow: Mapping[int, Sequence[float]] = {},
    *,
    ranks: int = 8,
    watch: Watch | None = None,
    begin: int = 0,
) -> tuple[Watch, list[LiveEvent]]:
    """Events of some windows in which some ranks work otherwise."""
    watch = watch or Watch(ranks, SECONDS)
    events = []
    for window in range(begin, begin + windows):
        reports = [report(rank, window, slow.get(rank, (60, 5, 0, 5))) for rank in range(ranks)]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    return watch, events


def test_a_slow_rank_is_named_in_the_second_window() -> None:
    watch, events = watched(1, {5: (72, 5, 0, 5)})
    assert events == []
    watch, events = watched(1, {5: (72, 5, 0, 5)}, watch=watch, begin=1)
    (event,) = events
    assert (event.kind, event.finding.rank, event.finding.host, event.time_ns / 1e9) == (FOUND, 5, "node1", 8.0)
    finding = event.finding
    assert (finding.cause, finding.since_ns, finding.norm) == ("compute", 0, "majority")
    assert finding.cost_ns == pytest.approx(12 * MS)
    assert finding.share == pytest.approx(0.12)
    assert finding.gpu_hours_per_day == pytest.approx(0.12 * 24 * 8)
    assert event.sentence.startswith(
        "Straggler: rank 5 on node1, compute: 12 ms per step (12.0% of it), 23 GPU-hours per day, for 8.0 s, since "
        "about step 0 (± 40), 00:00:00 UTC. Rank 5 (node1) needs 82.0 ms of work per step: 12.0 ms per step more than "
        "the ranks that do the same work, which need 70.0 ms (means of a window). The others wait for 30.0 ms."
    )
    assert [one.rank for one in found_by(watch)] == [5]


def test_one_that_waits_for_input_in_every_step_is_told_in_the_words_of_a_recording() -> None:
    watch, _ = watched(2, {2: (60, 20, 0, 5)})
    assert found_by(watch)[0].evidence == (
        "Rank 2 (node0) needs 20.0 ms per step for input (mean), 15.0 ms more than other ranks that do the same work. "
        "The others wait for 30.0 ms."
    )


@pytest.mark.parametrize(
    ("held", "cause", "words"),
    [
        (
            ("thermal slowdown",),
            "throttled_device",
            "Its device: 1095 MHz (the others 1980 MHz), held down by thermal slowdown in 2 of 2 readings; 91 °C.",
        ),
        ((), "compute", "Its device: 1095 MHz (the others 1980 MHz); 91 °C."),
    ],
)
def test_a_device_whose_clock_is_held_down_is_the_cause(held: tuple[str, ...], cause: str, words: str) -> None:
    watch = Watch(4, SECONDS)
    for window in range(4):
        hot = DeviceState(window, 1095, temperature_c=91, slowdowns=held) if window > 1 else DeviceState(window, 1980)
        reports = [
            report(
                rank,
                window,
                (90 if rank == 2 and window > 1 else 60, 5, 0, 5),
                device_model="H100",
                device_states=(hot if rank == 2 else DeviceState(window, 1980),),
            )
            for rank in range(4)
        ]
        events = watch.join(reports, now=(window + 1) * SECONDS)
    (event,) = events
    assert event.finding.cause == cause
    assert event.finding.evidence.endswith(f"The others wait for 30.0 ms. {words}")


@pytest.mark.parametrize(
    ("work", "cause"),
    [((75, 5, 0, 5), "compute"), ((60, 20, 0, 5), "data"), ((60, 5, 12, 5), "gc"), ((60, 5, 0, 18), "unknown")],
)
def test_the_cause_is_the_work_that_is_too_much(work: Sequence[float], cause: str) -> None:
    _, (event,) = watched(2, {2: work})
    assert event.finding.cause == cause


def test_losses_of_ranks_without_a_gpu_are_not_called_gpu_hours() -> None:
    watch = Watch(8, SECONDS)
    events = []
    for window in (0, 1):
        work = {rank: (72 if rank == 2 else 60, 5, 0, 5) for rank in range(8)}
        reports = [report(rank, window, work[rank], on_gpu=False) for rank in range(8)]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    assert "12 ms per step (12.0% of it), 23 rank-hours per day" in events[0].sentence


def test_it_is_reported_once_and_cleared_when_it_is_over() -> None:
    watch, events = watched(6, {5: (72, 5, 0, 5)})
    assert [event.kind for event in events] == [FOUND]
    watch, events = watched(4, watch=watch, begin=6)
    assert [(event.kind, event.finding.rank, event.time_ns / 1e9) for event in events] == [(CLEARED, 5, 28.0)]
    assert found_by(watch) == []


def test_a_rank_that_is_as_slow_as_it_was_stays_named_when_its_only_peer_becomes_slow() -> None:
    slow, healthy = (90, 0, 0, 0), (60, 0, 0, 0)
    watch, events = watched(4, {0: healthy, 1: slow}, ranks=2)
    assert [one.ranks for one in found_by(watch)] == [(1,)]

    watch, later = watched(3, {0: (80, 0, 0, 0), 1: slow}, ranks=2, watch=watch, begin=4)
    assert {rank for one in found_by(watch) for rank in one.ranks} == {0, 1}
    watch, again = watched(3, {0: healthy, 1: slow}, ranks=2, watch=watch, begin=7)
    assert [one.ranks for one in found_by(watch)] == [(1,)]
    assert all(event.finding.rank != 1 for event in [*later, *again] if event.kind == CLEARED)
    assert [event.finding.ranks for event in events if event.kind == FOUND] == [(1,)]


def test_that_all_ranks_have_more_to_do_is_no_reason_to_name_the_fast_one() -> None:
    watch, _ = watched(4, {0: (40, 0, 0, 0), 1: (50, 0, 0, 0)}, ranks=2)
    watch, _ = watched(4, {0: (60, 0, 0, 0), 1: (75, 0, 0, 0)}, ranks=2, watch=watch, begin=4)
    assert [one.ranks for one in found_by(watch)] == [(1,)]


def test_of_few_ranks_one_that_is_little_slower_is_named_after_four_windows() -> None:
    named = []
    for windows in range(1, 6):
        watch, _ = watched(windows, {2: (66, 5, 0, 5)}, ranks=4)
        named.append([one.rank for one in found_by(watch)])

    assert named == [[], [], [], [2], [2]]


# Milliseconds of work of four healthy ranks whose speed drifts by 5 %, as simulated.
DRIFTING = [
    (520, 534, 524, 533),
    (504, 485, 498, 493),
    (525, 472, 496, 470),
    (543, 477, 489, 486),
    (517, 474, 470, 497),
    (503, 482, 497, 513),
]


def drifting(slow: Mapping[int, float]) -> list[list[int]]:
    """The ranks that are named after each window of a job that drifts, of which some are slower by a factor."""
    watch, named = Watch(4, SECONDS), []
    for window, totals in enumerate(DRIFTING):
        works = [ms * (slow.get(rank, 1.0) if window >= 3 else 1.0) for rank, ms in enumerate(totals)]
        columns = {"duration_ns": 550 * MS, "error_ns": 3 * MS}
        reports = [
            report(rank, window, (ms, 0, 0, 0), exposed_ns={"dp": round(max(works) - ms) * MS}, **columns)
            for rank, ms in enumerate(works)
        ]
        watch.join(reports, now=(window + 1) * SECONDS)
        named.append([rank for one in found_by(watch) for rank in one.ranks])
    return named


def test_a_healthy_rank_that_drifts_as_its_peers_do_is_not_named() -> None:
    assert drifting({}) == [[]] * len(DRIFTING)


def test_a_slow_rank_is_named_in_the_second_window_though_all_drift() -> None:
    assert drifting({2: 1.3}) == [[], [], [], [], [2], [2]]


def test_a_rank_that_is_slow_again_is_not_told_what_a_replay_said_of_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It launches late in the first stretch only, of which steps are replayed."""
    watch = Watch(8, SECONDS)
    replayed = Priced({5: Price(12e6)}, (), {5: 15e6}, {5: ""}, {}, {5: None}, late=frozenset({5}))
    monkeypatch.setattr("commtrace.live.monitoring.watch.price", lambda *_: replayed)
    monkeypatch.setattr("commtrace.live.monitoring.sampled_replay.lost_in_samples", lambda *_: ())
    monkeypatch.setattr(SampledReplay, "newest", lambda *_: object())
    _, (first,) = watched(2, {5: (60, 5, 0, 20)}, watch=watch)
    monkeypatch.setattr(SampledReplay, "newest", lambda *_: None)
    watched(4, watch=watch, begin=2)
    _, (again,) = watched(2, {5: (60, 5, 0, 20)}, watch=watch, begin=6)

    assert [event.finding.cause for event in (first, again)] == ["late_launch", "unknown"]
    assert [event.finding.cost_ns for event in (first, again)] == [12 * MS, 15 * MS]


def test_lost_time_is_said_without_an_event_and_known_while_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the first four windows are replayed; it is divided in the first, 20 s later, and forgotten."""
    divided: list[float] = []
    lost = Finding(id="lost/job/transfer", kind="lost", place="job", cause="transfer", cost_ns=9e6)

    def divide(*_: object) -> tuple[Finding, ...]:
        divided.append(1.0)
        return (lost,)

    monkeypatch.setattr("commtrace.live.monitoring.watch.price", lambda *_: Priced({}, (), {}, {}, {}, {}, frozenset()))
    monkeypatch.setattr("commtrace.live.monitoring.sampled_replay.lost_in_samples", divide)
    monkeypatch.setattr(SampledReplay, "newest", lambda self, reports, now: object() if now <= 28 else None)
    watch, known = Watch(8, SECONDS), []
    for window in range(40):
        _, events = watched(1, watch=watch, begin=window)
        assert events == []
        known.append(watch.findings == (lost,))

    assert len(divided) == 2
    assert known == [*[True] * 35, *[False] * 5]


def test_slow_ranks_are_named_where_lost_time_cannot_be_divided(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replayed = Priced({5: Price(12e6)}, (), {5: 15e6}, {5: ""}, {}, {5: None}, frozenset())
    monkeypatch.setattr("commtrace.live.monitoring.watch.price", lambda *_: replayed)
    monkeypatch.setattr("commtrace.live.monitoring.sampled_replay.lost_in_samples", lambda *_: 1 / 0)
    monkeypatch.setattr(SampledReplay, "newest", lambda *_: object())
    watch, (event,) = watched(20, {5: (72, 5, 0, 5)})
    assert (event.finding.rank, event.finding.cost_ns) == (5, 12 * MS)
    assert watch.findings == (event.finding,)
    assert caplog.text.count("the monitor no longer divides lost time") == 1


def test_a_rank_at_the_limit_does_not_flicker() -> None:
    watch, _ = watched(3, {5: (72, 5, 0, 5)})
    _, events = watched(4, {5: (64, 5, 0, 5)}, watch=watch, begin=3)
    assert events == []


def test_one_odd_window_names_nobody() -> None:
    watch, _ = watched(3)
    watch, first = watched(1, {1: (90, 5, 0, 5)}, watch=watch, begin=3)
    _, second = watched(3, watch=watch, begin=4)
    assert first + second == []


def test_nobody_is_named_where_all_are_slow_together() -> None:
    everybody = dict.fromkeys(range(8), (90, 5, 0, 5))
    assert watched(5, everybody)[1] == []


def test_victims_of_a_slow_rank_are_not_named() -> None:
    """Waiting grows on seven ranks, and only the eighth works more."""
    _, events = watched(5, {0: (95, 5, 0, 5)})
    assert [event.finding.rank for event in events] == [0]


def test_ranks_are_told_what_is_typical_of_their_stage() -> None:
    watch = Watch(7, SECONDS)
    assert (watch.window, watch.work_ns) == (-1, {})
    work = {0: 60, 1: 80, 2: 90, 3: 40, 4: 55, 5: 70}
    watch.join([report(rank, 4, (work[rank], 0, 0, 0), stage=stage_of_six(rank)) for rank in work], now=20.0)
    assert watch.window == 4
    assert watch.work_ns == {0: 80 * MS, 1: 40 * MS}  # of two ranks the faster one; stage 2 has a single one


def stage_of_six(rank: int) -> int:
    return (0, 0, 0, 1, 1, 2)[rank]


def test_a_stage_with_more_work_is_compared_with_its_own_ranks() -> None:
    watch, events = Watch(8, SECONDS), []
    for window in range(4):
        reports = [report(rank, window, (60 + 30 * (rank // 4), 5, 0, 5), stage=rank // 4) for rank in range(8)]
        events += watch.join(reports, now=window * SECONDS)
    assert events == []
    assert not watch.peers_missing


def test_a_rank_alone_at_its_stage_is_not_judged_and_that_is_reported() -> None:
    watch, events = Watch(2, SECONDS), []
    for window in range(4):
        events += watch.join([report(rank, window, (40 + 40 * rank, 0, 0, 0), stage=rank) for rank in (0, 1)], window)
    assert events == []
    assert watch.peers_missing
    assert [sentence[:57] for sentence in reasons(watch)] == [
        "Ranks were not compared: no two ranks do the same work (d"
    ]


def test_a_slow_host_is_one_finding() -> None:
    slow = dict.fromkeys((4, 5, 6, 7), (80, 5, 0, 5))
    watch, events = watched(2, slow, ranks=16)
    assert len(events) == 1
    reported = events[0].finding
    assert (reported.place, reported.cause, events[0].finding.host) == ("host", "compute", "node1")
    assert events[0].sentence.startswith("Straggler: host node1 (ranks 4–7), compute: ")
    assert [one.who for one in found_by(watch)] == ["host node1 (ranks 4–7)"]


@pytest.mark.parametrize(
    ("ranks", "slow_ranks", "who", "place", "evidence"),
    [
        (2, (1,), "rank 1 on node0", "ranks",
         "Rank 1 (node0) needs 100.0 ms of work per step: 30.0 ms per step more than the fastest ranks that do the "
         "same work, which need 70.0 ms (means of a window)."),
        (4, (1, 3), "ranks 1, 3 on node0", "ranks",
         "Ranks 1, 3 need 43% longer per step than the fastest ranks that do the same work, 30 ms "
         "(means of a window)."),
        (8, (1, 3, 4, 6), "ranks 1, 3 on node0, ranks 4, 6 on node1", "ranks",
         "Ranks 1, 3–4, 6 need 43% longer per step than the fastest ranks that do the same work, 30 ms "
         "(means of a window)."),
        (8, (4, 5, 6, 7), "host node1 (ranks 4–7)", "host",
         "All 4 ranks on node1 need 43% longer per step than the fastest ranks of other hosts that do the same work, "
         "30 ms (means of a window)."),
    ],
)  # fmt: skip
def test_half_of_the_ranks_are_one_finding_from_the_start(
    ranks: int, slow_ranks: Sequence[int], who: str, place: str, evidence: str
) -> None:
    """The others wait for 30 ms, and these for none of it."""
    watch, (event,) = watched(2, dict.fromkeys(slow_ranks, (90, 5, 0, 5)), ranks=ranks)
    (straggler,) = found_by(watch)
    assert event.finding == straggler
    assert (straggler.who, straggler.place, straggler.ranks) == (who, place, tuple(slow_ranks))
    assert straggler.cost_ns == pytest.approx(30 * MS)
    assert straggler.evidence == f"{evidence} The others wait for 30.0 ms."
    assert [(member.rank, member.excess_ns) for member in straggler.members] == [(one, 30 * MS) for one in slow_ranks]


def test_a_tensor_parallel_group_is_one_finding() -> None:
    watch, events = Watch(8, SECONDS), []
    for window in range(2):
        reports = [
            report(rank, window, (80 if rank in (2, 3) else 60, 5, 0, 5), tensor_group=f"dp {rank // 2}")
            for rank in range(8)
        ]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    (event,) = events
    assert event.finding.who == "tensor-parallel group of ranks 2–3 on node0"
    assert (event.finding.place, event.finding.cause) == ("tensor_group", "compute")


def test_ranks_that_become_slow_one_after_the_other_are_one_finding_that_is_reported_once_and_changed() -> None:
    """Rank 4 is slow from window 0 on, its host from window 2 on: one page."""
    watch, events = watched(2, {4: (80, 5, 0, 5)})
    watch, more = watched(3, dict.fromkeys((4, 5, 6, 7), (80, 5, 0, 5)), watch=watch, begin=2)
    assert [(event.kind, event.time_ns / 1e9) for event in (*events, *more)] == [(FOUND, 8.0), (CHANGED, 16.0)]
    assert more[0].sentence.startswith(
        "No longer rank 4 on node1, compute, but host node1 (ranks 4–7), compute: 20 ms per step (20.0% of it), "
        "38.4 GPU-hours per day, for 16 s, since about step 0 (± 40), 00:00:00 UTC. "
    )
    _, (event,) = watched(3, watch=watch, begin=5)
    assert (event.kind, event.sentence) == (
        CLEARED,
        "Host node1 (ranks 4–7) is as fast as its peers again (compute) at 00:00:24 UTC, after 24 s.",
    )


def test_a_set_of_which_one_rank_recovers_is_not_named_anew() -> None:
    watch, _ = watched(3, dict.fromkeys((1, 3, 6), (80, 5, 0, 5)))
    watch, (event,) = watched(4, dict.fromkeys((1, 6), (80, 5, 0, 5)), watch=watch, begin=3)
    assert event.kind == CHANGED
    assert [one.who for one in found_by(watch)] == ["rank 1 on node0, rank 6 on node1"]
    _, (event,) = watched(2, watch=watch, begin=7)
    assert (
        event.sentence
        == "Rank 1 on node0, rank 6 on node1 are as fast as their peers again (compute) at 00:00:32 UTC, after 32 s."
    )


def test_a_rank_that_becomes_slow_long_after_another_is_a_finding_of_its_own() -> None:
    watch, _ = watched(10, {1: (80, 5, 0, 5)})
    watch, (event,) = watched(2, dict.fromkeys((1, 6), (80, 5, 0, 5)), watch=watch, begin=10)
    assert (event.kind, event.finding.rank) == (FOUND, 6)
    assert [one.who for one in found_by(watch)] == ["rank 1 on node0", "rank 6 on node1"]


def test_most_ranks_are_recognised_by_what_they_did_before() -> None:
    watch, events = watched(3)
    slow = dict.fromkeys((0, 2, 3, 5, 6), (85, 5, 0, 5))
    _, events = watched(4, slow, watch=watch, begin=3)
    assert {one.who for one in found_by(watch)} == {"host node0 (ranks 0, 2–3)", "ranks 5–6 on node1"}
    assert (
        "3 of the 4 ranks on node0 need 36% longer per step than the ranks of other hosts that do the same work and "
        "are as fast as before, 25 ms (means of a window)."
    ) in events[0].sentence


def test_an_abstention_is_reported_when_neither_peers_nor_the_past_show_the_slow_rank() -> None:
    """Three ranks that work 60, 80 and 90 ms have no normal."""
    work = dict(enumerate([(60, 0, 0, 0), (80, 0, 0, 0), (90, 0, 0, 0)]))
    watch, events = watched(1, work, ranks=3)
    assert reasons(watch) == []
    watch, more = watched(1, work, ranks=3, watch=watch, begin=1)
    assert events + more == []
    assert reasons(watch) == [
        "Which of the ranks that do the same work are slow is unknown: rank 0 works 60.0 ms per step, rank 1 works "
        "80.0 ms per step, rank 2 works 90.0 ms per step, and no group of them is a majority. A healthy run "
        "(--baseline RUN) or steps from before the change would show it.",
    ]
    watched(1, ranks=3, watch=watch, begin=2)
    assert len(reasons(watch)) == 0


def test_without_a_past_a_few_quick_ranks_are_not_the_norm() -> None:
    assert watched(4, dict.fromkeys((0, 2, 3, 5, 6), (85, 5, 0, 5)))[1] == []


def test_ranks_with_different_excess_are_one_finding_with_what_each_works_too_long() -> None:
    watch, (event,) = watched(2, {1: (90, 5, 0, 5), 3: (84, 5, 0, 5)})
    (straggler,) = found_by(watch)
    assert (straggler.rank, straggler.ranks, straggler.cost_ns) == (1, (1, 3), 30 * MS)
    assert [(one.rank, one.excess_ns) for one in straggler.members] == [(1, 30 * MS), (3, 24 * MS)]
    assert "Ranks 1, 3 need 34 to 43% longer per step than the ranks that do the same work, 24 to 30 ms" in (
        event.sentence
    )


def test_the_cost_is_no_more_than_what_the_others_waited() -> None:
    """A rank with 30 ms more of work than its peers, of whom nobody waits more than 3 ms: the job loses 3 ms."""
    watch, events = Watch(4, SECONDS), []
    for window in range(2):
        reports = [report(rank, window, (90, 0, 0, 0) if rank == 1 else (60, 0, 0, 0), exposed_ns={"dp": 3 * MS})
                   for rank in range(4)]  # fmt: skip
        events += watch.join(reports, now=window * SECONDS)
    assert events[0].finding.cost_ns == pytest.approx(3 * MS)


def test_ranks_that_scatter_are_not_slow() -> None:
    """30 minutes of a clean run in which work scatters by 4 % between ranks and windows: nobody is named."""
    random = np.random.default_rng(0)
    watch, events = Watch(8, SECONDS), []
    for window in range(450):
        work = 60 * (1 + random.normal(0, 0.04, 8))
        reports = [report(rank, window, (work[rank], 5, 0, 5), error_ns=round(0.04 * 60 * MS)) for rank in range(8)]
        events += watch.join(reports, now=window * SECONDS)
    assert events == []


def test_a_rank_that_stops_reporting_is_told_and_told_again_when_it_is_back() -> None:
    watch, _ = watched(3)
    events = []
    for window in range(3, 9):
        reports = [report(rank, window if rank != 6 else 2) for rank in range(8)]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    assert [(event.kind, event.finding.kind, event.finding.rank) for event in events] == [(FOUND, SILENT, 6)]
    assert "Rank 6 on node1 has not reported for 16 s" in events[0].sentence
    assert [(one.kind, one.rank) for one in watch.findings] == [(SILENT, 6)]
    _, events = watched(1, watch=watch, begin=9)
    assert [(event.kind, event.finding.rank) for event in events] == [(CLEARED, 6)]


def test_a_rank_that_has_ended_in_order_is_not_silent() -> None:
    """Rank 0 saves the model for minutes after the others have ended."""
    watch, events = watched(2)
    for window in range(2, 20):
        reports = [report(0, window, steps=0), *(report(rank, 2, steps=0, ended=True) for rank in range(1, 8))]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    assert events == []
    assert watch.findings == ()


def test_a_slow_rank_without_peers_in_a_window_is_not_cleared_for_that() -> None:
    """Its step ends behind the end of the window, those of the others before."""
    watch, events = watched(2, {5: (80, 5, 0, 5)})
    for window in range(2, 8):
        events += watch.join([report(5, window, (80, 5, 0, 5))], now=(window + 1) * SECONDS)
    assert [(event.kind, event.finding.rank) for event in events if event.finding.kind != SILENT] == [(FOUND, 5)]
    assert [one.rank for one in found_by(watch)] == [5]


@pytest.mark.parametrize(("slow", "named"), [({}, []), ({3: (150, 5, 0, 5)}, [3])])
def test_stages_that_nobody_told_are_found_from_messages(
    slow: Mapping[int, Sequence[float]], named: Sequence[int]
) -> None:
    """Two pipelines of two stages, 0 to 1 and 2 to 3, whose last stages work twice as long."""
    watch = Watch(4, SECONDS)
    for window in range(4):
        reports = [
            report(
                rank,
                window,
                slow.get(rank, (60, 5, 0, 5) if rank % 2 == 0 else (120, 5, 0, 5)),
                sender=rank - 1 if rank % 2 else -1,
                groups=(7 + rank % 2, 9),
                duration_ns=200 * MS,
            )
            for rank in range(4)
        ]
        watch.join(reports, now=(window + 1) * SECONDS)

    assert [one.rank for one in found_by(watch)] == named
    assert watch.classes == {0: 0, 1: 1, 2: 0, 3: 1}
    assert any(
        "these do the same work, and only they were compared: ranks 0, 2; ranks 1, 3" in said for said in reasons(watch)
    )


def test_nobody_is_named_after_seven_steps() -> None:
    watch = Watch(4, SECONDS)
    for window in range(3):
        reports = [
            report(rank, window, (90, 5, 0, 5) if rank == 3 else (60, 5, 0, 5), steps=3 - (window == 0))
            for rank in range(4)
        ]
        watch.join(reports, now=(window + 1) * SECONDS)
        assert [one.rank for one in found_by(watch)] == ([3] if window == 2 else [])


def test_windows_without_steps_change_no_verdict() -> None:
    """Steps of a minute: most windows hold none."""
    watch, events = Watch(4, SECONDS), []
    for window in range(15 * 9):
        has_step = window % 15 == 14
        reports = [
            report(rank, window, (80, 5, 0, 5) if rank == 3 else (60, 5, 0, 5), steps=int(has_step))
            for rank in range(4)
        ]
        events += watch.join(reports, now=window * SECONDS)
    assert [(event.kind, event.finding.rank) for event in events] == [(FOUND, 3)]


def test_a_window_of_10_000_ranks_is_joined() -> None:
    """Also a figure: bench/monitor.py prints how long it takes."""
    ranks = 10_000
    watch, events = Watch(ranks, SECONDS), []
    for window in range(2):
        reports = [report(rank, window, (80, 5, 0, 5) if rank == 4321 else (60, 5, 0, 5)) for rank in range(ranks)]
        begin = time.perf_counter()
        events += watch.join(reports, now=window * SECONDS)
        assert time.perf_counter() - begin < 20  # ten times what is wanted: a busy machine must not fail it
    assert [event.finding.rank for event in events] == [4321]


def test_a_rank_whose_long_steps_are_over_in_the_second_window_is_not_named() -> None:
    """Its mean is too long in two windows in a row, by three steps: that is no rank that is slow now."""
    watch = Watch(8, SECONDS)
    for window, long_steps in enumerate([range(38, 40), range(40, 41), range(0), range(0)]):
        reports = []
        for rank in range(8):
            steps = range(40 * window, 40 * window + 40)
            ms = [570 if rank == 5 and step in long_steps else 70 for step in steps]
            work_sums = tuple(WorkSum(step, 1, own * MS, 0) for step, own in zip(steps, ms, strict=True))
            reports.append(report(rank, window, (sum(ms) / 40 - 10, 5, 0, 5), work_sums=work_sums))
        assert watch.join(reports, now=(window + 1) * SECONDS) == []
