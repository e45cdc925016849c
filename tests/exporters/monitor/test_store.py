"""What ranks report, and what they are told."""

from __future__ import annotations

import pytest

from commtrace.exporters.monitor.messages import (
    MonitorFindings,
    PeerBaseline,
    RankHang,
    Reply,
    Report,
    WatchedJob,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.status import FOUND, LiveEvent
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep, RankStep
from commtrace.live.monitoring.waits import Least
from commtrace.live.monitoring.window import WindowReport
from tests.exporters.monitor.conftest import JOB
from tests.exporters.monitor.made_reports import report, stopped
from tests.live.findings import SECOND, silent_finding


def test_the_newest_report_of_each_rank_is_kept(store: MonitorStore) -> None:
    for reported in (report(0, 1), report(2, 1), report(0, 2)):
        assert store.answer(reported) == Reply()
    assert [(window.rank, window.window) for window in store.windows()] == [(0, 2), (2, 1)]


def test_a_rank_is_told_of_its_stage_and_of_the_groups_that_it_asks_for(store: MonitorStore) -> None:
    of_five = [Least(64, 3, 5, 0, 640, (10**12, 3)), Least(64, 3, 5, 1, 64, (10**9,))]
    store.publish(64, 7, {0: 6e7, 3: 5.5e7}, [*of_five, Least(64, 3, 6, 0, 1, (1,))])
    reply = store.answer(report(0, 8, groups=(5, 2**62)))
    assert reply == Reply("", PeerBaseline(64, 7, 5.5e7), tuple(of_five))
    store.publish(64, 8, {}, [])
    assert store.answer(report(0, 9, groups=(5,))) == Reply("", PeerBaseline(64, 8, 0.0), tuple(of_five))


def test_findings_are_for_who_asks(store: MonitorStore) -> None:
    findings = MonitorFindings((), (LiveEvent(FOUND, SECOND, silent_finding(3), "Rank 3 is silent."),))
    store.publish_findings(findings)
    assert store.answer(report(1, 1)).findings == MonitorFindings()
    assert store.answer(report(0, 1, findings=True)).findings == findings


def test_a_rank_that_asks_gets_the_begin_and_end_of_the_jobs_steps(store: MonitorStore) -> None:
    for rank in range(JOB.world_size):
        times = (RankStep(7, 0, 1_000 - rank, 2_000 + rank),)
        assert store.answer(Report(JOB, WindowReport(rank, "node0", 0, 1, step_times=times))).job_steps == ()
    asked = Report(JOB, WindowReport(0, "node0", 0, 2), asks_job_steps=True)
    assert store.answer(asked).job_steps == (JobStep(7, 0, 997, 2_003, 4),)


def test_no_more_steps_are_kept_than_are_reported(store: MonitorStore) -> None:
    for window in range(10):
        times = tuple(RankStep(64 * window + number, 0, 1, 2) for number in range(64))
        store.answer(Report(JOB, WindowReport(0, "node0", 0, window, step_times=times)))
    asked = Report(JOB, WindowReport(0, "node0", 0, 10), asks_job_steps=True)
    assert [one.step for one in store.answer(asked).job_steps] == list(range(640 - MOST_JOINED, 640))


def test_another_job_and_a_rank_that_the_job_does_not_have_are_refused(store: MonitorStore) -> None:
    assert "watches attempt 1 of run" in store.answer(report(0, 1, WatchedJob("other", 0, 4, 4.0))).refused
    assert "watches attempt 1 of run" in store.answer(report(0, 1, WatchedJob("run", 1, 4, 4.0))).refused
    assert "4 ranks; rank 4 is not one of them" in store.answer(report(4, 1)).refused
    assert store.windows() == []


def test_without_a_job_it_takes_the_first_its_next_attempt_and_another_one_when_that_is_over() -> None:
    now = 0.0
    store = MonitorStore(monotonic=lambda: now)
    other, next_attempt = WatchedJob("other", 0, 4, 4.0), WatchedJob("run", 1, 4, 4.0)
    assert store.job is None
    assert store.answer(report(0, 1)).refused == ""
    assert "start another one for another job" in store.answer(report(0, 1, other)).refused
    assert store.answer(report(1, 2, next_attempt)).refused == ""
    assert [window.rank for window in store.windows()] == [1], "of the attempt before, nothing is left"
    assert store.answer(report(0, 3)).refused != "", "that one is over"
    now = 12.1
    assert store.answer(report(0, 1, other)).refused == ""
    assert store.job == other


def test_a_hang_is_known_until_training_goes_on(store: MonitorStore) -> None:
    assert store.answer(stopped(1)) == Reply()
    assert store.answer(RankHang(JOB, 2, True)) == Reply()
    assert (list(store.hangs()), store.hangs()[2], store.num_hang_messages) == ([1, 2], None, 2)
    store.answer(RankHang(JOB, 1, False))
    assert (list(store.hangs()), store.num_hang_messages) == ([2], 3)
    assert store.answer(stopped(1, of_rank=3)).refused == "a hang report of another rank"


def test_the_store_is_bounded_by_the_number_of_ranks(store: MonitorStore) -> None:
    for rank in range(4):
        store.answer(stopped(rank, tuple(range(2_000))))
    assert [reported is not None for reported in store.hangs().values()] == [True, True, False, False]
    for group in range(200):
        store.publish(64, group, {}, [Least(64, group, group, 0, 1, (1,))])
    known = [group for group in range(200) if store.answer(report(0, 1, groups=(group,))).least]
    assert known == list(range(200 - 16 * 4, 200))


@pytest.mark.parametrize("world_size", [1, 8, 10_000])
def test_a_job_whose_groups_are_irregular_can_tell_of_a_hang(world_size: int) -> None:
    store = MonitorStore(job := WatchedJob("run", 0, world_size, 4.0))
    members = tuple(range(world_size))
    for rank in range(min(world_size, 8)):
        store.answer(RankHang(job, rank, True, stopped(rank, members).report))
    assert None not in store.hangs().values()


@pytest.mark.parametrize("other", [WatchedJob("run", 0, 8, 4.0), WatchedJob("run", 0, 4, 2.0)])
def test_ranks_that_disagree_about_their_job_are_refused_with_what_differs(
    store: MonitorStore, other: WatchedJob
) -> None:
    assert store.answer(report(0, 1, other)).refused == (
        "the first rank to report said 4 ranks and windows of 4 s, this one says "
        f"{other.world_size} ranks and windows of {other.seconds:g} s: set COMMTRACE_MONITOR_SECONDS alike on all ranks"
    )
