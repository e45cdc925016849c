"""Metrics of a whole run, sent by whoever reads its files rather than by its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from prometheus_client.metrics_core import Metric

from commtrace.exporters.otlp.http import HttpMetrics
from commtrace.exporters.otlp.metrics import metrics_data


class RunMetrics:
    """Sends metrics of one run to the receiver that the ``OTEL_EXPORTER_OTLP_*`` variables name.

    Raises:
        ConfigurationError: a variable has a value that cannot be used.
    """

    def __init__(self) -> None:
        self._sink = HttpMetrics()
        self._start_ns = time.time_ns()

    def send(self, families: Iterable[Metric], run_id: str) -> bool:
        """Send what a Prometheus collector tells, and return whether it was taken."""
        detected = Resource.create({"commtrace.run.id": run_id, "service.instance.id": run_id})
        named = {} if _has_name(detected) else {SERVICE_NAME: "commtrace"}
        resource = detected.merge(Resource(named))
        return self._sink.export(metrics_data(families, None, resource, self._start_ns, time.time_ns())) is True


def _has_name(resource: Resource) -> bool:
    return not str(resource.attributes[SERVICE_NAME]).startswith("unknown_service")
