"""Write the scalars of this rank to one place, from a thread, every other second.

The harvester only adds up steps, so a slow or dead place costs neither memory nor training.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from commtrace.config import Config
from commtrace.errors import MissingExtraError
from commtrace.exporters.scalars.series import DatedEvent, Point, RankSeries, StepSums
from commtrace.exporters.scalars.trackers import MlflowRuns, WandbRuns
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.trace.schema import Row

_logger = logging.getLogger("commtrace")

POINT_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 1.5


class ScalarSink(Protocol):
    """A place for scalars and findings. All calls come from one thread; exceptions are reported."""

    def is_open(self) -> bool:
        """Return True if there is something to write to."""

    def is_ready(self) -> bool:
        """Return True if a point can be written now; if not, steps go on to be added up."""

    def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        """Write points, at most one of each scope, and the findings since the last call."""

    def close(self) -> None:
        """Close files."""


def open_tensorboard(config: Config, rank: LiveRank) -> StepListener | None:
    """Return the exporter of rank 0, None on the others; raise :class:`MissingExtraError` without TensorBoard."""
    if rank.rank != 0:
        return None
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("TensorBoard is not installed: pip install 'commtrace[tensorboard]'")
    given = str(config.tensorboard.dir).replace("{run_id}", rank.run_id)
    directory = Path(given) if given else rank.directory / "tensorboard"

    def open_file() -> ScalarSink:
        from commtrace.exporters.scalars.tensorboard import EventFile

        return EventFile(directory)

    return ScalarExporter(open_file, rank, f"TensorBoard ({directory})")


def open_wandb(config: Config, rank: LiveRank) -> StepListener:
    """Return the exporter to the W&B run that the script has open on this rank."""
    return ScalarExporter(WandbRuns, rank, "W&B")


def open_mlflow(config: Config, rank: LiveRank) -> StepListener:
    """Return the exporter to the MLflow run that the script has open on this rank."""
    return ScalarExporter(MlflowRuns, rank, "MLflow")


class ScalarExporter:
    """Writes scalars of the steps of a rank, and the findings of its monitor; ``place`` names the sink in warnings."""

    def __init__(
        self,
        open_sink: Callable[[], ScalarSink],
        rank: LiveRank,
        place: str,
        *,
        seconds: float = POINT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_sink = open_sink
        self._place = place
        self._rank = rank
        self._series = RankSeries(rank)
        self._seconds = seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sums = StepSums()
        self._sink: ScalarSink | None = None
        self._has_failed = False
        self._retry_at = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commtrace-scalars", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        with self._lock:
            self._sums.add(summary)

    def close(self) -> None:
        self._ends.set()
        self._thread.join(_CLOSE_SECONDS)

    def abandon_after_fork(self) -> None:
        """Do nothing: the thread is the parent's, and its lock may be held for ever."""

    def _run(self) -> None:
        while not self._ends.wait(self._seconds):
            self._try_to_write()
        self._try_to_write()
        if self._sink is not None:
            self._guarded(self._sink.close)

    def _try_to_write(self) -> None:
        if self._monotonic() >= self._retry_at and self._guarded(self._write):
            self._has_failed = False

    def _write(self) -> None:
        if self._sink is None:
            self._sink = self._open_sink()
        self._rank.asks_job |= self._sink.is_open()
        points: list[Point] = []
        if self._sink.is_ready():
            with self._lock:
                sums, self._sums = self._sums, StepSums()
            points = self._series.points(sums)
        findings = self._series.findings()
        if points or findings:
            self._sink.write(points, findings)

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Return True if the action succeeds; log the first failure of several."""
        try:
            action()
        except Exception as error:
            self._retry_at = self._monotonic() + RETRY_SECONDS
            if not self._has_failed:
                self._has_failed = True
                _logger.warning(
                    "commtrace: no scalars are written to %s: %s: %s. Training and the trace go on; it is tried "
                    "again every %g s",
                    self._place,
                    type(error).__name__,
                    error,
                    RETRY_SECONDS,
                )
            return False
        return True
