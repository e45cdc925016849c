"""The monitor's part in every rank: a thread that reports, and on rank 0 also listens and compares."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from commtrace.config import Config
from commtrace.errors import CommtraceError
from commtrace.exporters.live import exporter_names
from commtrace.exporters.monitor import rendezvous
from commtrace.exporters.monitor.aggregator import Aggregator
from commtrace.exporters.monitor.exchange import MonitorClient, MonitorError, MonitorServer
from commtrace.exporters.monitor.hangs import hang_report
from commtrace.exporters.monitor.messages import (
    MOST_GROUPS_ASKED,
    MessageError,
    RankHang,
    Reply,
    Report,
    Request,
    WatchedJob,
    WireHangReport,
    WireProcess,
)
from commtrace.exporters.monitor.rendezvous import Address, checked_token, new_token, read_token, token_path
from commtrace.exporters.monitor.sinks import (
    AlertSink,
    FileSink,
    FindingsSink,
    LiveSink,
    LogSink,
    WebhookSink,
    open_webhook,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.exporters.otlp.queue import SpanFilter
from commtrace.findings.status import JobView
from commtrace.live.monitoring.window import ReportWindow, WindowReport
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.recording.process_end import uncaught_exception
from commtrace.trace.schema import Row

_logger = logging.getLogger("commtrace")

_JOIN_DELAY: Final = 0.25
"""The join waits for this share of a window, so that every rank has reported the previous one."""

_TICK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 10.0
_SECONDS_TO_END: Final = 0.5
"""The end of the job waits for an exchange this long, then cuts it."""

_WINDOWS_KEPT: Final = 4
_FAILURES_TO_WARN: Final = 3
"""A single failure is no reason to warn: when a job ends, the monitor ends before the last rank."""

_CONNECTIONS_PER_SECOND: Final = 100
"""Limit of the monitor in rank 0, plus one for each rank: each connection takes the GIL from training."""


def open_monitor(config: Config, rank: LiveRank) -> StepListener:
    """Return the monitor of this rank. Rank 0 compares, unless a monitor outside of the job does."""
    return MonitorExporter(config, rank)


class MonitorExporter:
    """Reports the steps of this rank, window by window; ``clock`` returns epoch seconds.

    Raises:
        ConfigurationError: the monitor's address or token cannot be used.
    """

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._rank = rank
        self._clock = clock
        self._monotonic_ns = monotonic_ns
        self._job = WatchedJob(rank.run_id, rank.metadata.attempt, rank.metadata.world_size, config.monitor.seconds)
        own = rank.metadata
        self._process = WireProcess(own.host, own.boot_id, own.pid, own.session)
        shows_steps = "otlp" in exporter_names(config.export) and config.otlp.level != "none"
        span_filter = SpanFilter.from_config(config, rank.metadata.world_size)
        self._asks_job_steps = shows_steps and rank.rank == span_filter.first_rank
        self._window = ReportWindow(rank, times_every=span_filter.every if shows_steps else 0)
        self._worked_ns: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._closing = False
        self._client = _outside(config) if config.monitor.store else None
        self._store: MonitorStore | None = None
        self._server: MonitorServer | None = None
        self._aggregator: Aggregator | None = None
        self._reported_hang: object = None
        self._webhook: WebhookSink | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="commtrace-monitor", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        with self._lock:
            self._window.add(summary, rows)

    def close(self) -> None:
        self._closing = True
        self._stop.set()
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive() and self._client is not None:
            self._client.cut()
            self._thread.join(_SECONDS_TO_END)
        if self._server is not None:
            self._server.close()
        if self._webhook is not None:
            self._webhook.close()

    def abandon_after_fork(self) -> None:
        self._stop.set()
        if self._server is not None:
            self._server.abandon_after_fork()

    def _run(self) -> None:
        seconds = self._config.monitor.seconds
        reported = joined = int(self._clock() // seconds)
        while not self._stop.wait(min(_TICK_SECONDS, seconds * _JOIN_DELAY)):
            if self._compares and self._store is None:
                self._guarded(self._listen)
            now = self._clock()
            number = int(now // seconds)
            if number != reported:
                reported = number
                self._guarded(lambda number=number: self._report(number))  # type: ignore[misc]
            self._guarded(self._report_hang)
            if self._store is not None:
                if joined != reported and now >= (reported + _JOIN_DELAY) * seconds:
                    joined = reported
                    self._guarded(self._join)
                self._guarded(self._look_for_hangs)
        if self._closing:
            self._report_end(reported)

    @property
    def _compares(self) -> bool:
        return self._rank.rank == 0 and not self._config.monitor.store

    def _listen(self) -> None:
        # On rank 0; the address is published to the other ranks.
        store, token = MonitorStore(self._job), new_token()
        self._server = MonitorServer(
            Address(rendezvous.host_for_ranks(), 0),
            token,
            store.answer,
            connections_per_second=_CONNECTIONS_PER_SECOND + self._job.world_size,
        )
        try:
            rendezvous.publish(self._job.run_id, self._job.attempt, self._server.address, token)
        except CommtraceError:
            self._server.close()
            self._server = None
            raise
        self._store = store
        self._aggregator = Aggregator(self._job, self._sinks(), self._rank.directory)

    def _exchange(self, request: Request) -> Reply:
        if self._store is not None:
            return self._store.answer(request)
        if self._client is None:
            found = None if self._compares else rendezvous.find(self._job.run_id, self._job.attempt)
            if found is None:
                raise MonitorError("rank 0 has not published its monitor's address yet")
            self._client = MonitorClient(*found)
        return self._client.exchange(request)

    def _report_end(self, window: int) -> None:
        if self._client is None or self._clock() < self._retry_at:
            return
        # Otherwise the others would take this rank for dead.
        error = uncaught_exception()
        exception = "" if error is None else type(error).__name__
        node = self._rank.metadata.node
        report = WindowReport(self._rank.rank, node, 0, window + 1, ended=True, exception=exception)
        with contextlib.suppress(MonitorError):  # the monitor may have ended before us
            self._client.exchange(Report(self._job, report))

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._stop.is_set() or self._clock() < self._retry_at:
            return  # At the end no further exchange is begun.
        try:
            action()
        except CommtraceError as error:
            self._failed(error)
        except Exception:
            self._stop.set()
            _logger.warning("commtrace: the monitor is off in this process; training goes on", exc_info=True)

    def _failed(self, error: CommtraceError) -> None:
        self._rank.score = None
        if not self._compares:
            self._rank.findings, self._rank.job = (), None
        self._failures += 1
        self._retry_at = self._clock() + (_RETRY_SECONDS if self._failures >= _FAILURES_TO_WARN else 0.0)
        if self._failures == _FAILURES_TO_WARN:
            _logger.warning(
                "commtrace: rank %d cannot reach its monitor and tries again every %g s; training goes on: %s",
                self._rank.rank,
                _RETRY_SECONDS,
                error,
            )

    def _report(self, number: int) -> None:
        with self._lock:
            report = self._window.close(number, self._monotonic_ns())
            groups = tuple(self._window.waits.groups[:MOST_GROUPS_ASKED]) if self._shows_more else ()
        asks_findings = self._shows_more and not self._compares and (self._rank.rank == 0 or self._rank.asks_job)
        request = Report(self._job, report, groups, asks_findings, self._process, self._asks_job_steps)
        reply = self._exchange(request)
        self._failures = 0
        if self._asks_job_steps:
            self._rank.job_steps = {step.key: step for step in reply.job_steps}
        if self._shows_more:
            self._learn(report, reply)
        if asks_findings:
            self._learn_findings(reply)

    def _learn(self, report: WindowReport, reply: Reply) -> None:
        if report.steps:
            self._worked_ns = dict([*self._worked_ns.items(), (report.window, sum(report.work_ns))][-_WINDOWS_KEPT:])
        baseline = reply.baseline
        self._rank.work_class = baseline.work_class
        if baseline.window in self._worked_ns:  # the one before this one, where the job is in good order
            worked_ns = self._worked_ns[baseline.window]
            self._rank.score = worked_ns / baseline.work_ns if baseline.work_ns > 0 else None
        with self._lock:
            waits = self._window.waits
            waits.resize(baseline.block_steps)
            waits.settle(reply.least)
            self._rank.split = {key: replace(split) for key, split in waits.split.items()}

    def _learn_findings(self, reply: Reply) -> None:
        told = reply.findings
        self._rank.job = JobView(told.findings, told.events, told.means)
        if self._rank.rank == 0:  # one rank exports the findings as metrics and spans
            self._rank.joins = True
            self._rank.findings = told.findings
            self._rank.events = deque(told.events, self._rank.events.maxlen)

    @property
    def _shows_more(self) -> bool:
        # Without another exporter, nothing would show the replies: they are not asked for.
        return self._config.export.strip().lower() != "monitor"

    def _join(self) -> None:
        if self._aggregator is not None and self._store is not None:
            self._aggregator.join(self._store, self._clock())

    def _look_for_hangs(self) -> None:
        if self._aggregator is not None and self._store is not None:
            self._aggregator.look_for_hangs(self._store, self._clock())

    def _report_hang(self) -> None:
        report = self._rank.hang()
        if report is self._reported_hang:
            return
        declared = None if report is None else self._declared(report.to_json())
        self._exchange(RankHang(self._job, self._rank.rank, report is not None, declared))
        self._reported_hang = report

    def _declared(self, report: Mapping[str, object]) -> WireHangReport | None:
        try:
            return hang_report(report)
        except MessageError as error:
            _logger.warning("commtrace: rank %d cannot report its hang in detail: %s", self._rank.rank, error)
            return None

    def _sinks(self) -> list[AlertSink]:
        sinks: list[AlertSink] = [LogSink(), FileSink(self._rank.directory), LiveSink(self._rank)]
        if self._webhook is None:
            self._webhook = open_webhook(self._config.monitor, self._rank.run_id)
        if self._store is not None:
            sinks.append(FindingsSink(self._store))
        return sinks if self._webhook is None else [*sinks, self._webhook]


def _outside(config: Config) -> MonitorClient:
    address = Address.parse(config.monitor.store)
    token = checked_token(config.monitor.token) if config.monitor.token else read_token(token_path())
    return MonitorClient(address, token)
