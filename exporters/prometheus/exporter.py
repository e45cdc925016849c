"""Adds up the steps of a rank and exports the sums at an endpoint, or in a file for node-exporter."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.registry import Collector

from commtrace.config import Config
from commtrace.exporters.prometheus.endpoint import Endpoint, TargetFile, file_name, reachable
from commtrace.exporters.prometheus.metrics import RankCollector, StepTotals
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.trace.schema import Row

_logger = logging.getLogger("commtrace")

SECONDS_BETWEEN: Final = 1.0
"""Shortest time between two versions of the file."""


class Textfile:
    """Keeps a ``.prom`` file in node-exporter's directory up to date, from a thread, as disks may block."""

    def __init__(self, path: Path, collector: Collector) -> None:
        self.path = path
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commtrace-textfile", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Request a new version of the file."""
        self._news.set()

    def close(self) -> None:
        """Stop, and remove the file, which node-exporter would otherwise export for ever."""
        self._closing.set()
        self._news.set()
        self._thread.join(1.0)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """Do nothing: the thread and the file are the parent's."""

    def _run(self) -> None:
        failed = False
        while not self._closing.is_set():
            self._news.wait()
            self._news.clear()
            if self._closing.is_set():
                return
            try:
                write_to_textfile(str(self.path), self._registry)
                failed = False
            except OSError as error:
                if not failed:
                    _logger.warning(
                        "commtrace: cannot write %s (%s); set COMMTRACE_PROMETHEUS_TEXTFILE to the directory that "
                        "node-exporter reads, and let this user write to it",
                        self.path,
                        error,
                    )
                failed = True
            self._closing.wait(SECONDS_BETWEEN)


def open_prometheus(config: Config, rank: LiveRank) -> StepListener:
    """Return the configured exporter; raise :class:`ConfigurationError` if it cannot listen."""
    return TextfileExporter(config, rank) if config.prometheus.textfile else EndpointExporter(config, rank)


class EndpointExporter:
    """An endpoint for Prometheus, and its target file, written with the first step, when the topology is known."""

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self._rank = rank
        self._totals = StepTotals()
        collector = RankCollector(rank, self._totals, identity=config.prometheus.identity)
        self.endpoint = Endpoint(config, rank.metadata.local_rank, collector)
        self._target = TargetFile(os.fspath(config.prometheus.targets), rank)
        self._target_failed = False

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        self._totals.add(summary)
        labels = self._rank.identity()
        if self.endpoint.scheme != "http":
            labels["__scheme__"] = self.endpoint.scheme
        try:
            self._target.write(reachable(self.endpoint.address, self.endpoint.port), labels)
        except OSError as error:
            if not self._target_failed:
                self._target_failed = True
                _logger.warning(
                    "commtrace: cannot write the target file %s (%s); Prometheus can still scrape port %d",
                    self._target.path,
                    error,
                    self.endpoint.port,
                )

    def close(self) -> None:
        self._target.remove()
        self.endpoint.close()

    def abandon_after_fork(self) -> None:
        self.endpoint.abandon_after_fork()


class TextfileExporter:
    """A file for node-exporter; its samples carry the labels of the rank."""

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self._totals = StepTotals()
        collector = RankCollector(rank, self._totals, identity=True)
        name = f"commtrace-{file_name(rank.run_id)}-rank-{rank.rank:05d}.prom"
        self.textfile = Textfile(Path(config.prometheus.textfile) / name, collector)

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        self._totals.add(summary)
        self.textfile.update()

    def close(self) -> None:
        self.textfile.close()

    def abandon_after_fork(self) -> None:
        self.textfile.abandon_after_fork()
