"""The Prometheus endpoint's numbers as OTLP metrics."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import Histogram, MetricsData

from commtrace.exporters.otlp.metrics import metrics_data
from commtrace.exporters.otlp.queue import QUEUE_FULL, REFUSED, Account, SignalCounts
from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from tests.exporters.otlp.made import RESOURCE
from tests.exporters.prometheus.steps import rank, summary

_SUFFIX = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second", "1": "_ratio", "": ""}


def made(steps: int = 3) -> tuple[MetricsData, RankCollector]:
    totals, account, requests = StepCounters(), Account(), Account()
    for step in range(steps):
        totals.add(summary(step))
    account.produce(9)
    account.settle(5, True)
    account.drop(4, QUEUE_FULL)
    requests.produce(3)
    requests.settle(2, True)
    requests.drop(1, REFUSED)
    collector = RankCollector(rank(), totals)
    counts = SignalCounts(account.counts, requests.counts)
    return metrics_data(collector.collect(), counts, RESOURCE, 10, 20), collector


def by_name(data: MetricsData) -> dict[str, Any]:
    return {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def test_a_translation_for_prometheus_gives_the_names_of_the_endpoint() -> None:
    data, collector = made()
    names = {
        name.replace(".", "_").removesuffix(_SUFFIX[metric.unit]) + _SUFFIX[metric.unit]
        for name, metric in by_name(data).items()
        if not name.startswith("commtrace.otlp")
    }

    assert len(by_name(data)) == len(data.resource_metrics[0].scope_metrics[0].metrics), "no name twice"
    assert names == {family.name for family in collector.collect() if family.samples}


def test_values_labels_and_times() -> None:
    metrics = by_name(made()[0])
    points = metrics["commtrace.exposed"].data.data_points

    assert metrics["commtrace.exposed"].unit == "s"
    assert {(one.attributes["operation"], one.attributes["role"]): one.value for one in points} == {
        ("all_reduce", "dp"): 0.75,
        ("recv", "pp"): 0.0,
    }
    assert {(one.start_time_unix_nano, one.time_unix_nano) for one in points} == {(10, 20)}
    assert metrics["commtrace.exposed"].data.is_monotonic
    assert metrics["commtrace.last.step"].data.data_points[0].value == 2


def test_the_duration_of_steps_is_a_histogram() -> None:
    duration = by_name(made()[0])["commtrace.step.duration"].data

    assert isinstance(duration, Histogram)
    (point,) = duration.data_points
    assert (point.count, point.sum) == (3, 6.0)
    holding = bisect_left(point.explicit_bounds, 2.0)  # each of the steps took 2 s
    assert point.bucket_counts[holding] == sum(point.bucket_counts) == 3
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


def test_the_outcome_of_each_signal_is_counted_exactly() -> None:
    metrics = by_name(made()[0])
    dropped = {
        name: {
            one.attributes["reason"]: one.value for one in metrics[f"commtrace.otlp.{name}.dropped"].data.data_points
        }
        for name in ("spans", "metric_requests")
    }

    assert metrics["commtrace.otlp.spans.sent"].data.data_points[0].value == 5
    assert metrics["commtrace.otlp.metric_requests.sent"].data.data_points[0].value == 2
    assert dropped == {
        "spans": {"queue_full": 4, "refused": 0, "unanswered": 0, "at_the_end": 0},
        "metric_requests": {"queue_full": 0, "refused": 1, "unanswered": 0, "at_the_end": 0},
    }


def test_all_of_it_can_be_encoded() -> None:
    request = encode_metrics(made()[0])

    assert len(request.resource_metrics[0].scope_metrics[0].metrics) > 20
