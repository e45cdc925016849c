"""Reads the reports of all ranks from the board and tells what changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from commtrace.exporters.monitor.board import Board, BoardError, Yardstick
from commtrace.exporters.monitor.hangs import HangJoiner, Word
from commtrace.live.waits import LeastTimes, by_group
from commtrace.live.watch import SILENT_WINDOWS, LiveEvent, Watch
from commtrace.live.window import WindowReport

_logger = logging.getLogger("commtrace")


class Outlet(Protocol):
    """Where findings go."""

    def tell(self, events: Sequence[LiveEvent], status: dict[str, Any]) -> None:
        """What is new, possibly nothing, and how things stand."""


class Joiner:
    """Joins the windows of a job.

    Args:
        world_size: ranks of the job.
        seconds: length of a window.
        outlets: told after every join.
    """

    def __init__(self, world_size: int, seconds: float, outlets: Sequence[Outlet]) -> None:
        self.watch = Watch(world_size, seconds)
        self._least = LeastTimes(seconds)
        self._world_size = world_size
        self._seconds = seconds
        self._outlets = outlets
        self._hangs = HangJoiner(world_size)
        self._newest: list[WindowReport] = []
        self._unreadable_told = False
        self._hangs_failed = False

    def join(self, board: Board, now: float) -> list[LiveEvent]:
        """Read the reports on the board, judge, tell.

        Raises:
            BoardError: the store does not answer.
        """
        self._newest = self._parsed(board.get(range(self._world_size)))
        events = self._tell(self.watch.join(self._newest, now), now)
        self._tell_ranks(board)
        return events

    def _tell_ranks(self, board: Board) -> None:
        """Give back to the ranks what each of them needs to know how long it waited, and how slow it is."""
        board.put_least(by_group(self._least.join((report.rank, report.block) for report in self._newest)))
        self._least.size_blocks(self.watch.step_ns)
        board.put_yardstick(Yardstick(self._least.steps, self.watch.window, self.watch.work_ns))

    def look_for_hangs(self, board: Board, now: float) -> list[LiveEvent]:
        """Tell who is in a hang, if that is news.

        Raises:
            BoardError: the store does not answer.
        """
        if self._hangs_failed:
            return []
        try:
            events = self._hangs.look(board, now, self._words())
        except BoardError:
            raise
        except Exception:
            # Who is slow can still be told.
            self._hangs_failed = True
            _logger.warning("commtrace: the monitor tells of no hang any more; each rank's file does", exc_info=True)
            return []
        return self._tell(events, now) if events else []

    def _words(self) -> dict[int, Word]:
        """The last words of the ranks whose reports still come, and of those that have ended."""
        newest = max((report.window for report in self._newest), default=0)
        return {
            report.rank: Word(report.phase, report.window * self._seconds, report.ended)
            for report in self._newest
            if report.ended or report.window > newest - SILENT_WINDOWS
        }

    def _tell(self, events: list[LiveEvent], now: float) -> list[LiveEvent]:
        status = self._status(self._newest, now)
        for outlet in self._outlets:
            outlet.tell(events, status)
        return events

    def _parsed(self, told: Sequence[bytes]) -> list[WindowReport]:
        reports = []
        for one in told:
            try:
                reports.append(WindowReport.from_bytes(one))
            except (ValueError, KeyError, TypeError) as error:
                if not self._unreadable_told:
                    self._unreadable_told = True
                    _logger.warning("commtrace: a rank reports in a form that is not understood: %s", error)
        return reports

    def _status(self, reports: Sequence[WindowReport], now: float) -> dict[str, Any]:
        watch = self.watch
        return {
            "time": now,
            "world_size": self._world_size,
            "ranks_heard": watch.heard,
            "silent": watch.silent,
            "step_ms": watch.step_ns / 1e6,
            "last_step": max((report.last_step for report in reports), default=-1),
            "peers_missing": watch.peers_missing,
            "hang": self._hangs.sentence or None,
            "stragglers": [straggler.to_json() for straggler in watch.stragglers],
        }
