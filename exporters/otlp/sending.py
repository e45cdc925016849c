"""Makes spans and metrics of what a rank tells, and sends them: in the process of the rank, or in one beside it.

Nearly all of the exporter's computing is done here, most of it in the SDK's encoder. ``helper.py`` runs it in a process
of its own, where no training thread waits for the interpreter; ``exporter.py`` runs it on a thread of the rank where
spans go to a TracerProvider, which lives there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from opentelemetry.context import attach, detach, set_value
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.util.types import AttributeValue

from commtrace.config import Config
from commtrace.exporters.otlp import file, messages, sinks
from commtrace.exporters.otlp.choice import Choice
from commtrace.exporters.otlp.metrics import metrics_data
from commtrace.exporters.otlp.queue import SPANS_PER_REQUEST, Job, Settle
from commtrace.exporters.otlp.resource import NOTHING_TOLD, resource_of
from commtrace.exporters.otlp.spans import SpanMaker
from commtrace.live.gil import Breath
from commtrace.live.rank import LiveRank


class Sender:
    """Sends for one rank. On one thread, but for :meth:`interrupt`.

    Args:
        config: options.
        rank: this rank.
        told: resource attributes of the TracerProvider that the script has installed; may be replaced later.
        processor: takes the spans in place of an exporter of our own.
        spans, metrics: make the sinks when they are first needed; without, what the configuration asks for.
    """

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        told: Mapping[str, AttributeValue] = NOTHING_TOLD,
        processor: SpanProcessor | None = None,
        *,
        spans: Callable[[], sinks.SpanSink] | None = None,
        metrics: Callable[[], sinks.MetricSink] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self.told = told
        self._processor = processor
        self._open_spans = spans or self._span_sink
        self._open_metrics = metrics or self._metric_sink
        self._maker = SpanMaker(rank, Choice.of(config, rank.metadata.world_size), self._current_resource)
        self._span_sink_open: sinks.SpanSink | None = None
        self._metric_sink_open: sinks.MetricSink | None = None
        self._resource: Resource | None = None
        self._resource_key: tuple[Any, ...] = ()
        self._gave_up = False
        self._quiet = sinks.QuietExporters()

    @property
    def pause_seconds(self) -> float:
        """Return how long it is of no use to ask: never."""
        return 0.0

    def __enter__(self) -> Sender:
        """On the thread that will send."""
        # What instruments HTTP must not make spans of our requests.
        self._token = attach(set_value("suppress_instrumentation", True))
        self._quiet.__enter__()
        if not self._config.otlp.file:
            # Not with the first request, when training is under way: it takes a tenth of a second of the GIL.
            importlib.import_module("commtrace.exporters.otlp.http")
        return self

    def __exit__(self, *_: object) -> None:
        self._quiet.__exit__()
        detach(self._token)
        self.interrupt()

    def send(self, jobs: Sequence[Job], settled: Settle) -> None:
        """Send the spans of some steps, batch by batch, until all are settled or :meth:`interrupt` is called."""
        if self._span_sink_open is None:
            self._span_sink_open = self._open_spans()
        left = sum(job.num_spans for job in jobs)
        for batch in _batches(_breathing(chain.from_iterable(map(self._maker.spans, jobs)))):
            left -= len(batch)
            if self._gave_up:
                return
            settled(len(batch), self._span_sink_open.export(batch))
        assert left == 0, "jobs know how many spans they make"

    def send_metrics(self, metrics: messages.Metrics, settled: Settle) -> None:
        """Send the metrics of an instant, as one request that is told to ``settled``."""
        if self._metric_sink_open is None:
            self._metric_sink_open = self._open_metrics()
        families, counts, start_ns, now_ns = metrics
        data = metrics_data(families, counts, self._current_resource(), start_ns, now_ns)
        settled(1, self._metric_sink_open.export(data))

    def interrupt(self) -> None:
        """Give up what is held; from another thread, it interrupts an exporter that waits to try again."""
        self._gave_up = True
        span_sink, self._span_sink_open = self._span_sink_open, None
        metric_sink, self._metric_sink_open = self._metric_sink_open, None
        for sink in (span_sink, metric_sink):
            if sink is not None:
                sink.shutdown()

    def _current_resource(self) -> Resource:
        """Made anew when the framework has told more about the topology."""
        marks = self._rank.marks
        key = (tuple(marks.coordinates.items()), tuple(marks.parallel.items()), tuple(self.told.items()))
        if self._resource is None or key != self._resource_key:
            self._resource, self._resource_key = resource_of(self._rank, self.told), key
        return self._resource

    def _span_sink(self) -> sinks.SpanSink:
        if self._config.otlp.file:
            return file.FileSpans(Path(self._config.otlp.file), self._rank.run_id, self._rank.rank)
        if self._processor is not None:
            return sinks.ProviderSpans(self._processor)
        from commtrace.exporters.otlp.http import HttpSpans

        return HttpSpans()

    def _metric_sink(self) -> sinks.MetricSink:
        if self._config.otlp.file:
            return file.FileMetrics(Path(self._config.otlp.file), self._rank.run_id, self._rank.rank)
        from commtrace.exporters.otlp.http import HttpMetrics

        return HttpMetrics()


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
    while batch := _Breathing(islice(spans, SPANS_PER_REQUEST)):
        yield batch
