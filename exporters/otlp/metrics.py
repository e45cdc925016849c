"""The metrics of the Prometheus endpoint as OTLP metrics, all cumulative.

Names lose their unit and get dots: ``commtrace_exposed_seconds_total`` becomes ``commtrace.exposed`` with unit ``s``. A
backend that translates OTLP for Prometheus restores the old name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family

from commtrace.exporters.otlp.queue import Counts, SignalCounts

_UNITS: Final[Mapping[str, str]] = {
    "_bytes_per_second": "By/s",
    "_seconds": "s",
    "_bytes": "By",
    "_ratio": "1",
}
_KEEPS_ITS_UNIT: Final = "commtrace_communication_bytes"
"""Without its unit it would be named like ``commtrace_communication_seconds``. Translators do not repeat a unit."""

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


def metrics_data(
    families: Iterable[Family], counts: SignalCounts | None, resource: Resource, start_ns: int, now_ns: int
) -> MetricsData:
    """Return Prometheus families as OTLP metrics; sums began at ``start_ns``, epoch ns."""
    metrics = [metric for family in families if (metric := _metric(family, start_ns, now_ns)) is not None]
    if counts is not None:
        metrics += _of_signal("spans", "Spans", counts.spans, start_ns, now_ns)
        metrics += _of_signal("metric_requests", "Requests with metrics", counts.metric_requests, start_ns, now_ns)
    scope = ScopeMetrics(InstrumentationScope("commtrace"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, start_ns: int, now_ns: int) -> Metric | None:
    if not family.samples:
        return None
    name, unit = _name_and_unit(family.name)
    data: Histogram | Sum | Gauge
    if family.type == "histogram":
        data = Histogram([_histogram_point(family, start_ns, now_ns)], _CUMULATIVE)
    else:
        points = [NumberDataPoint(dict(one.labels), start_ns, now_ns, float(one.value)) for one in family.samples]
        data = Sum(points, _CUMULATIVE, True) if family.type == "counter" else Gauge(points)
    return Metric(name, family.documentation, unit, data)


def _name_and_unit(name: str) -> tuple[str, str]:
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            stem = name if name == _KEEPS_ITS_UNIT else name.removesuffix(suffix)
            return stem.replace("_", "."), unit
    return name.replace("_", "."), ""


def _histogram_point(family: Family, start_ns: int, now_ns: int) -> HistogramDataPoint:
    below = [0, *(int(one.value) for one in family.samples if one.name.endswith("_bucket"))]
    bounds = [float(one.labels["le"]) for one in family.samples if one.name.endswith("_bucket")]
    total = next(one.value for one in family.samples if one.name.endswith("_sum"))
    # The SDK's way to say that smallest and largest are unknown.
    return HistogramDataPoint(
        attributes={},
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=below[-1],
        sum=total,
        bucket_counts=[after - before for before, after in pairwise(below)],
        explicit_bounds=bounds[:-1],
        min=float("inf"),
        max=float("-inf"),
    )


def _of_signal(name: str, what: str, counts: Counts, start_ns: int, now_ns: int) -> list[Metric]:
    sent = NumberDataPoint({}, start_ns, now_ns, counts.sent)
    dropped = [NumberDataPoint({"reason": reason}, start_ns, now_ns, count) for reason, count in counts.dropped.items()]
    return [
        Metric(f"commtrace.otlp.{name}.sent", f"{what} that were taken.", "", Sum([sent], _CUMULATIVE, True)),
        Metric(f"commtrace.otlp.{name}.dropped", f"{what} that were not.", "", Sum(dropped, _CUMULATIVE, True)),
    ]
