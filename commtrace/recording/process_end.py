"""Hear that the process ends where atexit does not: multiprocessing's children, and os._exit called from Python.

Children of multiprocessing run multiprocessing's own finalizers and then call os._exit, as many scripts do to skip the
teardown of NCCL. What ends the process in C (ray.kill, a signal, std::abort) is not heard.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import Final, NoReturn, SupportsIndex

OWN_FILES: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The beginning of the paths of our own files, which are no places in the user's program."""

_MOST_FRAMES: Final = 16

_MOST_CALLS: Final = 256
"""Innermost calls among which the handler of a signal is looked for: their variables are copied for that."""

_LAST: Final = -1000
"""Priority of our finalizer: those of training come before it."""

_STATUSES: Final = 2**31
"""os._exit takes a C int."""

_PATIENCE_SECONDS: Final = 5.0
"""The longest delay of os._exit."""

_logger = logging.getLogger("commtrace")

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
    _uncaught = _cause(error)


def _cause(error: BaseException | None) -> BaseException | None:
    if not isinstance(error, SystemExit):
        return error
    has_failed = error.code not in (None, 0)
    return error.__context__ if has_failed and not isinstance(error.__context__, SystemExit) else None


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
    return _described((trace.tb_frame, trace.tb_lineno) for trace in reversed([*_tracebacks(error)]))


def _described(frames: Iterable[tuple[types.FrameType, int]]) -> list[str]:
    # Innermost first; neither a message nor any value, which may be secret.
    places = ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
    described = (f"{file}:{line} {name}" for file, line, name in places if not file.startswith(OWN_FILES))
    return [*itertools.islice(described, _MOST_FRAMES)]


def how_it_exits(status: int) -> dict[str, object]:
    """Return the detail of the mark of this call of os._exit: what led to it, as far as this thread shows."""
    frames = [*_stack(sys._getframe())]
    # In sys.excepthook, and after it, Python handles the exception no more.
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    error = _cause(sys.exc_info()[1] or _uncaught or last)
    number = _handled_signal(frames)
    return {
        "status": status,
        "exception": "" if error is None else type(error).__name__,
        "frames": _described((frame, frame.f_lineno) for frame in frames) if error is None else _frames_of(error),
        "signal": next((known.name for known in signal.Signals if known == number), ""),
    }


def _stack(frame: types.FrameType | None) -> Iterable[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _handled_signal(frames: Iterable[types.FrameType]) -> int | None:
    """Return the signal whose handler has called the innermost of these frames; None if none has."""
    for frame in itertools.islice(frames, _MOST_CALLS):
        code = frame.f_code
        values = frame.f_locals
        arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
        if code.co_flags & inspect.CO_VARARGS:
            rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
            # What the program has bound to the name since may be anything, such as an iterator without an end.
            arguments += rest if type(rest) is tuple else ()
        for number, interrupted in itertools.pairwise(arguments):
            # A handler is given the frame that it has interrupted and returns to.
            is_handler = isinstance(interrupted, types.FrameType) and interrupted is frame.f_back
            if is_handler and isinstance(number, int) and number in signal.valid_signals():
                return int(number)
    return None


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


_Before = Callable[[int, dict[str, object]], None]


class ExitCall:
    """The replacement of ``os._exit``, which calls ``before`` first, for at most a few seconds.

    ``before`` gets the status and what :func:`how_it_exits` returns, if that fails only the status.
    """

    def __init__(self, before: _Before) -> None:
        self._before = before
        self._original: Callable[[int], NoReturn] | None = None
        self._replacement: Callable[[int], NoReturn] | None = None

    def install(self) -> None:
        original, before, pid = os._exit, self._before, os.getpid()
        getpid, is_finalizing = os.getpid, sys.is_finalizing  # Python's end takes the modules away

        def _exit(status: int) -> NoReturn:
            if getpid() == pid and not is_finalizing():  # no forked child, nor a Python that starts no threads
                _for_a_while(before, status)
            original(status)

        _exit.__doc__ = original.__doc__
        self._original, self._replacement = original, _exit
        os._exit = _exit

    def uninstall(self) -> None:
        """Put the original back, unless other code has replaced ours."""
        if self._original is not None and os._exit is self._replacement:
            os._exit = self._original  # type: ignore[assignment]


def _for_a_while(before: _Before, given: SupportsIndex) -> None:
    try:
        status = operator.index(given)
    except TypeError:
        return  # os._exit raises it as well
    if not -_STATUSES <= status < _STATUSES:
        return  # os._exit raises OverflowError
    how: dict[str, object] = {"status": status}
    try:
        how = how_it_exits(status)
    except Exception:
        _logger.warning("commtrace: why os._exit was called could not be told", exc_info=True)
    # On a thread: a signal's handler that calls os._exit may have interrupted the thread that holds a lock of ours.
    thread = threading.Thread(target=before, args=(status, how), name="commtrace-exit", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return  # Python is ending, and what is called at exit has been called.
    thread.join(_PATIENCE_SECONDS)
