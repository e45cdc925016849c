"""What ranks are told in return: how slow they are; and what a monitor outside of the job has found."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.config import Config
from commtrace.exporters.monitor.board import Announcement, Board, BoardError, Findings, Yardstick
from commtrace.exporters.monitor.exporter import MonitorExporter
from commtrace.live.rank import LiveRank
from commtrace.live.window import WindowReport
from tests.e2e.launch import REPOSITORY
from tests.factory import metadata

pytest.importorskip("torch")

MS = 1_000_000
FOREVER = 1e6
SECONDS = 60.0


@pytest.fixture
def board(address: str) -> Board:
    return Board.serve(address, "run/0")


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MonitorExporter]:
    config = Config(export="monitor,prometheus", monitor_store="127.0.0.1:1", monitor_seconds=FOREVER)
    one = MonitorExporter(config, LiveRank(metadata(0), tmp_path))
    yield one
    one.close()


def report(window: int, work_ms: int, steps: int = 40) -> WindowReport:
    return WindowReport(0, "node0", 3, window, steps, work_ns=(work_ms * MS, 0, 0, 5 * MS) if steps else (0, 0, 0, 0))


def test_it_is_the_work_of_the_window_that_was_joined_last(exporter: MonitorExporter, board: Board) -> None:
    live = exporter._rank
    exporter._learn(report(6, 55), board)
    assert live.score is None

    board.put_yardstick(Yardstick(0, 6, {3: 50.0 * MS, 4: 1.0}))
    exporter._learn(report(7, 95), board)
    assert live.score == 1.2

    exporter._learn(report(8, 0, steps=0), board)
    assert live.score == 1.2, "nothing has been joined since"

    board.put_yardstick(Yardstick(0, 7, {3: 50.0 * MS}))
    exporter._learn(report(9, 0, steps=0), board)
    assert live.score == 2.0


def test_it_is_not_known_without_others_or_without_a_store(exporter: MonitorExporter, board: Board) -> None:
    live = exporter._rank
    board.put_yardstick(Yardstick(0, 6, {3: 50.0 * MS}))
    exporter._learn(report(6, 55), board)
    assert live.score == 1.2

    exporter._failed(BoardError("gone"))
    assert live.score is None

    exporter._learn(report(7, 55), board)
    board.put_yardstick(Yardstick(0, 7, {}))
    exporter._learn(report(8, 55), board)
    assert live.score is None


def test_rank_0_shows_what_a_monitor_outside_of_the_job_finds(
    address: str, exporter: MonitorExporter, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "commtrace", "monitor", "--serve", address, "-o", str(tmp_path)]
    live = exporter._rank
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as monitor:
        try:
            board = connected(address)
            board.announce(Announcement("run/0", 4, 0.5))
            deadline, window = time.monotonic() + SECONDS, 0
            while not live.stragglers:
                assert time.monotonic() < deadline
                window += 1
                for rank in range(4):
                    board.put(rank, slow_rank_2(rank, window).to_bytes())
                exporter._learn_findings(board)
                time.sleep(0.2)
        finally:
            monitor.kill()

    assert live.joins
    assert [(one["rank"], one["cause"]) for one in live.stragglers] == [(2, "compute")]
    assert [(one["kind"], one["rank"]) for one in live.events] == [("straggler", 2)]
    exporter._failed(BoardError("gone"))
    assert live.stragglers == ()


def test_before_its_first_word_nothing_is_found(board: Board) -> None:
    assert board.findings() == Findings()


def connected(address: str) -> Board:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return Board.connect(address, "run/0")
        except BoardError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def slow_rank_2(rank: int, window: int) -> WindowReport:
    work = 80 if rank == 2 else 60
    waiting = {"dp": (100 - work) * MS}
    return WindowReport(
        rank, "node0", 0, window, 40, duration_ns=100 * MS, work_ns=(work * MS, 0, 0, 0), exposed_ns=waiting
    )
