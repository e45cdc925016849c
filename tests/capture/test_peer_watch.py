"""The end of other ranks of this host is seen, by the processes that their files name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commtrace.capture import peer_watch
from commtrace.capture.peer_watch import PeerWatch
from commtrace.trace.files import file_process
from commtrace.trace.files.file_process import FileProcess
from commtrace.trace.files.reader import load_run
from commtrace.trace.metadata import RankMetadata
from tests.trace.rows import mark, metadata, write_rank
from tests.waiting import until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
pytestmark = pytest.mark.skipif(
    not BOOT_ID.exists() or not hasattr(os, "pidfd_open"), reason="only Linux lets a process wait for any other one"
)
LIMIT_SECONDS = 30.0
SESSION = 4 * 10**18
"""Later than any process began."""


def here(pid: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "host": socket.gethostname(), "node": "node0", "boot_id": BOOT_ID.read_text().strip(), "world_size": 5,
        "session": SESSION, "pid": pid,
    }  # fmt: skip
    return {**fields, **changes}


def looks(run: Path) -> tuple[tuple[int, ...], ...]:
    return tuple(look.ended for look in load_run(run).ranks[0].gone_peers)


def open_descriptors() -> set[str]:
    """Those of pipes and processes, which a fork or a read file of another thread does not change."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{name}")
            if kind.startswith(("pipe:", "anon_inode:[pidfd]")):
                found.add(name)
    return found


@pytest.fixture
def processes() -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]


def fail(part: str, error: BaseException) -> None:
    raise AssertionError(part) from error


def test_ranks_of_this_host_are_noted_as_they_end(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    first, second = processes
    write_rank(tmp_path, [mark("end", {})], rank=0, **here(os.getpid()))
    write_rank(tmp_path, [mark("end", {})], rank=1, **here(first.pid))
    write_rank(tmp_path, [mark("end", {})], rank=2, **here(first.pid, boot_id="another"))
    write_rank(tmp_path, [mark("end", {})], rank=3, **here(first.pid, run_id="earlier"))
    watch = PeerWatch(fail)
    watch.start(tmp_path, metadata(rank=0, local_rank=0, **here(os.getpid())))
    try:
        until(lambda: watch.watched == {1})
        first.communicate()
        until(lambda: looks(tmp_path) == ((1,), ()))
        write_rank(tmp_path, [mark("end", {})], rank=4, **here(second.pid))  # begins to record later
        until(lambda: watch.watched == {4})
        second.communicate()
        until(lambda: looks(tmp_path) == ((1,), (), (4,), ()))
    finally:
        watch.stop(ended_cleanly=False)
        for process in processes:
            process.kill()
            process.wait()
    assert looks(tmp_path) == ((1,), (), (4,), ())


def test_it_looks_again_where_the_process_that_reads_has_died(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_LOOK_SECONDS", 0.05)
    first, second = processes
    write_rank(tmp_path, [mark("end", {})], rank=1, **here(first.pid))
    files = FileProcess()
    os.kill(files.call(os.getpid), signal.SIGKILL)
    watch = PeerWatch(fail, files)
    looks_at_nothing: list[int] = []
    look = watch._peer

    def counted(rank: int) -> RankMetadata | None:
        looks_at_nothing.append(rank)
        return look(rank)

    monkeypatch.setattr(watch, "_peer", counted)
    watch.start(tmp_path, metadata(rank=0, local_rank=0, **here(os.getpid())))
    try:
        until(lambda: looks_at_nothing.count(1) > 3)
        assert not watch.watched
        monkeypatch.setattr(file_process, "_RESTART_SECONDS", 0.0)
        until(lambda: watch.watched == {1})
    finally:
        watch.stop(ended_cleanly=True)
        files.close()
        for process in (first, second):
            process.communicate()


def test_a_rank_that_ends_in_order_notes_nothing(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, pid in enumerate((os.getpid(), processes[0].pid)):
        write_rank(tmp_path, [mark("end", {})], rank=rank, **here(pid))
    watch = PeerWatch(fail)
    watch.start(tmp_path, metadata(rank=0, local_rank=0, **here(os.getpid())))
    until(lambda: watch.watched == {1})
    for process in processes:
        process.communicate()
    until(lambda: looks(tmp_path)[:1] == ((1,),))
    watch.stop(ended_cleanly=True)
    assert looks(tmp_path) == ()
    watch.stop(ended_cleanly=True)


def test_a_rank_that_cannot_be_found_is_not_said_to_have_ended(tmp_path: Path) -> None:
    """In another container of a host whose name both have, its number is nobody's."""
    nobody = subprocess.Popen([sys.executable, "-c", ""])
    nobody.wait()
    write_rank(tmp_path, [mark("end", {})], rank=0, **here(os.getpid()))
    write_rank(tmp_path, [mark("end", {})], rank=1, **here(nobody.pid))
    watch = PeerWatch(fail)
    watch.start(tmp_path, metadata(rank=0, local_rank=0, **here(os.getpid())))
    watch.stop(ended_cleanly=False)
    assert (watch.watched, looks(tmp_path)) == (frozenset(), ())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_nothing_stays_open_after_the_end_nor_in_a_forked_child(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    for rank, pid in enumerate((os.getpid(), processes[0].pid, processes[1].pid)):
        write_rank(tmp_path, [mark("end", {})], rank=rank, **here(pid))

    before = open_descriptors()
    watch = PeerWatch(fail)
    watch.start(tmp_path, metadata(rank=0, local_rank=0, **here(os.getpid())))
    until(lambda: watch.watched == {1, 2})
    child = os.fork()
    if child == 0:
        leaks = True
        try:
            watch.abandon_after_fork()
            leaks = open_descriptors() != before
        finally:
            os._exit(leaks)
    status = os.waitpid(child, 0)[1]
    watch.stop(ended_cleanly=False)
    assert open_descriptors() == before
    for process in processes:
        process.communicate()
    assert (os.waitstatus_to_exitcode(status), watch.watched) == (0, frozenset())
