"""Write the main thread's stack while code in C keeps the GIL, by a kernel timer whose signal faulthandler handles.

The handler runs on the main thread, so it writes to memory: a file of the run would stop training where its file system
does not answer. The process that writes the files of this rank copies that to the run.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.trace.files.file_calls import FileCalls


class NoStackTimerError(CommtraceError):
    """This system has no such timers or files, no signal that is free, or no process that copies them."""


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux: 64 bytes, of which a signal to one thread needs the first four members."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread_id", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: an interval of 0 fires once, a value of 0 not at all."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_NOTIFY_THREAD: Final = 4
"""SIGEV_THREAD_ID. A signal to the process goes, since Linux 6.4, to the thread that runs as the timer expires."""


class StackTimer:
    """Write the main thread's frames to a file once it has not been set again in time.

    No method makes a call of the file's file system in this process.

    Raises:
        NoStackTimerError: the system has no such timers, all signals are in use, or nothing copies what is written.
        OSError: the timer cannot be made.
    """

    def __init__(self, path: Path, files: FileCalls) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        is_known = hasattr(self._c, "timer_create") and hasattr(faulthandler, "register")
        if not (is_known and hasattr(os, "memfd_create")):
            raise NoStackTimerError("no timers that send signals, or no files in memory, on this system")
        # Now: nothing can be opened when it is needed.
        self._file = _file_in_memory()
        self._made = os.fstat(self._file)
        self._timer: ctypes.c_void_p | None = None
        self._remove_copy: Callable[[], None] = lambda: None
        self._is_closed = False
        self.signal = 0
        try:
            self.signal = _registered(self._file)
            self._timer = self._new_timer()
            self._remove_copy = _copied(self._file, path, files)
        except BaseException:
            self.close()
            raise

    def set(self, seconds: float) -> None:
        """Let it fire so many seconds from now, unless it is set again before; 0: not at all."""
        if self._timer is None:
            return
        if not (self._keeps_signal() and self._keeps_file()):
            self._delete_timer()
            return
        if os.fstat(self._file).st_size:  # Who can call this is held up no more.
            os.ftruncate(self._file, 0)
        self._set_timer(self._timer, seconds)

    def close(self) -> None:
        """End it, and remove the file. A signal or descriptor that the program has taken since is left alone."""
        self._delete_timer()
        if self._is_closed:
            return
        self._is_closed = True
        if self.signal in _signals("SigPnd"):  # It has fired: without a handler it would end the process.
            return
        if self._keeps_signal():
            faulthandler.unregister(self.signal)
        if self._keeps_file():
            os.close(self._file)
        self._remove_copy()

    def _keeps_signal(self) -> bool:
        # faulthandler still handles it, and no handler that the program has set since.
        return self.signal in _caught() and signal.getsignal(self.signal) == signal.SIG_DFL

    def _keeps_file(self) -> bool:
        # A program that closes all descriptors may have a file of its own there.
        try:
            return os.path.samestat(os.fstat(self._file), self._made)
        except OSError:
            return False

    def _new_timer(self) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        main_thread = os.getpid()  # The threading module may, after a fork, still have the number of the parent's.
        event = _SignalEvent(None, self.signal, _NOTIFY_THREAD, main_thread)
        if self._c.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            raise _os_error()
        return timer

    def _set_timer(self, timer: ctypes.c_void_p, seconds: float) -> None:
        whole = int(seconds)
        spec = _TimerSpec(0, 0, whole, int((seconds - whole) * 1e9))
        if self._c.timer_settime(timer, 0, ctypes.byref(spec), None):
            raise _os_error()

    def _delete_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            self._c.timer_delete(timer)


def _copied(file: int, path: Path, files: FileCalls) -> Callable[[], None]:
    try:
        return files.keep_copy(file, path)
    except OSError as error:
        raise NoStackTimerError(f"nothing copies it to the run: {error}") from error


def _file_in_memory() -> int:
    import fcntl  # not on Windows

    file = os.memfd_create("commtrace-stack")
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # behind what is there, also after it was emptied
    return file


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _registered(file: int) -> int:
    """Have faulthandler write to a file upon a free signal, and return the signal."""
    blocked = _signals("SigBlk")
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        # Python's own table knows what was there before Python, and what the program has set.
        if number in _caught() | blocked or signal.getsignal(number) != signal.SIG_DFL:
            continue
        # Other threads are not looked at: they may run by then, and change their frames meanwhile.
        faulthandler.register(number, file=file, all_threads=False)
        if number in _caught():  # Else it was registered before, and the handler before that was put back.
            return number
    raise NoStackTimerError("all real-time signals of this process are in use")


def _caught() -> Set[int]:
    return _signals("SigCgt")


def _signals(name: str) -> Set[int]:
    status = Path("/proc/self/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith(f"{name}:")).partition(":")[2], 16)
    return {number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1}
