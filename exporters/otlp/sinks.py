"""Sinks for spans, and the processors of a TracerProvider that is already there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor


class SpanSink(Protocol):
    """Takes batches of spans on the exporter's own thread, where it may block."""

    def export(self, spans: Sequence[ReadableSpan]) -> bool | None:
        """Return whether they were taken; None if that is not known, as no answer came."""

    def shutdown(self) -> None:
        """Give up what is held. Called once, from another thread if ``export`` does not come back."""


class MetricSink(Protocol):
    """The same for metrics."""

    def export(self, metrics: MetricsData) -> bool | None:
        """Return whether they were taken; None if that is not known, as no answer came."""

    def shutdown(self) -> None:
        """Give up what is held."""


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

    _LOGGERS: Final = (
        trace_exporter.__name__, metric_exporter.__name__, "opentelemetry.util.re", "urllib3.connectionpool"
    )  # fmt: skip
    """The last two repeat headers that they cannot read and paths, and these may hold tokens."""

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
