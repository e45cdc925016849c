"""The state of the monitor of one job: the newest reports of its ranks, and the replies to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from commtrace.exporters.monitor.messages import (
    MOST_LEAST,
    MonitorFindings,
    PeerBaseline,
    RankHang,
    Reply,
    Report,
    Request,
    WatchedJob,
    WireHangReport,
)
from commtrace.live.monitoring.job_steps import JobSteps
from commtrace.live.monitoring.reporting import SILENT_WINDOWS
from commtrace.live.monitoring.waits import Least, by_group
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.wire_types import most_group_members

_GROUPS_PER_RANK: Final = 16
"""Groups per rank whose least times are kept, the newest."""


class MonitorStore:
    """The newest reports of a job's ranks, written by the server's thread and read by the aggregator's.

    ``job`` is the only one that may report. None: the first to report, until its next attempt begins, or another job
    reports after it has fallen silent.
    """

    def __init__(self, job: WatchedJob | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._is_open = job is None
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._heard_at = 0.0
        self._clear()

    def _clear(self) -> None:
        self._reports: dict[int, Report] = {}
        self._hangs: dict[int, WireHangReport | None] = {}
        self._num_hang_messages = 0
        self._stage_work_ns: Mapping[int, float] = {}
        self._classes: Mapping[int, int] = {}
        self._block_steps, self._window = 0, -1
        self._least: dict[int, Sequence[Least]] = {}
        self._findings = MonitorFindings()
        self._job_steps = JobSteps()

    @property
    def job(self) -> WatchedJob | None:
        """Return the job that reports here; None before one does."""
        return self._job

    def answer(self, request: Request) -> Reply:
        """Take a request of a rank and return the reply. Called on the server's thread."""
        with self._lock:
            if self._job is None or self._is_followed_by(request.job, self._job):
                self._job = request.job
                self._clear()
            refused = self._reason_to_refuse(request, self._job)
            if refused:
                return Reply(refused=refused)
            self._heard_at = self._monotonic()
            if isinstance(request, RankHang):
                return self._take_hang(request)
            self._reports[request.window.rank] = request
            self._job_steps.add(request.window.step_times)
            return self._reply_to(request)

    def windows(self) -> list[WindowReport]:
        return [report.window for report in self.reports()]

    def reports(self) -> list[Report]:
        """Return the newest report of each rank, in the order of ranks."""
        with self._lock:
            return [self._reports[rank] for rank in sorted(self._reports)]

    @property
    def num_hang_messages(self) -> int:
        """Return the number of messages about hangs and their ends."""
        return self._num_hang_messages

    def hangs(self) -> dict[int, WireHangReport | None]:
        """Return the reports of ranks that hang, by rank; None if a rank's report did not fit."""
        with self._lock:
            return dict(sorted(self._hangs.items()))

    def publish(
        self,
        block_steps: int,
        window: int,
        work_ns: Mapping[int, float],
        least: Sequence[Least],
        classes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Replace the content of replies.

        ``work_ns`` is by stage, or by the class of ``classes``, which are by rank; least times of other groups stay.
        """
        with self._lock:
            self._block_steps, self._window, self._stage_work_ns = block_steps, window, work_ns
            self._classes = classes
            for group, times in by_group(least).items():
                self._least.pop(group, None)
                self._least[group] = times
            most = _GROUPS_PER_RANK * (self._job.world_size if self._job else 1)
            while len(self._least) > most:
                del self._least[next(iter(self._least))]

    def publish_findings(self, findings: MonitorFindings) -> None:
        with self._lock:
            self._findings = findings

    def _is_followed_by(self, other: WatchedJob, job: WatchedJob) -> bool:
        if not self._is_open or other == job:
            return False
        is_next_attempt = other.run_id == job.run_id and other.attempt > job.attempt
        return is_next_attempt or self._monotonic() - self._heard_at > SILENT_WINDOWS * job.seconds

    def _reason_to_refuse(self, request: Request, job: WatchedJob) -> str:
        own = request.job
        if (own.run_id, own.attempt) != (job.run_id, job.attempt):
            return f"it watches attempt {job.attempt + 1} of {job.run_id}; start another one for another job"
        if own != job:
            return (
                f"the first rank to report said {job.world_size} ranks and windows of {job.seconds:g} s, this one says "
                f"{own.world_size} ranks and windows of {own.seconds:g} s: set COMMTRACE_MONITOR_SECONDS alike on all "
                "ranks"
            )
        rank = request.rank if isinstance(request, RankHang) else request.window.rank
        if rank >= job.world_size:
            return f"the job has {job.world_size} ranks; rank {rank} is not one of them"
        return ""

    def _take_hang(self, request: RankHang) -> Reply:
        report = request.report
        if report is not None and report.rank != request.rank:
            return Reply(refused="a hang report of another rank")
        others = {rank: known for rank, known in self._hangs.items() if rank != request.rank}
        most = most_group_members(request.job.world_size)
        if sum(map(_num_members, [*others.values(), report])) > most:
            report = None
        self._hangs = {**others, request.rank: report} if request.has_stopped else others
        self._num_hang_messages += 1
        return Reply()

    def _reply_to(self, report: Report) -> Reply:
        work_class = self._classes.get(report.window.rank, -1)
        work_ns = self._stage_work_ns.get(report.window.stage if work_class < 0 else work_class, 0.0)
        return Reply(
            baseline=PeerBaseline(self._block_steps, self._window, work_ns, work_class),
            least=tuple(least for group in report.groups for least in self._least.get(group, ()))[:MOST_LEAST],
            findings=self._findings if report.asks_findings else MonitorFindings(),
            job_steps=self._job_steps.newest if report.asks_job_steps else (),
        )


def _num_members(report: WireHangReport | None) -> int:
    return sum(len(group.members) for group in report.groups) if report is not None else 0
