"""The critical path of a run as samples: one counter by rank, kind and role, whose sum is the length of all steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commtrace.analysis.path_totals import PathTotals
from commtrace.exporters.prometheus.exporter import Endpoint, file_name, reachable, replace_file


class PathCollector(Collector):
    """Collects the sums of a run so far."""

    def __init__(self, totals: PathTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        """Yield all samples; none before the first step."""
        totals, path = self._totals, self._totals.path
        if totals.last_step < 0:
            return
        seconds = CounterMetricFamily(
            "commtrace_critical_path_seconds",
            "Of the job's steps, what their critical path was made of; the sum is their length.",
            labels=["run_id", "rank", "node", "kind", "role"],
        )
        for share in path.shares:
            node = totals.nodes.get(share.rank, "")
            seconds.add_metric([totals.run_id, str(share.rank), node, share.kind, share.role], share.ns / 1e9)
        yield seconds
        if totals.lost is not None:
            # No counter: a part can be below 0 in steps that would be longer without it.
            lost = GaugeMetricFamily(
                "commtrace_lost_seconds",
                "Of the job's steps so far, the ideal time and what was lost to what; the sum is their length.",
                labels=["run_id", "part"],
            )
            for name, ns in {"ideal_ns": totals.lost.ideal_ns, **totals.lost.costs_ns()}.items():
                lost.add_metric([totals.run_id, name.removesuffix("_ns")], ns / 1e9)
            yield lost
        run = (["run_id"], [totals.run_id])
        uncertain = CounterMetricFamily(
            "commtrace_critical_path_uncertain_seconds",
            "The part of it that is shorter than what is known of the clocks of the hosts.",
            labels=run[0],
        )
        uncertain.add_metric(run[1], sum(share.uncertain_ns for share in path.shares) / 1e9)
        yield uncertain
        steps = CounterMetricFamily(
            "commtrace_critical_path_steps", "Steps whose critical path was found.", labels=run[0]
        )
        steps.add_metric(run[1], path.num_steps)
        yield steps
        last = GaugeMetricFamily("commtrace_critical_path_last_step", "The newest of them.", labels=run[0])
        last.add_metric(run[1], totals.last_step)
        yield last

    def describe(self) -> Iterable[Metric]:
        """Return nothing, as the samples depend on the run."""
        return ()


def path_target(endpoint: Endpoint, directory: Path, run_id: str) -> Path:
    """Write the target file of an endpoint and return its path; its name has the ``run_id``, as the samples do."""
    labels = {"__scheme__": endpoint.scheme} if endpoint.scheme != "http" else {}
    targets = [{"targets": [reachable(endpoint.address, endpoint.port)], "labels": labels}]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{file_name(run_id)}-critical-path.json"
    replace_file(path, json.dumps(targets, indent=1) + "\n")
    return path
