"""The threads of this process: their frames, the calls that they pass to torch, and callbacks that need the GIL."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch._C import Future


_lock = threading.RLock()  # re-entrant: a signal's handler may stop the recording while its thread is in here
_is_paused = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Have nothing collected meanwhile. From Python 3.12 on that is so within any function of C."""
    if sys.version_info >= (3, 12):
        yield
        return
    global _is_paused
    with _lock:  # else one thread enables what another one has just disabled
        if not gc.isenabled():  # by the program, or by this thread further up
            yield
            return
        try:
            _is_paused = True
            gc.disable()
            yield
        finally:
            gc.enable()
            _is_paused = False


def frames_by_thread() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by ident."""
    # Python 3.11 makes frame objects while it holds the lock of its list of threads. If that starts a garbage
    # collection that frees a threading.local, the collection waits for the same lock, for ever and with the GIL
    # (https://github.com/python/cpython/issues/106883).
    with no_collection():
        return sys._current_frames()


def _after_fork() -> None:  # does what the thread would have done that a child does not have
    global _lock, _is_paused
    _lock = threading.RLock()
    if _is_paused:
        _is_paused = False
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)


OUR_THREADS: Final = "commtrace-"
"""The beginning of the names of our own threads, which do not communicate."""


class CallingThread(threading.local):
    """The call that a thread is passing to torch, for code below the call."""

    has_counted = False  # a kernel or hook of torch further down does not count the communication again
    is_in_operator = False  # torch runs a functional operator that was counted as Python called it
    waits_in_cpp = False  # it is in a function of C++ that communicates and waits

    def __init__(self, threads: set[int]) -> None:  # Called again, with the same set, by each thread that asks.
        self.issuing: list[Any] = []  # operations between torch's pre-hook and post-hook, the innermost last
        self.threads = threads  # idents of all threads that have used this object
        threads.add(threading.get_ident())

    @property
    def is_in_hook(self) -> bool:
        """Return whether it is between torch's pre-hook and post-hook of an operation."""
        return bool(self.issuing)


class NativeCallingThread(CallingThread):
    """The same where the native part passes calls to torch, too: it keeps the flags for both."""

    def __init__(self, threads: set[int], core: Any) -> None:
        super().__init__(threads)
        self._core = core

    @property
    def has_counted(self) -> bool:
        return bool(self._core.is_inside())

    @has_counted.setter
    def has_counted(self, has_counted: bool) -> None:
        self._core.set_inside(has_counted)

    @property
    def is_in_operator(self) -> bool:
        return bool(self._core.is_in_operator())

    @is_in_operator.setter
    def is_in_operator(self, is_in_operator: bool) -> None:
        self._core.set_in_operator(is_in_operator)

    @property
    def waits_in_cpp(self) -> bool:
        return bool(self._core.waits_in_cpp())

    @waits_in_cpp.setter
    def waits_in_cpp(self, waits_in_cpp: bool) -> None:
        self._core.set_waits_in_cpp(waits_in_cpp)

    @property
    def is_in_hook(self) -> bool:
        """Return whether it is in one of torch's hooks, or between two of them."""
        return bool(self.issuing) or bool(self._core.is_in_hook())


def nothing_communicates(thread: CallingThread) -> bool:
    """Return whether this thread alone has communicated, is not communicating now, and no other could begin to."""
    is_inside = thread.has_counted or thread.is_in_hook
    return not is_inside and thread.threads == {threading.get_ident()} and not other_threads()


def other_threads() -> set[int]:
    """Return all threads with a frame of Python but this one and ours: each could communicate for the first time now.

    Threads of C++ that send for a backward pass are not among them, but the thread that has called it is.
    """
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)}
    return frames_by_thread().keys() - ours - {threading.get_ident()}


def is_below(codes: Collection[CodeType]) -> bool:
    """Return whether the caller was called by one of these functions, however deep: a signal's handler may be."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


class CompletionCallbacks:
    """Register callbacks with futures. A callback counts until torch destroys it, which takes the GIL once more."""

    __slots__ = ("_references", "_tensors", "alive", "saw_temporaries")

    def __init__(self) -> None:
        # Not a set: equal hashes of two references to one tensor would have its elements compared.
        self._tensors: dict[int, weakref.ref[object]] = {}
        self.saw_temporaries = False
        self.alive = object()  # held by every callback, so that they are counted without a list
        self._references = sys.getrefcount(self.alive)

    def add(self, future: Future[object], completed: Callable[[object], None]) -> None:
        """Have ``completed`` called when ``future`` is done; it alone may hold a reference to :attr:`alive`."""
        future.add_done_callback(completed)

    @property
    def pending(self) -> bool:
        return sys.getrefcount(self.alive) > self._references

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all callbacks have run; return False if that takes longer than the timeout."""
        # Before 3.14 Python ends a thread that asks for the GIL while it is finalised with pthread_exit, which unwinds
        # through C++ and aborts the process (https://github.com/python/cpython/issues/87135). A program that exits
        # while a communication is under way would die of SIGABRT because of a callback.
        return _wait_while(lambda: self.pending, timeout_seconds)

    def add_temporaries(self, tensors: Iterable[object]) -> None:
        """Count tensors of C++ until they are freed: a kernel of ours made them Python objects, freed with the GIL."""
        self.saw_temporaries = True
        for tensor in tensors:
            key = id(tensor)
            self._tensors[key] = weakref.ref(tensor, partial(self._forget, key))

    def _forget(self, key: int, _gone: weakref.ref[object]) -> None:
        self._tensors.pop(key, None)

    @property
    def unsettled(self) -> bool:
        """Return whether threads of a backend will still want the GIL because of us."""
        return self.pending or bool(self._tensors)

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until they will not; return False if that takes longer than the timeout."""
        return _wait_while(lambda: self.unsettled, timeout_seconds)


def _wait_while(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
