"""A timer of the kernel that nobody sets again in time writes the stack of code in C that keeps Python's lock."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace import _native
from commtrace.capture.hangs.stack_timer import NoStackTimerError, StackTimer
from commtrace.trace.files.side_files import read_stack

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs timers of Linux"),
    pytest.mark.skipif(_native.load()[0] is None, reason="needs the native part"),
]

FOREVER = 30
LOOKS_SECONDS = 0.75
"""Three looks of the thread that copies."""
C = ctypes.PyDLL(None)
"""Its functions keep Python's lock."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stack-7"


@pytest.fixture
def timer(path: Path) -> Iterator[StackTimer]:
    timer = StackTimer(path)
    yield timer
    timer.close()


def hold_the_lock(path: Path) -> None:
    """Keep it in code in C until the timer has written its file."""
    while not read_stack(path):
        C.usleep(500_000)


def files_in_memory() -> set[int]:
    links = {int(link.name): os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    return {descriptor for descriptor, target in links.items() if "commtrace-stack" in target}


def wait_until_removed(path: Path) -> None:
    deadline = time.monotonic() + 10
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_main_thread_is_found_in_code_that_keeps_the_lock(timer: StackTimer, path: Path) -> None:
    timer.set(0.5)
    hold_the_lock(path)
    innermost, outer = read_stack(path)[:2]
    sleep = hold_the_lock.__code__.co_firstlineno + 3
    assert innermost == f"{__file__}:{sleep} hold_the_lock"
    assert outer.endswith(" test_the_main_thread_is_found_in_code_that_keeps_the_lock")


def test_it_is_the_main_thread_while_another_one_has_the_core(timer: StackTimer, path: Path) -> None:
    busy = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000))
    busy.start()
    for _ in range(3):
        timer.set(0.005)
        hold_the_lock(path)
        # On a busy machine it may fire before the main thread has got that far.
        frames = [frame.rpartition(" ")[2] for frame in read_stack(path)]
        assert "test_it_is_the_main_thread_while_another_one_has_the_core" in frames
        timer.set(0)
        wait_until_removed(path)
    busy.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_rank_has_a_timer_of_its_own(path: Path) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            timer = StackTimer(path)
            timer.set(0.2)
            hold_the_lock(path)
            status = 0 if any(frame.endswith(" hold_the_lock") for frame in read_stack(path)) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_signal_that_is_on_its_way_at_the_end_ends_nobody(timer: StackTimer, path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {timer.signal})
    try:
        timer.set(0.001)
        while timer.signal not in signal.sigpending():
            time.sleep(0.001)
        timer.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {timer.signal})  # Without a handler the process ends here.


def test_who_goes_on_leaves_nothing(timer: StackTimer, path: Path) -> None:
    timer.set(0.01)
    hold_the_lock(path)
    assert read_stack(path)
    timer.set(FOREVER)
    wait_until_removed(path)
    timer.set(0.01)
    hold_the_lock(path)
    assert len(read_stack(path)) > 1
    timer.close()
    wait_until_removed(path)


def test_a_timer_that_is_set_again_or_ended_does_not_fire(timer: StackTimer, path: Path) -> None:
    timer.set(FOREVER)
    timer.set(0)
    time.sleep(LOOKS_SECONDS)
    assert not path.exists()


def test_a_signal_that_the_program_takes_is_left_to_it(timer: StackTimer, path: Path) -> None:
    number = timer.signal
    came: list[int] = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        timer.set(0.001)
        timer.close()
        os.kill(os.getpid(), number)
        time.sleep(0.001)
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_a_signal_without_its_handler_is_not_sent(timer: StackTimer, path: Path) -> None:
    """It would end the process. Nor is it used again, for faulthandler takes it for its own."""
    signal.signal(timer.signal, signal.SIG_DFL)
    timer.set(0.001)
    time.sleep(0.01)
    timer.close()
    other = StackTimer(path)
    assert other.signal != timer.signal
    other.close()


def test_two_timers_take_two_signals(timer: StackTimer, tmp_path: Path) -> None:
    other = StackTimer(tmp_path / "stack-8")
    assert other.signal != timer.signal
    other.close()


def test_a_file_that_the_program_closed_is_neither_written_nor_copied(tmp_path: Path, path: Path) -> None:
    before = files_in_memory()
    timer = StackTimer(path)
    (in_memory,) = files_in_memory() - before
    os.close(in_memory)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == in_memory
    os.write(theirs, b"theirs")
    timer.set(0.001)
    time.sleep(LOOKS_SECONDS)
    timer.close()
    assert os.fstat(theirs).st_size == len(b"theirs")
    assert not path.exists()
    os.close(theirs)


def test_a_link_that_somebody_has_put_there_is_not_followed(timer: StackTimer, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs"
    target.write_text("theirs")
    path.symlink_to(target)
    timer.set(0.01)
    hold_the_lock(path)
    assert target.read_text() == "theirs"
    assert not path.is_symlink()


def test_without_the_native_part_there_is_no_timer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "load", lambda: (None, "not built here"))
    with pytest.raises(NoStackTimerError, match="not built here"):
        StackTimer(path)


_ON_A_FULL_DISK = """
import os, resource, sys, threading, time
from commtrace import _native

path, core = sys.argv[1], _native.load()[0]
source = os.memfd_create("stack")
os.write(source, b'  File "a.py", line 1 in outer\\n' * 400)
made = os.fstat(source)
limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, limit))
arguments = (source, made.st_dev, made.st_ino, os.fsencode(path))
threading.Thread(target=core.keep_copy, args=arguments, daemon=True).start()
seen = set()
deadline = time.monotonic() + 1.5
while time.monotonic() < deadline:
    seen.add(os.path.getsize(path) if os.path.exists(path) else 0)
    time.sleep(0.02)
print(0 in seen and not os.path.exists(path))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
deadline = time.monotonic() + 20
while time.monotonic() < deadline and not (os.path.exists(path) and os.path.getsize(path) == made.st_size):
    time.sleep(0.02)
print(os.path.getsize(path) == made.st_size)
"""


def test_of_a_stack_that_finds_no_room_nothing_is_left_until_there_is_some(path: Path) -> None:
    """A limit of the size of files stands for a full disk: the first 4 KiB fit, the next ones half."""
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["True", "True"], told.stderr
