"""Where spans go: a receiver of OTLP over HTTP, or the processors of a TracerProvider that is already there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult


class SpanSink(Protocol):
    """Takes batches of spans on the exporter's own thread, where it may block."""

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        """Whether they were taken."""

    def shutdown(self) -> None:
        """Give up what is held. Called once, from another thread if ``export`` does not come back."""


class MetricSink(Protocol):
    """The same for metrics."""

    def export(self, metrics: MetricsData) -> bool:
        """Whether they were taken."""

    def shutdown(self) -> None:
        """Give up what is held."""


class HttpSpans:
    """The SDK's OTLP/HTTP exporter, which reads the ``OTEL_EXPORTER_OTLP_*`` variables and tries again by itself."""

    def __init__(self) -> None:
        self._exporter: Any = OTLPSpanExporter()

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        return bool(self._exporter.export(spans) is SpanExportResult.SUCCESS)

    def shutdown(self) -> None:
        self._exporter.shutdown()


class HttpMetrics:
    """The same for metrics."""

    def __init__(self) -> None:
        self._exporter = OTLPMetricExporter()

    def export(self, metrics: MetricsData) -> bool:
        return self._exporter.export(metrics) is MetricExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()


class ProviderSpans:
    """The span processors of a provider that the script has installed: its exporters, its destination.

    They are given what they hold anyway, and flushed after every batch, because a BatchSpanProcessor drops the oldest
    of more than 2,048 spans without telling. What a processor does with a span that it took is not counted here.

    Args:
        processor: see :func:`commtrace.exporters.otlp.provider.processor_of`.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        for span in spans:
            self._processor.on_end(span)
        return bool(self._processor.force_flush())

    def shutdown(self) -> None:
        """The processors are the script's."""


class QuietExporters(logging.Filter):
    """Keeps what the SDK's exporters log on one thread from the log: once per batch would be thousands of lines.

    What becomes of spans is counted, and told once, by commtrace itself.
    """

    _LOGGERS: Final = (trace_exporter.__name__, metric_exporter.__name__, "opentelemetry.util.re")
    """The last one repeats headers that it cannot read, and they hold tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread

    def __enter__(self) -> QuietExporters:
        for name in self._LOGGERS:
            logging.getLogger(name).addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._LOGGERS:
            logging.getLogger(name).removeFilter(self)
