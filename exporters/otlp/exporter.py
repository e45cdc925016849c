"""Export the steps of a rank: the harvester puts them into a bounded queue, and a thread or worker process sends them.

Training and recording never wait for the receiver: dropped spans are counted and reported.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from commtrace.config import Config
from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.exporters.live import exporter_names
from commtrace.exporters.otlp.process_sender import ProcessSender, WorkerError
from commtrace.exporters.otlp.queue import (
    MOST_SPANS,
    QUEUE_FULL,
    REFUSED,
    SPANS_PER_REQUEST,
    UNANSWERED,
    Account,
    ExportedStep,
    HeldJobSteps,
    MetricsSnapshot,
    Settle,
    SignalCounts,
    SpanFilter,
    StepQueue,
)  # fmt: skip
from commtrace.live.monitoring.job_steps import JobStep, RepetitionCounter
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.trace import schema
from commtrace.trace.schema import Row

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from commtrace.exporters.otlp.sender import MetricSink, SpanSink
    from commtrace.findings.status import LiveEvent

_logger = logging.getLogger("commtrace")

WINDOWS: Final = 3
"""Windows of the monitor. The other ranks report a step in the next window at the latest, and this rank learns of it in
the one after."""

START_SECONDS: Final = 3.0
CLOSE_SECONDS: Final = 1.6
ABORT_SECONDS: Final = 0.3
"""Longest waits at the end of a recording: for the worker to be ready, if there is something to send; for the spans
that are left; and for the thread to end after it was interrupted."""

_GATHERING_SECONDS: Final = 0.05
"""Wait of a step that does not fill a request for others of the same pass of the harvester."""

_IDLE_SECONDS: Final = 5.0


def open_otlp(config: Config, rank: LiveRank) -> StepListener | None:
    """Return the exporter of this rank; None if it has nothing to send.

    Raises:
        ConfigurationError: OpenTelemetry is switched off, or both spans and metrics are.
        MissingExtraError: it is not installed.
    """
    _check_that_it_is_installed()
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise ConfigurationError("OTEL_SDK_DISABLED=true switches it off")
    if config.otlp.level == "none" and not config.otlp.metrics:
        raise ConfigurationError("COMMTRACE_OTLP_LEVEL=none leaves nothing to send: set COMMTRACE_OTLP_METRICS=1")
    span_filter = SpanFilter.from_config(config, rank.metadata.world_size)
    if not config.otlp.metrics and not span_filter.takes_rank(rank.rank):
        return None
    if not config.otlp.file:
        _warn_of_grpc()
    return OtlpExporter(config, rank)


class SpanSender(Protocol):
    """Sends spans and metrics; entered, used and left on the exporter's thread."""

    @property
    def pause_seconds(self) -> float:
        """Return the seconds to wait before the next request."""

    def __enter__(self) -> SpanSender: ...

    def __exit__(self, *_: object) -> None: ...

    def send(self, steps: Sequence[ExportedStep], settle: Settle) -> None:
        """Send the spans of these steps, each settled once unless interrupted."""

    def send_metrics(self, metrics: MetricsSnapshot, settle: Settle) -> None:
        """Send metrics as one request, settled once unless interrupted."""

    def interrupt(self) -> None:
        """Make :meth:`send` return; called from another thread."""


def _warn_of_grpc() -> None:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol.strip().lower() != "http/protobuf":
        _logger.warning(
            "commtrace sends OTLP as http/protobuf, not %s: set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT to the receiver's "
            "HTTP port (4318 is usual), or install a TracerProvider in the script, whose exporter is then used",
            protocol,
        )


def _check_that_it_is_installed() -> None:
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "prometheus_client"):
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # of a parent
            found = None
        if found is None:
            raise MissingExtraError(f"OpenTelemetry is not installed ({name}): pip install 'commtrace[otlp]'")


def installed_provider() -> TracerProvider | None:
    """Return the SDK's TracerProvider that the script has installed; None without one."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def processor_of(provider: TracerProvider | None) -> SpanProcessor | None:
    """Return the span processor of a provider; None if it has none, or this version of the SDK hides it."""
    if provider is None:
        return None
    from opentelemetry.sdk.trace import SpanProcessor

    processor: object = getattr(provider, "_active_span_processor", None)
    if not isinstance(processor, SpanProcessor):
        return None
    return processor if getattr(processor, "_span_processors", ()) else None


class _Seen(NamedTuple):
    keys: frozenset[tuple[int, str, str]] = frozenset()

    def new_events(self, events: Sequence[LiveEvent]) -> list[LiveEvent]:
        return [event for event in events if _key(event) not in self.keys]


def _key(event: LiveEvent) -> tuple[int, str, str]:
    return event.time_ns, event.kind, event.finding.id


class OtlpExporter:
    """Exports the steps of one rank; ``spans`` and ``metrics`` open sinks in place of those of the configuration."""

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        *,
        spans: Callable[[], SpanSink] | None = None,
        metrics: Callable[[], MetricSink] | None = None,
        most_spans: int = MOST_SPANS,
    ) -> None:
        self._config = config
        self._rank = rank
        self._filter = SpanFilter.from_config(config, rank.metadata.world_size)
        self._takes_spans = config.otlp.level != "none" and self._filter.takes_rank(rank.rank)
        self._open_spans, self._open_metrics = spans, metrics
        self.account, self.metric_account = Account(), Account()
        self._queue = StepQueue(self.account, most_spans)
        self._metrics = _Metrics(rank) if config.otlp.metrics else None
        self._seen = _Seen()
        has_monitor = "monitor" in exporter_names(config.export)
        self._held = HeldJobSteps(rank, WINDOWS * config.monitor.seconds if has_monitor else 0.0)
        self._repetitions = RepetitionCounter()
        self._newest: StepSummary | None = None
        self._worker: ProcessSender | None = None
        self._sender: SpanSender | None = None
        self._is_ready = threading.Event()
        self._ends = threading.Event()
        self._interrupted = threading.Event()
        self._is_off = False
        self._drops_warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="commtrace-otlp", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        if self._metrics is not None:
            self._metrics.totals.add(summary)
        if self._takes_spans:
            self._newest = summary
            self._produce(self._exported(summary, rows))
        self._warn()

    def close(self) -> None:
        self._release_job_steps(all_of_them=True)
        self._ends.set()
        self._queue.close()
        if self._metrics is not None or self.account.waiting:
            self._is_ready.wait(START_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        elif self._is_ready.is_set():
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._interrupted.set()
            self._finish()
            sender = self._sender or self._worker
            if sender is not None:
                sender.interrupt()
            self._thread.join(ABORT_SECONDS)
        self._finish()
        _warn_of_total("spans", self.account, "; the trace files hold them all")
        _warn_of_total("requests with metrics", self.metric_account)

    def abandon_after_fork(self) -> None:
        # Thread and connections are the parent's. A lock of theirs may be held for ever: touch nothing else.
        if self._worker is not None:
            self._worker.abandon_after_fork()

    def _finish(self) -> None:
        self.account.finish()
        self.metric_account.finish()

    def _produce(self, step: ExportedStep) -> None:
        if self._is_off:
            self.account.produce(step.num_spans)
            self.account.drop(step.num_spans, REFUSED)
        elif step.num_spans:
            self._queue.put(step)

    def _exported(self, summary: StepSummary, rows: Sequence[Row]) -> ExportedStep:
        chosen = self._filter.rows(rows, summary.step)
        chosen.sort(key=lambda row: row.kind != schema.STEP)  # the step first; the sort is stable
        steps = [row for row in chosen if row.kind == schema.STEP]
        assert len(steps) <= 1, "every closed step is handed out with its own row"
        if steps and self._rank.rank == self._filter.first_rank:
            self._held.hold(self._own_job_step(steps[0]))
        events = tuple(self._rank.events)
        findings, self._seen = self._seen.new_events(events), _Seen(frozenset(map(_key, events)))
        return ExportedStep(
            summary=summary,
            rows=chosen,
            job_steps=self._held.release(),
            findings=findings,
            epoch_offset_ns=self._rank.epoch_ns(0),
            clock_error_ns=self._rank.clock()[1],
            dropped=self.account.total_dropped,
        )

    def _own_job_step(self, row: Row) -> JobStep:
        begin_ns, end_ns = self._rank.epoch_ns(row.start), self._rank.epoch_ns(row.end)
        return JobStep(row.step, self._repetitions.begin(row.step), begin_ns, end_ns, 1)

    def _release_job_steps(self, *, all_of_them: bool = False) -> None:
        released, newest = self._held.release(all_of_them=all_of_them), self._newest
        if released and newest is not None:
            self._produce(ExportedStep(newest, (), released, (), self._rank.epoch_ns(0), 0, self.account.total_dropped))

    def _warn(self) -> None:
        advice = "Fewer: COMMTRACE_OTLP_LEVEL, COMMTRACE_OTLP_SAMPLE, COMMTRACE_OTLP_RANKS"
        self._warn_of_drops("spans", self.account, f"; training, the trace files and later steps go on. {advice}")
        self._warn_of_drops("metrics", self.metric_account, "; later ones hold the same sums")

    def _warn_of_drops(self, what: str, account: Account, then: str) -> None:
        if what not in self._drops_warned and account.total_dropped:
            self._drops_warned.add(what)
            why = [
                text
                for reason, text in (
                    (QUEUE_FULL, "more come than it takes"),
                    (REFUSED, "it is not there, or refuses them"),
                    (UNANSWERED, "it does not answer in time; some may have arrived"),
                )
                if account.dropped[reason]
            ]
            _logger.warning(
                "commtrace: the OpenTelemetry receiver does not get all %s (%s). They are counted%s",
                what,
                "; ".join(why),
                then,
            )

    def _run(self) -> None:
        try:
            self._start_worker()
            self._is_ready.set()
            self._export_until_the_end()
        except Exception:
            self._is_off = True
            if not self._interrupted.is_set():
                _logger.warning("commtrace: OpenTelemetry export is off; training and the trace go on", exc_info=True)
        finally:
            self._is_ready.set()
            if self._worker is not None:
                self._worker.close(0.0)

    def _start_worker(self) -> None:
        if not self._config.otlp.process or self._open_spans or self._open_metrics or self._goes_to_a_provider:
            return
        try:
            self._worker = ProcessSender(self._config, self._rank)
            if self._interrupted.is_set():  # meanwhile, when there was no worker to interrupt
                self._worker.interrupt()
            self._worker.wait_until_ready()
        except WorkerError as error:
            self._worker = None
            if not self._interrupted.is_set():
                _logger.warning(
                    "commtrace: OpenTelemetry spans are sent by a thread, which costs training more time: no process "
                    "can do it (%s)",
                    error,
                )

    @property
    def _goes_to_a_provider(self) -> bool:
        return self._config.otlp.provider and processor_of(installed_provider()) is not None

    def _export_until_the_end(self) -> None:
        # Wait for the first step: by then the script has installed its provider, if it ever does.
        first = None
        while first is None and not self._ends.is_set() and (self._metrics is None or self._metrics.due_in()):
            first = self._next_step(None)
        if self._interrupted.is_set():
            return
        with self._open_sender() as self._sender:
            while not self._interrupted.is_set():
                step, first = first or self._next_step(self._sender), None
                if step is not None:
                    self._sender.send(self._steps_of_a_request(step), self.account.settle)
                self._warn()  # not only at the end of a step, which may take minutes
                ends = step is None and self._ends.is_set()
                if self._metrics is not None and (ends or self._metrics.is_due()):
                    self._send_metrics(self._sender, self._metrics)
                if ends:
                    return

    def _send_metrics(self, sender: SpanSender, metrics: _Metrics) -> None:
        counts = SignalCounts(self.account.counts, self.metric_account.counts)
        self.metric_account.produce(1)
        sender.send_metrics(metrics.newest(counts), self.metric_account.settle)

    def _next_step(self, sender: SpanSender | None) -> ExportedStep | None:
        if sender is not None:
            self._ends.wait(sender.pause_seconds)
        self._release_job_steps()
        return self._queue.get(_IDLE_SECONDS if self._metrics is None else min(self._metrics.due_in(), _IDLE_SECONDS))

    def _steps_of_a_request(self, first: ExportedStep) -> list[ExportedStep]:
        # Short steps come many at a time; a request for each would cost more than their spans.
        if first.num_spans < SPANS_PER_REQUEST:
            self._ends.wait(_GATHERING_SECONDS)
        return self._queue.get_with(first, SPANS_PER_REQUEST)

    def _open_sender(self) -> SpanSender:
        provider = installed_provider()
        attributes = dict(provider.resource.attributes) if provider is not None else {}
        processor = processor_of(provider) if self._config.otlp.provider else None
        if self._worker is not None:
            if processor is None:
                self._worker.provider_attributes = attributes
                return self._worker
            self._worker.close(0.0)  # the script installed its provider later
        from commtrace.exporters.otlp.sender import Sender

        if processor is not None:
            # Its processors are shut down when Python ends: send the last steps before.
            self._rank.end_first()
        return Sender(
            self._config, self._rank, attributes, processor, spans=self._open_spans, metrics=self._open_metrics
        )


def _warn_of_total(what: str, account: Account, then: str = "") -> None:
    if account.total_dropped:
        _logger.warning(
            "commtrace: %d of %d %s were not exported (%s)%s%s",
            account.total_dropped,
            account.produced,
            what,
            ", ".join(f"{reason}: {count}" for reason, count in account.dropped.items() if count),
            ", the unanswered ones as far as is known" if account.dropped[UNANSWERED] else "",
            then,
        )


class _Metrics:
    """The metrics of the Prometheus endpoint, and the time when they are due."""

    def __init__(self, rank: LiveRank) -> None:
        # Imported here: only metrics need prometheus-client.
        from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters

        self.totals = StepCounters()
        self._collector = RankCollector(rank, self.totals)
        self._start_ns = time.time_ns()
        self._seconds = _metric_seconds()
        self._due = time.monotonic() + self._seconds

    def due_in(self) -> float:
        return max(self._due - time.monotonic(), 0.0)

    def is_due(self) -> bool:
        """Return True once per interval."""
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + self._seconds
        return True

    def newest(self, counts: SignalCounts) -> MetricsSnapshot:
        return MetricsSnapshot(list(self._collector.collect()), counts, self._start_ns, time.time_ns())


def _metric_seconds() -> float:
    """Return the interval in seconds, from ``OTEL_METRIC_EXPORT_INTERVAL`` (ms)."""
    try:
        return max(float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or 60_000) / 1e3, 0.1)
    except ValueError:
        return 60.0
