"""A timer of the kernel that nobody sets again in time writes the stack of code in C that keeps Python's lock."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commtrace.capture.hangs.stack_timer import NoStackTimerError, StackTimer
from commtrace.trace.files.file_calls import HERE
from commtrace.trace.files.file_process import FileProcess
from commtrace.trace.files.side_files import read_stack
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs timers of Linux"),
    pytest.mark.engine("python"),  # whatever records
]

FOREVER = 30
LOOKS_SECONDS = 0.75
"""Three looks of the process that copies."""
C = ctypes.PyDLL(None)
"""Its functions keep Python's lock."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stack-7"


@pytest.fixture
def files() -> Iterator[FileProcess]:
    files = FileProcess()
    yield files
    files.close()


@pytest.fixture
def timer(path: Path, files: FileProcess) -> Iterator[StackTimer]:
    timer = StackTimer(path, files)
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
    until(lambda: not path.exists())


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
            timer = StackTimer(path, FileProcess())
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
        until(lambda: timer.signal in signal.sigpending())
        timer.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {timer.signal})  # Without a handler the process ends here.


def test_a_timer_that_is_set_again_removes_the_earlier_stack(timer: StackTimer, path: Path) -> None:
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


def test_a_signal_without_its_handler_is_not_sent(timer: StackTimer, files: FileProcess, path: Path) -> None:
    """It would end the process. Nor is it used again, for faulthandler takes it for its own."""
    signal.signal(timer.signal, signal.SIG_DFL)
    timer.set(0.001)
    time.sleep(0.01)
    timer.close()
    other = StackTimer(path, files)
    assert other.signal != timer.signal
    other.close()


def test_two_timers_take_two_signals(timer: StackTimer, files: FileProcess, tmp_path: Path) -> None:
    other = StackTimer(tmp_path / "stack-8", files)
    assert other.signal != timer.signal
    other.close()


def test_a_file_that_the_program_closed_is_neither_written_nor_copied(
    files: FileProcess, tmp_path: Path, path: Path
) -> None:
    before = files_in_memory()
    timer = StackTimer(path, files)
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


def test_no_timer_is_set_where_nothing_copies_the_stack(path: Path) -> None:
    before = files_in_memory()
    with pytest.raises(NoStackTimerError, match="nothing copies it"):
        StackTimer(path, HERE)
    assert files_in_memory() == before
