"""Reports in a real TCPStore."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.exporters.monitor.board import Announcement, Board, BoardError, Yardstick, split_address
from commtrace.live.waits import Least


@pytest.fixture
def served(address: str) -> Board:
    pytest.importorskip("torch")
    return Board.serve(address, "run/0")


def test_the_newest_report_of_each_rank_is_read(served: Board, address: str) -> None:
    other = Board.connect(address, "run/0")
    other.put(0, b"old")
    other.put(2, b"two")
    other.put(0, b"new")
    assert served.get(range(3)) == [b"new", b"two"]
    other.put(1, b"one")
    assert served.get(range(3)) == [b"new", b"one", b"two"]


def test_least_times_are_read_by_the_members_of_a_group(served: Board, address: str) -> None:
    other = Board.connect(address, "run/0")
    assert (other.yardstick(), other.least([5, 2**62])) == (Yardstick(), [])
    yardstick = Yardstick(64, 7, {0: 6e7, 3: 5.5e7})
    served.put_yardstick(yardstick)
    served.put_least({})
    served.put_least({2**62: [Least(64, 3, 2**62, 0, 640, (10**12, 3)), Least(64, 3, 2**62, 1, 64, (10**9,))]})
    assert served.yardstick() == yardstick  # a store does not acknowledge what it is told, but answers in order
    assert other.yardstick() == yardstick
    assert other.least([5, 2**62]) == [Least(64, 3, 2**62, 0, 640, (10**12, 3)), Least(64, 3, 2**62, 1, 64, (10**9,))]


def test_runs_that_share_a_store_do_not_meet(served: Board) -> None:
    served.put(0, b"first")
    assert served.of_run("run/1").get([0]) == []


def test_a_run_announces_itself(served: Board, address: str) -> None:
    assert served.announced() is None
    Board.connect(address, "run/1").announce(Announcement("run/1", 64, 4.0))
    assert served.announced() == Announcement("run/1", 64, 4.0)


def test_a_store_that_is_not_there_is_an_error_with_its_address(address: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(BoardError, match=address):
        Board.connect(address, "run")


def test_no_store_is_made_where_nobody_listens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would try for seconds in C++, and a process that ends meanwhile is aborted."""
    c10d = pytest.importorskip("torch._C._distributed_c10d")
    made: list[Any] = []
    monkeypatch.setattr(c10d, "TCPStore", lambda *arguments, **keywords: made.append(arguments))
    with pytest.raises(BoardError, match=address):
        Board.connect(address, "run")
    assert made == []


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BoardError, match="write HOST:PORT"):
        split_address(address)
