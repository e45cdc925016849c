"""Windows of a job that is made up: who is named, when, why, and who is not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from commtrace.live.monitoring.findings import BACK, CLEARED, FOUND, SILENT, LiveEvent
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import WindowReport

MS = 1_000_000
SECONDS = 4.0


def report(rank: int, window: int, work: Sequence[float] = (60, 5, 0, 5), **columns: object) -> WindowReport:
    """A rank of a job whose steps last 100 ms; work in ms, what is left is waiting for dp."""
    waiting = max(100 - sum(work), 0)
    told: dict[str, object] = {
        "host": f"node{rank // 4}",
        "stage": 0,
        "steps": 40,
        "last_step": 40 * window + 39,
        "duration_ns": 100 * MS,
        "error_ns": MS // 10,
        "on_gpu": True,
        "exposed_ns": {"dp": round(waiting * MS)},
        **columns,
    }
    compute, data, garbage, unknown = (round(part * MS) for part in work)
    return WindowReport(rank=rank, window=window, work_ns=(compute, data, garbage, 0, 0, unknown), **told)  # type: ignore[arg-type]


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
    assert (event.kind, event.rank, event.host, event.time) == (FOUND, 5, "node1", 8.0)
    straggler = event.straggler
    assert straggler is not None
    assert (straggler.cause, straggler.since) == ("compute", 0.0)
    assert straggler.cost_ms_per_step == pytest.approx(12.0)
    assert straggler.gpu_hours_per_day == pytest.approx(0.12 * 24 * 8)
    assert event.sentence.startswith(
        "Straggler: rank 5 on node1, compute: costs 12.0 ms per step, 23 GPU-hours per day, for 8.0 s, since step 0, "
        "00:00:00 UTC. Rank 5 works "
        "82.0 ms per step: 12.0 ms more than the ranks of its stage, which work 70.0 ms. The others stand still for "
        "30.0 ms."
    )
    assert [one.rank for one in watch.stragglers] == [5]


@pytest.mark.parametrize(
    ("work", "cause"),
    [((75, 5, 0, 5), "compute"), ((60, 20, 0, 5), "data"), ((60, 5, 12, 5), "gc"), ((60, 5, 0, 18), "unknown")],
)
def test_the_cause_is_the_work_that_is_too_much(work: Sequence[float], cause: str) -> None:
    _, (event,) = watched(2, {2: work})
    assert event.straggler is not None
    assert event.straggler.cause == cause


def test_what_ranks_without_a_gpu_lose_is_not_called_gpu_hours() -> None:
    watch = Watch(4, SECONDS)
    events = []
    for window in (0, 1):
        work = {rank: (72 if rank == 2 else 60, 5, 0, 5) for rank in range(4)}
        reports = [report(rank, window, work[rank], on_gpu=False) for rank in range(4)]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    assert "12.0 ms per step, 11.5 rank-hours per day" in events[0].sentence


def test_it_is_told_once_and_cleared_when_it_is_over() -> None:
    watch, events = watched(6, {5: (72, 5, 0, 5)})
    assert [event.kind for event in events] == [FOUND]
    watch, events = watched(4, watch=watch, begin=6)
    assert [(event.kind, event.rank, event.time) for event in events] == [(CLEARED, 5, 28.0)]
    assert watch.stragglers == []


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
    assert [event.rank for event in events] == [0]


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


def test_a_rank_alone_at_its_stage_is_not_judged_and_that_is_said() -> None:
    watch, events = Watch(2, SECONDS), []
    for window in range(4):
        events += watch.join([report(rank, window, (40 + 40 * rank, 0, 0, 0), stage=rank) for rank in (0, 1)], window)
    assert events == []
    assert watch.peers_missing


def test_a_slow_host_is_one_finding() -> None:
    slow = dict.fromkeys((4, 5, 6, 7), (80, 5, 0, 5))
    watch, events = watched(2, slow, ranks=16)
    assert len(events) == 1
    assert events[0].straggler is not None
    told = events[0].straggler
    assert (told.place, told.cause, events[0].host) == ("host", "compute", "node1")
    assert events[0].sentence.startswith("Straggler: host node1 (ranks 4–7), compute: costs ")
    assert [one.who for one in watch.stragglers] == ["host node1 (ranks 4–7)"]


@pytest.mark.parametrize(("ranks", "slow"), [(2, (1,)), (4, (1, 3)), (8, (1, 3, 4, 6)), (8, (4, 5, 6, 7))])
def test_half_of_the_ranks_are_named_from_the_start(ranks: int, slow: Sequence[int]) -> None:
    """The others stand still for 30 ms, and these for none of it."""
    watch, events = watched(2, dict.fromkeys(slow, (90, 5, 0, 5)), ranks=ranks)
    if slow == (4, 5, 6, 7):
        assert [one.who for one in watch.stragglers] == ["host node1 (ranks 4–7)"]
    else:
        assert sorted(event.rank for event in events) == sorted(slow)
    for straggler in watch.stragglers:
        assert straggler.cost_ms_per_step == pytest.approx(30.0)
        assert "than the fastest ranks of its stage, which work 70.0 ms. The others stand still for 30.0 ms." in (
            straggler.evidence
        )


def test_most_ranks_are_told_by_what_they_did_before() -> None:
    watch, events = watched(3)
    slow = dict.fromkeys((0, 2, 3, 5, 6), (85, 5, 0, 5))
    _, events = watched(4, slow, watch=watch, begin=3)
    assert {one.who for one in watch.stragglers} == {"host node0 (ranks 0, 2–3)", "rank 5 on node1", "rank 6 on node1"}
    assert "more than the ranks of its stage that work as long as before, which work 70.0 ms" in events[0].sentence


def test_without_a_past_a_few_quick_ranks_are_not_the_norm() -> None:
    assert watched(4, dict.fromkeys((0, 2, 3, 5, 6), (85, 5, 0, 5)))[1] == []


def test_ranks_with_different_excess_are_named_with_what_each_costs() -> None:
    watch, events = watched(2, {1: (90, 5, 0, 5), 3: (84, 5, 0, 5)})
    assert [(one.rank, one.cost_ms_per_step) for one in watch.stragglers] == [(1, 30.0), (3, 24.0)]
    assert len(events) == 2


def test_the_cost_is_no_more_than_what_the_others_waited() -> None:
    """A rank with 30 ms more of work than its peers, of whom nobody waits more than 3 ms: the job loses 3 ms."""
    watch, events = Watch(4, SECONDS), []
    for window in range(2):
        reports = [report(rank, window, (90, 0, 0, 0) if rank == 1 else (60, 0, 0, 0), exposed_ns={"dp": 3 * MS})
                   for rank in range(4)]  # fmt: skip
        events += watch.join(reports, now=window * SECONDS)
    assert events[0].straggler is not None
    assert events[0].straggler.cost_ms_per_step == pytest.approx(3.0)


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
    assert [(event.kind, event.rank) for event in events] == [(SILENT, 6)]
    assert "Rank 6 on node1 has not reported for 16 s" in events[0].sentence
    assert watch.silent == [6]
    _, events = watched(1, watch=watch, begin=9)
    assert [(event.kind, event.rank) for event in events] == [(BACK, 6)]


def test_a_rank_that_has_ended_in_order_is_not_silent() -> None:
    """Rank 0 saves the model for minutes after the others have ended."""
    watch, events = watched(2)
    for window in range(2, 20):
        reports = [report(0, window, steps=0), *(report(rank, 2, steps=0, ended=True) for rank in range(1, 8))]
        events += watch.join(reports, now=(window + 1) * SECONDS)
    assert events == []
    assert watch.silent == []


def test_a_slow_rank_without_peers_in_a_window_is_not_cleared_for_that() -> None:
    """Its step ends behind the end of the window, those of the others before."""
    watch, events = watched(2, {5: (80, 5, 0, 5)})
    for window in range(2, 8):
        events += watch.join([report(5, window, (80, 5, 0, 5))], now=(window + 1) * SECONDS)
    assert [(event.kind, event.rank) for event in events if event.kind != SILENT] == [(FOUND, 5)]
    assert [one.rank for one in watch.stragglers] == [5]


def test_windows_without_steps_change_no_verdict() -> None:
    """Steps of a minute: most windows hold none."""
    watch, events = Watch(4, SECONDS), []
    for window in range(40):
        has_step = window % 15 == 14
        reports = [
            report(rank, window, (80, 5, 0, 5) if rank == 3 else (60, 5, 0, 5), steps=int(has_step))
            for rank in range(4)
        ]
        events += watch.join(reports, now=window * SECONDS)
    assert [(event.kind, event.rank) for event in events] == [(FOUND, 3)]


def test_a_window_of_10_000_ranks_is_joined() -> None:
    """Also a figure: bench/monitor.py prints how long it takes."""
    ranks = 10_000
    watch, events = Watch(ranks, SECONDS), []
    for window in range(2):
        reports = [report(rank, window, (80, 5, 0, 5) if rank == 4321 else (60, 5, 0, 5)) for rank in range(ranks)]
        begin = time.perf_counter()
        events += watch.join(reports, now=window * SECONDS)
        assert time.perf_counter() - begin < 20  # ten times what is wanted: a busy machine must not fail it
    assert [event.rank for event in events] == [4321]
