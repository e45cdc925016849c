"""Make the spans and metrics of a rank and send them, in the worker process or on a thread of the rank."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final, Protocol

from opentelemetry.context import attach, detach, set_value
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.util.types import AttributeValue

from commtrace.config import Config
from commtrace.exporters.otlp.file import FileMetrics, FileSpans
from commtrace.exporters.otlp.metrics import metrics_data
from commtrace.exporters.otlp.queue import SPANS_PER_REQUEST, ExportedStep, MetricsSnapshot, Settle, SpanFilter
from commtrace.exporters.otlp.spans import NO_ATTRIBUTES, SpanMaker, resource_of
from commtrace.live.gil import GilYield
from commtrace.live.rank import LiveRank

_MOST_SECONDS: Final = 30.0
"""For the spans that are handed over together, as long as the receiver fails."""


class SpanSink(Protocol):
    """Takes batches of spans on the exporter's own thread; it may block."""

    def export(self, spans: Sequence[ReadableSpan]) -> bool | None:
        """Return True if they were accepted; None if no answer came."""

    def shutdown(self) -> None:
        """Close it. Called once, from another thread if ``export`` does not return."""


class MetricSink(Protocol):
    """Takes metrics in the same way."""

    def export(self, metrics: MetricsData) -> bool | None:
        """Return True if they were accepted; None if no answer came."""

    def shutdown(self) -> None:
        """Close it."""


class ProviderSpans:
    """Sends spans through the processor of a provider, whose tracer cannot make spans with given ids."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        for span in spans:
            self._processor.on_end(span)
        # A BatchSpanProcessor silently drops the oldest of more than 2,048 spans.
        return bool(self._processor.force_flush())

    def shutdown(self) -> None:
        """Do nothing: the processor belongs to the script."""


class Sender:
    """Sends for one rank, on one thread; only :meth:`interrupt` may come from another.

    ``processor`` takes the spans instead of an exporter. ``spans`` and ``metrics`` open the sinks when they are first
    needed; by default those of the configuration.
    """

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        provider_attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES,
        processor: SpanProcessor | None = None,
        *,
        spans: Callable[[], SpanSink] | None = None,
        metrics: Callable[[], MetricSink] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self.provider_attributes = provider_attributes
        self._processor = processor
        self._open_spans = spans or self._span_sink
        self._open_metrics = metrics or self._metric_sink
        span_filter = SpanFilter.from_config(config, rank.metadata.world_size)
        self._maker = SpanMaker(rank, span_filter, self._current_resource)
        self._span_sink_open: SpanSink | None = None
        self._metric_sink_open: MetricSink | None = None
        self._resource: Resource | None = None
        self._resource_key: tuple[object, ...] = ()
        self._interrupted = False
        self._quiet = _QuietThread()

    @property
    def pause_seconds(self) -> float:
        """Return 0: it can always send."""
        return 0.0

    def __enter__(self) -> Sender:
        # Instrumentation of HTTP must not make spans of our requests.
        self._token = attach(set_value("suppress_instrumentation", True))
        self._quiet.__enter__()
        if not self._config.otlp.file:
            # Before training: the import takes a tenth of a second of the GIL.
            importlib.import_module("commtrace.exporters.otlp.http")
        return self

    def __exit__(self, *_: object) -> None:
        self._quiet.__exit__()
        detach(self._token)
        self.interrupt()

    def send(self, steps: Sequence[ExportedStep], settle: Settle) -> None:
        """Send the spans of some steps in batches, until all are settled or :meth:`interrupt` is called."""
        if self._span_sink_open is None:
            self._span_sink_open = self._open_spans()
        left = sum(step.num_spans for step in steps)
        gives_up_at = time.monotonic() + _MOST_SECONDS
        for batch in _batches(chain.from_iterable(map(self._maker.spans, steps))):
            left -= len(batch)
            if self._interrupted:
                return
            was_sent = self._span_sink_open.export(batch)
            settle(len(batch), was_sent)
            if not was_sent and left and time.monotonic() > gives_up_at:
                settle(left, False)  # of many batches, the last would be told of after minutes
                return
        assert left == 0, "steps know how many spans they make"

    def send_metrics(self, metrics: MetricsSnapshot, settle: Settle) -> None:
        """Send metrics as one request, settled once."""
        if self._metric_sink_open is None:
            self._metric_sink_open = self._open_metrics()
        families, counts, start_ns, now_ns = metrics
        data = metrics_data(families, counts, self._current_resource(), start_ns, now_ns)
        settle(1, self._metric_sink_open.export(data))

    def interrupt(self) -> None:
        """Close the sinks; from another thread, this interrupts an exporter that waits to retry."""
        self._interrupted = True
        span_sink, self._span_sink_open = self._span_sink_open, None
        metric_sink, self._metric_sink_open = self._metric_sink_open, None
        for sink in (span_sink, metric_sink):
            if sink is not None:
                sink.shutdown()

    def _current_resource(self) -> Resource:
        # Made again when more of the topology is known.
        marks = self._rank.marks
        key = (tuple(marks.coordinates.items()), tuple(marks.parallel.items()), tuple(self.provider_attributes.items()))
        if self._resource is None or key != self._resource_key:
            self._resource, self._resource_key = resource_of(self._rank, self.provider_attributes), key
        return self._resource

    def _span_sink(self) -> SpanSink:
        if self._config.otlp.file:
            return FileSpans(Path(self._config.otlp.file), self._rank.run_id, self._rank.rank)
        if self._processor is not None:
            return ProviderSpans(self._processor)
        from commtrace.exporters.otlp.http import HttpSpans

        return HttpSpans()

    def _metric_sink(self) -> MetricSink:
        if self._config.otlp.file:
            return FileMetrics(Path(self._config.otlp.file), self._rank.run_id, self._rank.rank)
        from commtrace.exporters.otlp.http import HttpMetrics

        return HttpMetrics()


def _batches(spans: Iterator[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    gil_yield = GilYield()

    def yielding() -> Iterator[ReadableSpan]:
        for span in spans:
            gil_yield.maybe_yield()
            yield span

    remaining = yielding()
    while batch := list(islice(remaining, SPANS_PER_REQUEST)):
        yield batch


class _QuietThread(logging.Filter):
    """Drops the log records of the SDK's exporters on one thread: one per batch would be thousands of lines."""

    _LOGGERS: Final = (
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        # These two repeat headers that they cannot read, and paths; both may hold tokens.
        "opentelemetry.util.re",
        "urllib3.connectionpool",
    )

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread

    def __enter__(self) -> _QuietThread:
        for name in self._LOGGERS:
            logging.getLogger(name).addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._LOGGERS:
            logging.getLogger(name).removeFilter(self)
