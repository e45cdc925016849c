"""Does a few long things at once in threads: numpy on long columns lets other threads go on.

There are never more threads at work than cores. What finds no core free is taken up by the next one that becomes free,
or done by whoever asks for it; who waits lends its core. So things that are done side by side may themselves consist of
such things. Nobody waits for anything but what it has begun itself, or what that has: no circle of waiting can arise.

>>> side_by_side(pow, [(2, 3), (3, 2)])
[8, 9]
>>> with beside(pow, 2, 10) as power:
...     power()
1024
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Final, Generic, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

_MOST_THREADS: Final = 4
"""Each needs memory for what it makes on the way."""


def side_by_side(function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> list[_Result]:
    """``function`` of each of these arguments, in their order, on as many cores as are free, up to four."""
    calls = _Calls(function, arguments)
    helpers: list[_Task[None]] = []
    try:
        while calls.left:
            helper = _Task(calls.do_all)
            if calls.left > 1 and _cores.start(helper):
                helpers.append(helper)
            else:
                calls.do_next()
    finally:
        calls.stop()
        for helper in helpers:
            helper.wait()
    results = calls.results()
    _cores.fill_gaps()
    return results


@contextmanager
def beside(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> Iterator[Callable[[], _Result]]:
    """While the block runs, ``function`` of these arguments is worked out on a core that is or becomes free.

    Yields:
        What gives its result, waiting for it; if no core was free, it is worked out then.
    """
    task = _Task(lambda: function(*arguments, **named))
    if not _cores.start(task):
        _cores.leave(task)
    with _awaited(task) as result:
        yield result


@contextmanager
def in_gaps(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> Iterator[Callable[[], _Result]]:
    """The same for what is not urgent: what the block itself does side by side comes first.

    It is begun when something of that is through and leaves a core free; where the block does nothing of the kind, not
    before the result is asked for. Of several, the one that was given last is needed first.
    """
    task = _Task(lambda: function(*arguments, **named))
    _cores.leave_for_gaps(task)
    with _awaited(task) as result:
        yield result


@contextmanager
def _awaited(task: _Task[_Result]) -> Iterator[Callable[[], _Result]]:
    try:
        yield task.result
    finally:
        task.end()
        _cores.forget(task)


class _Task(Generic[_Result]):
    """Something to do, once, by whichever thread begins it.

    Attributes:
        is_awaited: somebody waits for it, and takes over the core on which it is done.
    """

    def __init__(self, work: Callable[[], _Result]) -> None:
        self.is_awaited = False
        self._work = work
        self._begun = threading.Lock()  # acquired by whoever does it, and never released
        self._future = Future[_Result]()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def do(self) -> None:
        """Do it, unless somebody else has begun it."""
        if self._begun.acquire(blocking=False):
            _fulfil(self._future, self._work)

    def result(self) -> _Result:
        self.do()
        self.wait()
        return self._future.result()

    def end(self) -> None:
        """If nobody has begun it, nobody does any more."""
        if not self._begun.acquire(blocking=False):
            self.wait()

    def wait(self) -> None:
        """Until it is done, do other things that wait for a core, or lend one's own."""
        while not self.is_done:
            if not _cores.lend(self):
                continue
            try:
                self._future.exception()
            finally:
                _cores.take_back()


class _Cores:
    """The cores that threads may work on.

    Args:
        free: how many are, without the one on which the thread runs that nobody here has started.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self._left: deque[_Task[Any]] = deque()
        self._for_gaps: list[_Task[Any]] = []
        self._returning = 0
        self._changes = threading.Condition()

    def start(self, task: _Task[Any]) -> bool:
        """Do it in a thread of its own; False where no core is free."""
        with self._changes:
            if not self.free:
                return False
            self.free -= 1
        return self._start_on_core(task)

    def _start_on_core(self, task: _Task[Any]) -> bool:
        thread = threading.Thread(target=self._run, args=(task,), name="commtrace-analysis")
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._release()
            return False
        return True

    def leave(self, task: _Task[Any]) -> None:
        """For the next core that becomes free."""
        with self._changes:
            self._left.append(task)

    def leave_for_gaps(self, task: _Task[Any]) -> None:
        """For a core that has nothing else to do; nobody who waits for something else does it meanwhile."""
        with self._changes:
            self._for_gaps.append(task)

    def fill_gaps(self) -> None:
        """Begin what was left for them, on cores that are free and that nobody comes back to."""
        while True:
            with self._changes:
                if self.free <= self._returning or not self._for_gaps:
                    return
                self.free -= 1
                task = self._for_gaps.pop()
            self._start_on_core(task)

    def forget(self, task: _Task[Any]) -> None:
        """It has been done, or nobody wants it any more."""
        with self._changes:
            for tasks in (self._left, self._for_gaps):
                with suppress(ValueError):
                    tasks.remove(task)

    def lend(self, awaited: _Task[Any]) -> bool:
        """Give one's core away until a task is done. If something else was left to do, do that instead; then False."""
        gap = None
        with self._changes:
            task = self._left.popleft() if self._left else None
            if task is None:
                awaited.is_awaited = True
                if self._for_gaps and not awaited.is_done:
                    gap = self._for_gaps.pop()
                else:
                    self.free += 1
                    self._changes.notify()
        if gap is not None:
            self._start_on_core(gap)
        if task is None:
            return True
        task.do()
        return False

    def take_back(self) -> None:
        """Wait for a core: the one of the thread that has done what was waited for becomes free."""
        with self._changes:
            self._returning += 1
            self._changes.wait_for(lambda: self.free > 0)
            self._returning -= 1
            self.free -= 1

    def _run(self, task: _Task[Any] | None) -> None:
        while task is not None:
            task.do()
            task = self._next(task)

    def _next(self, done: _Task[Any]) -> _Task[Any] | None:
        with self._changes:
            if not done.is_awaited and not self._returning:
                if self._left:
                    return self._left.popleft()
                if self._for_gaps:
                    return self._for_gaps.pop()
        self._release()
        return None

    def _release(self) -> None:
        with self._changes:
            self.free += 1
            self._changes.notify()


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_cores = _Cores(min(_count_cores(), _MOST_THREADS) - 1)


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
