"""The monitor's part in every rank: a thread that reports, and on one rank also joins.

Training threads and the harvester only leave step summaries; what talks to the store is the thread alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from commtrace.config import Config
from commtrace.exporters.monitor.board import TIMEOUT_SECONDS, Announcement, Board, BoardError
from commtrace.exporters.monitor.joiner import Joiner, Outlet
from commtrace.exporters.monitor.outlets import FileOutlet, LiveOutlet, LogOutlet, WebhookOutlet
from commtrace.live.listener import StepListener
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.live.window import Window
from commtrace.trace.writer import Row

_logger = logging.getLogger("commtrace")

_JOIN_DELAY: Final = 0.25
"""The join waits for this share of a window, so that every rank has reported the window that has just ended."""

_RETRY_SECONDS: Final = 10.0
_FAILURES_TOLD: Final = 3
"""The end of a job takes the store away before the last rank is gone: single failures are nothing to tell."""


def open_monitor(config: Config, rank: LiveRank) -> StepListener:
    """The monitor of this rank. Rank 0 joins, unless a process with a store of its own does."""
    return MonitorExporter(config, rank)


class MonitorExporter:
    """Reports the steps of this rank, window by window.

    Args:
        config: options.
        rank: this rank.
        clock, monotonic_ns: epoch seconds, and the clock of the spans.
    """

    def __init__(
        self,
        config: Config,
        rank: LiveRank,
        *,
        clock: Callable[[], float] = time.time,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._rank = rank
        self._clock = clock
        self._monotonic_ns = monotonic_ns
        self._window = Window(rank)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._board: Board | None = None
        self._joiner: Joiner | None = None
        self._webhook: WebhookOutlet | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="commtrace-monitor", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        with self._lock:
            self._window.add(summary)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_SECONDS)
        if self._webhook is not None:
            self._webhook.close()

    def abandon_after_fork(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        seconds = self._config.monitor_seconds
        while True:
            number = int(self._clock() // seconds) + 1
            if self._sleep_until(number * seconds):
                return
            self._guarded(lambda number=number: self._report(number))  # type: ignore[misc]
            if self._joins:
                if self._sleep_until((number + _JOIN_DELAY) * seconds):
                    return
                self._guarded(self._join)

    def _sleep_until(self, instant: float) -> bool:
        """True when the monitor is to end."""
        return self._stop.wait(max(instant - self._clock(), 0.0))

    @property
    def _joins(self) -> bool:
        return self._rank.rank == 0 and not self._config.monitor_store

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._clock() < self._retry_at:
            return
        try:
            action()
            self._failures = 0
        except BoardError as error:
            self._failed(error)
        except Exception:
            self._stop.set()
            _logger.warning("commtrace: the monitor is off in this process; training goes on", exc_info=True)

    def _failed(self, error: BoardError) -> None:
        """Connect anew, later; say so when it lasts."""
        self._board = None
        self._failures += 1
        self._retry_at = self._clock() + (_RETRY_SECONDS if self._failures >= _FAILURES_TOLD else 0.0)
        if self._failures == _FAILURES_TOLD:
            _logger.warning(
                "commtrace: the monitor does not reach its store and tries again every %g s; training goes on: %s",
                _RETRY_SECONDS,
                error,
            )

    def _report(self, number: int) -> None:
        with self._lock:
            report = self._window.close(number, self._monotonic_ns())
        self._connected().put(self._rank.rank, report.to_bytes())

    def _join(self) -> None:
        if self._joiner is None:
            self._joiner = Joiner(self._rank.metadata.world_size, self._config.monitor_seconds, self._outlets())
        self._joiner.join(self._connected(), self._clock())

    def _connected(self) -> Board:
        if self._board is None:
            run = f"{self._rank.run_id}/{self._rank.metadata.attempt}"
            store = self._config.monitor_store
            self._board = Board.connect(store, run) if store else Board.of_job(run)
            if store and self._rank.rank == 0:
                self._board.announce(Announcement(run, self._rank.metadata.world_size, self._config.monitor_seconds))
        return self._board

    def _outlets(self) -> list[Outlet]:
        outlets: list[Outlet] = [LogOutlet(), FileOutlet(self._rank.directory), LiveOutlet(self._rank)]
        if self._config.monitor_webhook and self._webhook is None:
            self._webhook = WebhookOutlet(self._config.monitor_webhook)
        return outlets if self._webhook is None else [*outlets, self._webhook]
