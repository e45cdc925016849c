"""Does a few long things at once in threads: numpy on long columns lets other threads go on.

There are never more threads at work than cores. Where none is free, whoever asks for something does it alone; so things
that are done side by side may themselves consist of such things, and cores that become free help with what is left.

>>> side_by_side(pow, [(2, 3), (3, 2)])
[8, 9]
>>> with beside(pow, 2, 10) as power:
...     power()
1024
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, Generic, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_MOST_THREADS: Final = 4
"""Each needs memory for what it makes on the way."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_free_cores: Final = threading.Semaphore(min(_cores(), _MOST_THREADS) - 1)
"""Without the one on which the thread runs that nobody here has started."""


def side_by_side(function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> list[_Result]:
    """``function`` of each of these arguments, in their order, on as many cores as are free, up to four."""
    calls = _Calls(function, arguments)
    helpers: list[threading.Thread] = []
    try:
        while calls.left:
            if calls.left > 1 and (helper := _in_thread(calls.do_all)):
                helpers.append(helper)
            else:
                calls.do_next()
    finally:
        calls.stop()
        for helper in helpers:
            helper.join()
    return calls.results()


@contextmanager
def beside(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> Iterator[Callable[[], _Result]]:
    """While the block runs, ``function`` of these arguments is worked out on a core that is free.

    Yields:
        What gives its result, waiting for it; if no core was free, it is worked out then.
    """
    future = Future[_Result]()
    thread = _in_thread(lambda: _fulfil(future, function, *arguments, **named))

    def result() -> _Result:
        if thread is None:
            if not future.done():
                _fulfil(future, function, *arguments, **named)
            return future.result()
        _free_cores.release()  # the one on which this thread only waits
        try:
            thread.join()
        finally:
            _free_cores.acquire()
        return future.result()

    try:
        yield result
    finally:
        if thread is not None:
            thread.join()


def _fulfil(
    future: Future[_Result],
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> None:
    try:
        future.set_result(function(*arguments, **named))
    except BaseException as error:
        future.set_exception(error)


def _in_thread(function: Callable[[], None]) -> threading.Thread | None:
    """A thread that does this and then frees its core; None where no core is free."""
    if not _free_cores.acquire(blocking=False):
        return None

    def run() -> None:
        try:
            function()
        finally:
            _free_cores.release()

    thread = threading.Thread(target=run, name="commtrace-analysis")
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads
        _free_cores.release()
        return None
    return thread


class _Calls(Generic[_Result]):
    """Calls of one function, which threads take one by one."""

    def __init__(self, function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._function = function
        self._arguments = arguments
        self._numbers = count()  # the next one is taken in a single step, whoever takes it
        self._begun = 0
        self._stopped = False
        self._futures = [Future[_Result]() for _ in arguments]

    @property
    def left(self) -> int:
        """How many calls nobody has begun; after one has failed, none are left."""
        return 0 if self._stopped else max(len(self._arguments) - self._begun, 0)

    def do_next(self) -> None:
        number = next(self._numbers)
        self._begun = number + 1
        if number < len(self._arguments):
            _fulfil(self._futures[number], self._function, *self._arguments[number])
            if self._futures[number].exception() is not None:
                self.stop()

    def do_all(self) -> None:
        while self.left:
            self.do_next()

    def stop(self) -> None:
        """Begin no further call."""
        self._stopped = True

    def results(self) -> list[_Result]:
        """In the order of the arguments; what the first call that failed has raised is raised."""
        for future in self._futures:
            if future.done() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in self._futures]
