"""Adds up steps, and exports the sums at an endpoint or in a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from commtrace.config import Config
from commtrace.exporters.prometheus.endpoint import Endpoint
from commtrace.exporters.prometheus.metrics import RankCollector
from commtrace.exporters.prometheus.targets import TargetFile, file_name, reachable
from commtrace.exporters.prometheus.textfile import Textfile
from commtrace.exporters.prometheus.totals import StepTotals
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.trace.schema import Row

_logger = logging.getLogger("commtrace")


def open_prometheus(config: Config, rank: LiveRank) -> StepListener:
    """Return the exporter that the configuration asks for.

    Raises:
        ConfigurationError: it cannot listen.
    """
    return TextfileExporter(config, rank) if config.prometheus.textfile else EndpointExporter(config, rank)


class EndpointExporter:
    """An endpoint for Prometheus, and its target file.

    The target file is written with the first complete step, when the topology is known.
    """

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
