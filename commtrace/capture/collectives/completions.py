"""Count the callbacks and tensors for which a backend's threads still need the GIL because of commtrace."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C import Future


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
