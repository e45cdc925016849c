"""A store that is frozen, not dead: requests end, and so does the process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.config import Config
from commtrace.errors import ConfigurationError
from commtrace.exporters.monitor.board import Board, BoardError
from commtrace.exporters.monitor.connection import Connection, _sockets
from commtrace.exporters.monitor.exporter import MonitorExporter, open_monitor
from commtrace.live.rank import LiveRank
from tests.factory import metadata

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets are found in Linux' /proc")

LIMIT_SECONDS = 30.0
"""A request that nothing bounds never ends; one that is bounded takes 3 s, on a busy machine somewhat more."""

SERVES = """
import sys, time
from commtrace.exporters.monitor.board import Board
board = Board.serve(sys.argv[1], "run/0")
print("serves", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(address: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SERVES, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        yield process
        process.kill()


def _freeze(server: subprocess.Popen[str]) -> None:
    """Not before all of its threads stand still."""
    server.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{server.pid}/task")
    _until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()))


def test_where_requests_cannot_be_bounded_there_is_no_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commtrace.exporters.monitor.connection._OWN_SOCKETS", str(tmp_path / "no-proc"))
    with pytest.raises(ConfigurationError, match="commtrace top on the run directory"):
        open_monitor(Config(dir=str(tmp_path)), LiveRank(metadata(1, world_size=2), tmp_path))


def test_a_connection_whose_socket_cannot_be_found_is_not_used(
    address: str, server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commtrace.exporters.monitor.connection._peer_port", lambda descriptor: -1)
    with pytest.raises(BoardError, match="cannot be told from others"):
        Board.connect(address, "run/0")


def test_no_request_waits_for_a_frozen_store(address: str, server: subprocess.Popen[str]) -> None:
    board = Board.connect(address, "run/0")
    board.put(0, b"report")
    _freeze(server)
    begin = time.monotonic()
    with pytest.raises(BoardError, match="does not answer"):
        board.get([0, 1])
    for suspect in (True, False):
        with pytest.raises(BoardError, match=address):
            Board.connect(address, "run/0", suspect=suspect)
    assert time.monotonic() - begin < LIMIT_SECONDS
    server.send_signal(signal.SIGCONT)
    assert Board.connect(address, "run/0", suspect=True).get([0, 1]) == [b"report"]


def test_the_end_of_the_job_does_not_wait_for_a_frozen_store(
    address: str, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    config = Config(dir=str(tmp_path), monitor_store=address, monitor_seconds=0.5)
    exporter = MonitorExporter(config, LiveRank(metadata(1, world_size=2), tmp_path))
    board = Board.connect(address, f"{metadata(1, world_size=2).run_id}/0")
    _until(lambda: bool(board.get([1])))
    _freeze(server)
    time.sleep(1.0)  # by now it has something to tell, and nobody listens
    begin = time.monotonic()
    exporter.close()
    assert time.monotonic() - begin < 3.0  # waits half a second, cuts, waits half a second
    _until(lambda: all(thread.name != "commtrace-monitor" for thread in threading.enumerate()))


def test_a_socket_of_the_script_is_never_taken_for_ours(address: str, server: subprocess.Popen[str]) -> None:
    """Neither before ours is open nor after it was cut, and where two are opened at a time, none is touched."""
    host, port = address.split(":")
    connection = Connection(host, int(port))
    with socket.create_connection((host, int(port))) as earlier:
        connection.cut()
        connection.open()
        with socket.create_connection((host, int(port))) as later:
            connection.cut()
            connection.cut()
            for own in (earlier, later):
                own.sendall(b"\0")
    assert connection._found(set()) is None


def test_sockets_of_others_stay_as_blocking_as_they_were() -> None:
    """Python makes what it wraps non-blocking after ``setdefaulttimeout``; those of gloo and NCCL must not notice."""
    with socket.socket() as listens, socket.socket() as elsewhere, socket.socket(socket.AF_UNIX) as unix:
        for server in (listens, elsewhere):
            server.bind(("127.0.0.1", 0))
            server.listen()
        known = _sockets()
        with (
            socket.create_connection(listens.getsockname()) as ours,
            socket.create_connection(elsewhere.getsockname()) as other,
            socket.socket(socket.AF_INET6) as unconnected,
        ):
            socket.setdefaulttimeout(30.0)
            try:
                found = Connection("127.0.0.1", listens.getsockname()[1])._found(known)
            finally:
                socket.setdefaulttimeout(None)
            assert found is not None
            with found:
                assert found.getpeername() == ours.getpeername()
            assert all(os.get_blocking(one.fileno()) for one in (listens, elsewhere, unix, other, unconnected))


def _until(is_so: object) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)
