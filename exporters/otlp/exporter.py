"""The exporter: the harvester leaves steps in a bounded queue; a thread of its own makes spans of them and sends them.

Whatever becomes of the receiver, training and recording do not notice: a full queue, a batch that is refused and what
is left at the end are counted, and told.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace.config import Config
from commtrace.errors import ConfigurationError, MissingExtraError

try:
    from opentelemetry.context import attach, set_value
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from commtrace.exporters.otlp import file, sinks
    from commtrace.exporters.otlp.metrics import metrics_data
    from commtrace.exporters.otlp.resource import installed_provider, resource_of
    from commtrace.exporters.otlp.spans import SpanMaker
except ImportError as error:
    raise MissingExtraError(f"OpenTelemetry is not installed ({error}): pip install 'commtrace[otlp]'") from error

from commtrace.exporters.otlp.choice import Choice
from commtrace.exporters.otlp.queue import MOST_SPANS, QUEUE_FULL, REFUSED, Account, Job, JobQueue
from commtrace.exporters.prometheus.metrics import RankCollector
from commtrace.exporters.prometheus.totals import StepTotals
from commtrace.live.gil import Breath
from commtrace.live.listener import StepListener
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace import schema
from commtrace.trace.writer import Row

_logger = logging.getLogger("commtrace")

SPANS_PER_BATCH: Final = 512
CLOSE_SECONDS: Final = 1.6
ABORT_SECONDS: Final = 0.3
"""So long the end of a recording waits for what is left to be sent, and then for the thread to give up."""

_GATHERING_SECONDS: Final = 0.05
"""So long a step that does not fill a request waits for others of the same pass of the harvester."""

_IDLE_SECONDS: Final = 5.0
_KIND, _STEP = 0, 5


def open_otlp(config: Config, rank: LiveRank) -> StepListener | None:
    """The exporter of this rank; None where the configuration leaves it nothing to do.

    Raises:
        ConfigurationError: OpenTelemetry is switched off, or spans and metrics both are.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise ConfigurationError("OTEL_SDK_DISABLED=true switches it off")
    if config.otlp_level == "none" and not config.otlp_metrics:
        raise ConfigurationError("COMMTRACE_OTLP_LEVEL=none leaves nothing to send: set COMMTRACE_OTLP_METRICS=1")
    choice = Choice.of(config, rank.metadata.world_size)
    if not config.otlp_metrics and not choice.takes_rank(rank.rank):
        return None
    if not config.otlp_file:
        _warn_of_grpc()
    return OtlpExporter(config, rank)


def _warn_of_grpc() -> None:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol.strip().lower() != "http/protobuf":
        _logger.warning(
            "commtrace sends OTLP as http/protobuf, not %s: set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT to the receiver's "
            "HTTP port (4318 is usual), or install a TracerProvider in the script, whose exporter is then used",
            protocol,
        )


class _Seen(NamedTuple):
    """Findings that were told before, by what tells them apart."""

    keys: frozenset[tuple[Any, ...]] = frozenset()

    def news(self, events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [event for event in events if _key(event) not in self.keys]


def _key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return event["time"], event["kind"], event["rank"]


class OtlpExporter:
    """Exports the steps of one rank.

    Args:
        config: options.
        rank: this rank.
        spans, metrics: make the sinks, on the exporter's thread; without, what the configuration asks for.
        most_spans: bound of the queue.
    """

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        *,
        spans: Callable[[], sinks.SpanSink] | None = None,
        metrics: Callable[[], sinks.MetricSink] | None = None,
        most_spans: int = MOST_SPANS,
    ) -> None:
        self._config = config
        self._rank = rank
        self._choice = Choice.of(config, rank.metadata.world_size)
        self._takes_spans = config.otlp_level != "none" and self._choice.takes_rank(rank.rank)
        self._open_spans = spans or self._span_sink
        self._open_metrics = metrics or self._metric_sink
        self.account = Account()
        self._queue = JobQueue(self.account, most_spans)
        self._totals = StepTotals()
        self._collector = RankCollector(rank, self._totals)
        self._seen = _Seen()
        self._span_sink_open: sinks.SpanSink | None = None
        self._metric_sink_open: sinks.MetricSink | None = None
        self._resource: Resource | None = None
        self._resource_key: tuple[Any, ...] = ()
        self._start_ns = time.time_ns()
        self._metric_seconds = _metric_seconds()
        self._ends = threading.Event()
        self._gave_up = threading.Event()
        self._is_off = False
        self._drops_told = False
        self._thread = threading.Thread(target=self._run, name="commtrace-otlp", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        if self._config.otlp_metrics:
            self._totals.add(summary)
        if self._takes_spans:
            self._produce(self._job(summary, rows))
        self._tell_drops()

    def close(self) -> None:
        self._ends.set()
        self._queue.close()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._gave_up.set()
            self.account.finish()
            self._shut_down_sinks()  # interrupts an exporter that waits to try again
            self._thread.join(ABORT_SECONDS)
        self.account.finish()
        if self.account.total_dropped:
            _logger.warning(
                "commtrace: %d of %d spans were not exported (%s); the trace files hold them all",
                self.account.total_dropped,
                self.account.produced,
                ", ".join(f"{reason}: {count}" for reason, count in self.account.dropped.items() if count),
            )

    def abandon_after_fork(self) -> None:
        """Thread and connections are the parent's. A lock of the connections may be held for ever: touch nothing."""

    def _produce(self, job: Job) -> None:
        if self._is_off:
            self.account.produce(job.num_spans)
            self.account.drop(job.num_spans, REFUSED)
        elif job.num_spans:
            self._queue.put(job)

    def _job(self, summary: StepSummary, rows: Sequence[Row]) -> Job:
        chosen = self._choice.rows(rows, summary.step)
        chosen.sort(key=lambda row: row[_KIND] != schema.STEP)  # stable: only the step itself comes first
        steps = sum(row[_KIND] == schema.STEP for row in chosen)
        assert steps <= 1, "every closed step is handed out with its own row"
        events = tuple(self._rank.events)
        findings, self._seen = self._seen.news(events), _Seen(frozenset(map(_key, events)))
        anchor = self._rank.anchor
        return Job(
            summary=summary,
            rows=chosen,
            is_root=steps > 0 and self._rank.rank == self._choice.first_rank,
            findings=findings,
            epoch_offset_ns=anchor.realtime_ns - anchor.monotonic_ns,
            clock_error_ns=self._rank.clock()[1],
            dropped=self.account.total_dropped,
        )

    def _tell_drops(self) -> None:
        if not self._drops_told and self.account.total_dropped:
            self._drops_told = True
            why = [
                text
                for reason, text in (
                    (QUEUE_FULL, "more come than it takes"),
                    (REFUSED, "it is not there, too slow, or refuses them"),
                )
                if self.account.dropped[reason]
            ]
            _logger.warning(
                "commtrace: the OpenTelemetry receiver does not get all spans (%s). They are counted; training, the "
                "trace files and later steps go on. Fewer: COMMTRACE_OTLP_LEVEL, COMMTRACE_OTLP_SAMPLE, "
                "COMMTRACE_OTLP_RANKS",
                "; ".join(why),
            )

    def _run(self) -> None:
        attach(set_value("suppress_instrumentation", True))  # what instruments HTTP must not make spans of our requests
        try:
            with sinks.QuietExporters():
                self._export_until_the_end()
        except Exception:
            self._is_off = True
            if not self._gave_up.is_set():
                _logger.warning("commtrace: OpenTelemetry export is off; training and the trace go on", exc_info=True)
        finally:
            self._shut_down_sinks()

    def _export_until_the_end(self) -> None:
        if not self._config.otlp_file:
            # The SDK would do so with the first request, when training is under way: a tenth of a second of the GIL.
            with suppress(ImportError):
                importlib.import_module("requests")
        maker = SpanMaker(self._rank, self._choice, self._current_resource)
        metrics_due = time.monotonic() + self._metric_seconds
        while not self._gave_up.is_set():
            job = self._queue.get(min(max(metrics_due - time.monotonic(), 0.0), _IDLE_SECONDS))
            if job is not None:
                self._export(maker, self._jobs_of_a_request(job))
            ends = job is None and self._ends.is_set()
            if self._config.otlp_metrics and (ends or time.monotonic() >= metrics_due):
                self._export_metrics()
            if time.monotonic() >= metrics_due:
                metrics_due = time.monotonic() + self._metric_seconds
            if ends:
                return

    def _jobs_of_a_request(self, first: Job) -> list[Job]:
        """Short steps come many at a time; a request for each would cost more than all of their spans."""
        if first.num_spans < SPANS_PER_BATCH:
            self._ends.wait(_GATHERING_SECONDS)
        return self._queue.get_with(first, SPANS_PER_BATCH)

    def _export(self, maker: SpanMaker, jobs: Sequence[Job]) -> None:
        if self._span_sink_open is None:
            self._span_sink_open = self._open_spans()
        left = sum(job.num_spans for job in jobs)
        for batch in _batches(_breathing(chain.from_iterable(map(maker.spans, jobs)))):
            left -= len(batch)
            if self._gave_up.is_set():
                return
            self.account.settle(len(batch), self._span_sink_open.export(batch))
        assert left == 0, "jobs know how many spans they make"

    def _export_metrics(self) -> None:
        if self._metric_sink_open is None:
            self._metric_sink_open = self._open_metrics()
        families = self._collector.collect()
        data = metrics_data(families, self.account, self._current_resource(), self._start_ns, time.time_ns())
        self._metric_sink_open.export(data)

    def _current_resource(self) -> Resource:
        """Made anew when the framework has told more about the topology."""
        marks = self._rank.marks
        key = (tuple(marks.coordinates.items()), tuple(marks.parallel.items()))
        if self._resource is None or key != self._resource_key:
            self._resource, self._resource_key = resource_of(self._rank, installed_provider()), key
        return self._resource

    def _span_sink(self) -> sinks.SpanSink:
        if self._config.otlp_file:
            return file.FileSpans(Path(self._config.otlp_file), self._rank.run_id, self._rank.rank)
        processor = sinks.processor_of(installed_provider()) if self._config.otlp_provider else None
        return sinks.HttpSpans() if processor is None else sinks.ProviderSpans(processor)

    def _metric_sink(self) -> sinks.MetricSink:
        if self._config.otlp_file:
            return file.FileMetrics(Path(self._config.otlp_file), self._rank.run_id, self._rank.rank)
        return sinks.HttpMetrics()

    def _shut_down_sinks(self) -> None:
        span_sink, self._span_sink_open = self._span_sink_open, None
        metric_sink, self._metric_sink_open = self._metric_sink_open, None
        for sink in (span_sink, metric_sink):
            if sink is not None:
                sink.shutdown()


def _metric_seconds() -> float:
    """Between two sendings: ``OTEL_METRIC_EXPORT_INTERVAL``, ms."""
    try:
        return max(float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or 60_000) / 1e3, 0.1)
    except ValueError:
        return 60.0


class _Breathing(list[ReadableSpan]):
    """Lets training have the interpreter again and again while the SDK encodes."""

    def __iter__(self) -> Iterator[ReadableSpan]:
        return _breathing(super().__iter__())


def _breathing(spans: Iterator[ReadableSpan]) -> Iterator[ReadableSpan]:
    breath = Breath()
    for span in spans:
        breath.take()
        yield span


def _batches(spans: Iterator[ReadableSpan]) -> Iterator[_Breathing]:
    while batch := _Breathing(islice(spans, SPANS_PER_BATCH)):
        yield batch
