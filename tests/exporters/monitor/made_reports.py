"""Reports of ranks to the monitor."""

from __future__ import annotations

from commtrace.exporters.monitor.messages import RankHang, Report, WatchedJob, WireHangReport
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.wire_types import RankRange, WireGroup
from commtrace.trace.hang_report import Activity
from tests.exporters.monitor.conftest import JOB


def report(
    rank: int, window: int, job: WatchedJob = JOB, groups: tuple[int, ...] = (), findings: bool = False
) -> Report:
    return Report(job, WindowReport(rank, "node0", 3, window), groups, findings)


def stopped(rank: int, members: tuple[int, ...] = (), of_rank: int | None = None) -> RankHang:
    groups = (WireGroup(5, None if members else RankRange(0, 4, 1), members, 0, "dp"),)
    activity = Activity((1, -1, -1, -1), (), {"5": 3}, (), ())
    own = rank if of_rank is None else of_rank
    reported = WireHangReport(own, "node0", "", "gloo", 1.7e9, 60 * 10**9, 10**9, groups, {}, {}, activity, ())
    return RankHang(JOB, rank, True, reported)
