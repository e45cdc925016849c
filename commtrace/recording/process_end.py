"""Hear that the process ends where atexit does not: multiprocessing's children, and os._exit called from Python.

Children of multiprocessing run multiprocessing's own finalizers and then call os._exit, as many scripts do to skip the
teardown of NCCL. What ends the process in C (ray.kill, a signal, std::abort) is not heard.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Final, NoReturn

OWN_FILES: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The beginning of the paths of our own files, which are no places in the user's program."""

_MOST_FRAMES: Final = 16

_LAST: Final = -1000
"""Priority of our finalizer: those of training come before it."""

_PATIENCE_SECONDS: Final = 5.0
"""The longest delay of os._exit."""

_uncaught: BaseException | None = None


class _FinalizerKey:
    """What multiprocessing keeps our function for, weakly."""


_key: Final = _FinalizerKey()
_end: Callable[[], None] | None = None


def end_with_multiprocessing(end: Callable[[], None]) -> None:
    """Have ``end`` called as a process of multiprocessing ends, this one included; once per process."""
    global _end
    _end = end
    _add_finalizer(_key)
    # A child forgets the finalizers that were there before its own code runs.
    util.register_after_fork(_key, _add_finalizer)


def _add_finalizer(_: object) -> None:
    util.Finalize(None, _note_and_end, exitpriority=_LAST)


def _note_and_end() -> None:
    # It is called in the `finally` of the child's main function: what is handled there is what ends it.
    note_uncaught(sys.exc_info()[1])
    if _end is not None:
        _end()


def note_uncaught(error: BaseException | None) -> None:
    """Note the exception that ends this process; one that sys.exit was called for is the one that is told."""
    global _uncaught
    if isinstance(error, SystemExit):
        has_failed = error.code not in (None, 0)
        error = error.__context__ if has_failed and not isinstance(error.__context__, SystemExit) else None
    _uncaught = error


def uncaught_exception() -> BaseException | None:
    """Return the uncaught exception that ends Python, or None; known before functions are called at exit."""
    if _uncaught is not None:
        return _uncaught
    error: BaseException | None = getattr(sys, "last_value", None)
    # An interactive Python goes on after an exception.
    return None if hasattr(sys, "ps1") or threading.main_thread().is_alive() else error


def how_it_ended() -> dict[str, object]:
    """Return the type and the origin of the uncaught exception that ends this process; empty without one."""
    error = uncaught_exception()
    return {} if error is None else {"exception": type(error).__name__, "frames": _frames_of(error)}


def _frames_of(error: BaseException) -> list[str]:
    # Innermost first; neither its message nor any value, which may be secret.
    frames = [
        f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno} {trace.tb_frame.f_code.co_name}"
        for trace in _tracebacks(error)
        if not trace.tb_frame.f_code.co_filename.startswith(OWN_FILES)
    ]
    return frames[::-1][:_MOST_FRAMES]


def _tracebacks(error: BaseException) -> Iterable[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _after_fork_in_child() -> None:
    global _uncaught
    _uncaught = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class ExitCall:
    """The replacement of ``os._exit``, which calls ``before`` with the status, for at most a few seconds."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before = before
        self._original: Callable[[int], NoReturn] | None = None
        self._replacement: Callable[[int], NoReturn] | None = None

    def install(self) -> None:
        original, before, pid = os._exit, self._before, os.getpid()

        def _exit(status: int) -> NoReturn:
            if os.getpid() == pid:  # not in a forked child
                _for_a_while(before, status)
            original(status)

        _exit.__doc__ = original.__doc__
        self._original, self._replacement = original, _exit
        os._exit = _exit

    def uninstall(self) -> None:
        """Put the original back, unless other code has replaced ours."""
        if self._original is not None and os._exit is self._replacement:
            os._exit = self._original  # type: ignore[assignment]


def _for_a_while(before: Callable[[int], None], status: object) -> None:
    if not isinstance(status, int):
        return  # os._exit raises TypeError
    # On a thread: a signal's handler that calls os._exit may have interrupted the thread that holds a lock of ours.
    thread = threading.Thread(target=before, args=(status,), name="commtrace-exit", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return  # Python is ending, and what is called at exit has been called.
    thread.join(_PATIENCE_SECONDS)
