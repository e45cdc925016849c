"""Compare the reports of all ranks and alert on changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from commtrace.exporters.monitor.hangs import HangAggregator
from commtrace.exporters.monitor.messages import WatchedJob
from commtrace.exporters.monitor.sinks import AlertSink
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.finding import ranked
from commtrace.findings.status import LiveEvent, MonitorStatus
from commtrace.live.monitoring.waits import LeastTimes
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import WindowReport, job_means
from commtrace.trace.files.rank_files import rank_directory, stack_path
from commtrace.trace.files.side_files import read_stack

_logger = logging.getLogger("commtrace")


class Aggregator:
    """Compares the windows of a job's ranks, and alerts the sinks after every comparison."""

    def __init__(self, job: WatchedJob, sinks: Sequence[AlertSink], directory: Path | None = None) -> None:
        self.watch = Watch(job.world_size, job.seconds)
        self._least = LeastTimes(job.seconds)
        self._job = job
        self._sinks = sinks
        if directory is None:
            self._hangs = HangAggregator(job)
        else:
            self._hangs = HangAggregator(job, find_stack=partial(_stack_of, directory), run_name=str(directory))
        self._newest: list[WindowReport] = []
        self._hangs_failed = False

    def join(self, store: MonitorStore, now: float) -> list[LiveEvent]:
        """Compare the newest windows, alert, and publish the replies to ranks."""
        self._newest = store.windows()
        events = self._alert(self.watch.join(self._newest, now), now)
        least = self._least.join((report.rank, report.block) for report in self._newest)
        self._least.size_blocks(self.watch.step_ns)
        store.publish(self._least.steps, self.watch.window, self.watch.work_ns, least, self.watch.classes)
        return events

    def look_for_hangs(self, store: MonitorStore, now: float) -> list[LiveEvent]:
        """Alert on a new hang, or on news about the known one."""
        if self._hangs_failed:
            return []
        try:
            events = self._hangs.look(store, now, self.watch.step_ns)
        except Exception:
            # Slow ranks are still found.
            self._hangs_failed = True
            _logger.warning("commtrace: the monitor no longer reports hangs; each rank's file does", exc_info=True)
            return []
        return self._alert(events, now) if events else []

    def _alert(self, events: list[LiveEvent], now: float) -> list[LiveEvent]:
        status = self._status(self._newest, now)
        for sink in self._sinks:
            sink.alert(events, status)
        return events

    def _status(self, reports: Sequence[WindowReport], now: float) -> MonitorStatus:
        watch = self.watch
        hang = () if self._hangs.finding is None else (self._hangs.finding,)
        return MonitorStatus(
            time_ns=round(now * 1e9),
            world_size=self._job.world_size,
            ranks_heard=watch.reporting.heard,
            step_ns=watch.step_ns,
            last_step=max((report.last_step for report in reports), default=-1),
            peers_missing=watch.peers_missing,
            findings=ranked([*hang, *watch.findings]),
            means=job_means(reports),
            own_cost=next((report.own_cost for report in reports if report.own_cost is not None), None),
        )


def _stack_of(directory: Path, rank: int, session: int) -> tuple[str, ...]:
    return read_stack(stack_path(rank_directory(directory, rank), session))
