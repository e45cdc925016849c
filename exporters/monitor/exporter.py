"""The monitor's part in every rank: a thread that reports, and on one rank also joins.

Training threads and the harvester only leave step summaries; what talks to the store is the thread alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from commtrace.config import Config
from commtrace.errors import ConfigurationError
from commtrace.exporters.monitor.board import Announcement, Board, BoardError, address_of_job
from commtrace.exporters.monitor.connection import Connection, can_bound
from commtrace.exporters.monitor.hangs import packed
from commtrace.exporters.monitor.joiner import Joiner, Outlet
from commtrace.exporters.monitor.outlets import FileOutlet, LiveOutlet, LogOutlet, WebhookOutlet
from commtrace.live.listener import StepListener
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.live.window import Window, WindowReport
from commtrace.trace.writer import Row

_logger = logging.getLogger("commtrace")

_JOIN_DELAY: Final = 0.25
"""The join waits for this share of a window, so that every rank has reported the window that has just ended."""

_TICK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 10.0
_SECONDS_TO_END: Final = 0.5
"""How long the end of the job waits for a request that is under way; then it is cut."""

_WINDOWS_KEPT: Final = 4
_FAILURES_TOLD: Final = 3
"""The end of a job takes the store away before the last rank is gone: single failures are nothing to tell."""


def open_monitor(config: Config, rank: LiveRank) -> StepListener:
    """The monitor of this rank. Rank 0 joins, unless a process with a store of its own does.

    Raises:
        ConfigurationError: requests to the store could not be bounded on this system.
    """
    if not can_bound():
        raise ConfigurationError(
            "the monitor needs Linux' /proc to bound its requests, so that a store that is frozen holds up nobody. "
            "commtrace top on the run directory tells who is slow without it"
        )
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
        self._worked_ns: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._closing = False
        self._board: Board | None = None
        self._connection: Connection | None = None
        self._suspect = False
        self._joiner: Joiner | None = None
        self._told_hang: Mapping[str, Any] | None = None
        self._webhook: WebhookOutlet | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="commtrace-monitor", daemon=True)
        self._thread.start()

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        with self._lock:
            self._window.add(summary)

    def close(self) -> None:
        self._closing = True
        self._stop.set()
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive() and self._connection is not None:
            self._connection.cut()
            self._thread.join(_SECONDS_TO_END)
        if self._webhook is not None:
            self._webhook.close()

    def abandon_after_fork(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        seconds = self._config.monitor_seconds
        reported = joined = int(self._clock() // seconds)
        while not self._stop.wait(min(_TICK_SECONDS, seconds * _JOIN_DELAY)):
            now = self._clock()
            number = int(now // seconds)
            if number != reported:
                reported = number
                self._guarded(lambda number=number: self._report(number))  # type: ignore[misc]
            self._guarded(self._tell_of_hang)
            if self._joins:
                if joined != reported and now >= (reported + _JOIN_DELAY) * seconds:
                    joined = reported
                    self._guarded(self._join)
                self._guarded(self._look_for_hangs)
        if self._closing:
            self._say_farewell(reported)

    def _say_farewell(self, window: int) -> None:
        """That this rank ends in order, over a connection that is there: others must not take it for dead."""
        board = self._board
        if board is None or self._clock() < self._retry_at:
            return
        report = WindowReport(self._rank.rank, self._rank.metadata.node, 0, window + 1, ended=True)
        with contextlib.suppress(BoardError):  # the store may have ended before us
            board.put(self._rank.rank, report.to_bytes())

    @property
    def _joins(self) -> bool:
        return self._rank.rank == 0 and not self._config.monitor_store

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._stop.is_set() or self._clock() < self._retry_at:
            return  # At the end no further request is begun: the process must not end in the middle of one.
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
        self._suspect = self._suspect or self._board is not None
        self._board = None
        self._rank.score = None
        if self._config.monitor_store:
            self._rank.stragglers = ()
        if self._connection is not None:
            self._connection.cut()
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
        board = self._connected()
        board.put(self._rank.rank, report.to_bytes())
        if self._shows_more:
            self._learn(report, board)
            if self._rank.rank == 0 and self._config.monitor_store:
                self._learn_findings(board)

    def _learn(self, report: WindowReport, board: Board) -> None:
        """How slow this rank is; and of what it stood still, how much was waiting, as far as all have told."""
        if report.steps:
            self._worked_ns = dict([*self._worked_ns.items(), (report.window, sum(report.work_ns))][-_WINDOWS_KEPT:])
        waits = self._window.waits
        yardstick = board.yardstick()
        typical_ns = yardstick.work_ns.get(report.stage, 0.0)
        if yardstick.window in self._worked_ns:  # the one before this one, where the job is in good order
            self._rank.score = self._worked_ns[yardstick.window] / typical_ns if typical_ns > 0 else None
        with self._lock:
            groups = waits.groups
        told = board.least(groups) if groups else []
        with self._lock:
            waits.resize(yardstick.block_steps)
            waits.settle(told)
            self._rank.split = {key: replace(split) for key, split in waits.split.items()}

    def _learn_findings(self, board: Board) -> None:
        """What a monitor outside of the job has found is shown by the exporters of one rank."""
        found = board.findings()
        self._rank.joins = True
        self._rank.stragglers = tuple(found.stragglers)
        self._rank.events = deque(found.events, self._rank.events.maxlen)

    @property
    def _shows_more(self) -> bool:
        """Whether some exporter beside the monitor shows what is learnt; else it is not asked for."""
        return self._config.export.strip().lower() != "monitor"

    def _join(self) -> None:
        self._joining().join(self._connected(), self._clock())

    def _tell_of_hang(self) -> None:
        """On the board, as soon as this process notices that training has stopped, and when it goes on."""
        report = self._rank.hang()
        if report is self._told_hang:
            return
        self._connected().put_hang(self._rank.rank, b"" if report is None else packed(report))
        self._told_hang = report

    def _look_for_hangs(self) -> None:
        self._joining().look_for_hangs(self._connected(), self._clock())

    def _joining(self) -> Joiner:
        if self._joiner is None:
            self._joiner = Joiner(self._rank.metadata.world_size, self._config.monitor_seconds, self._outlets())
        return self._joiner

    def _connected(self) -> Board:
        if self._board is None:
            run = f"{self._rank.run_id}/{self._rank.metadata.attempt}"
            store = self._config.monitor_store
            address = store or address_of_job()
            self._board = Board.connect(address, run, self._opening, suspect=self._suspect)
            self._suspect = False
            if store and self._rank.rank == 0:
                self._board.announce(Announcement(run, self._rank.metadata.world_size, self._config.monitor_seconds))
        return self._board

    def _opening(self, connection: Connection) -> None:
        self._connection = connection

    def _outlets(self) -> list[Outlet]:
        outlets: list[Outlet] = [LogOutlet(), FileOutlet(self._rank.directory), LiveOutlet(self._rank)]
        if self._config.monitor_webhook and self._webhook is None:
            self._webhook = WebhookOutlet(self._config.monitor_webhook)
        return outlets if self._webhook is None else [*outlets, self._webhook]
