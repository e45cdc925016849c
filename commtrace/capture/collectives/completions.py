"""Tracks why threads of a backend still need the GIL because of commtrace, and waits for them before Python ends.

* A completion callback, which a backend runs on a thread of its own.
* A tensor that C++ made, as the reducer's broadcasts do, and that passed one of our kernels in the dispatcher: it has
  become a Python object, and the thread that drops the last reference to it, which may be the backend's, needs the GIL.

If Python is being finalised by then, CPython ends that thread with ``pthread_exit``, which unwinds through C++ and
aborts the process ("terminate called without an active exception"): a program that exits while a communication is under
way would die of SIGABRT because somebody listens, where it used to end well. A process group that is destroyed too soon
hangs: :mod:`commtrace.capture.collectives.group_lifecycle`.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


class CompletionCallbacks:
    """Registers callbacks with futures and knows whether some of them are still to be called.

    A callback counts until it is destroyed, which torch does after it has run, and which takes the GIL once more.

    Attributes:
        alive: every callback holds a reference to it, so how many there are is known without keeping a list of them.
        saw_temporaries: whether :meth:`add_temporaries` was ever called.
    """

    __slots__ = ("_references", "_tensors", "alive", "saw_temporaries")

    def __init__(self) -> None:
        # Not a set: equal hashes of two references to one tensor would have its elements compared.
        self._tensors: dict[int, weakref.ref[Any]] = {}
        self.saw_temporaries = False
        self.alive = object()
        self._references = sys.getrefcount(self.alive)

    def add(self, future: Any, completed: Callable[[Any], None]) -> None:
        """Have ``completed`` called when ``future`` is done.

        It holds :attr:`alive` (``functools.partial(function, callbacks.alive)``), and nobody else may keep a reference
        to it.
        """
        future.add_done_callback(completed)

    @property
    def pending(self) -> bool:
        """Return whether some have not been destroyed yet."""
        return sys.getrefcount(self.alive) > self._references

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all of them have run. False if that takes longer than the timeout."""
        return _wait_while(lambda: self.pending, timeout_seconds)

    def add_temporaries(self, tensors: Iterable[Any]) -> None:
        """These are C++'s own and live as long as their communication; Python objects only because of us."""
        self.saw_temporaries = True
        for tensor in tensors:
            key = id(tensor)
            self._tensors[key] = weakref.ref(tensor, partial(self._forget, key))

    def _forget(self, key: int, _gone: weakref.ref[Any]) -> None:
        self._tensors.pop(key, None)

    @property
    def unsettled(self) -> bool:
        """Return whether threads of a backend will still want the GIL because of us."""
        return self.pending or bool(self._tensors)

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until they will not. False if that takes longer than the timeout."""
        return _wait_while(lambda: self.unsettled, timeout_seconds)


def _wait_while(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
