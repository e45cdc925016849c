"""Completion callbacks that are still to come, and the wait for them before Python ends.

A backend runs a completion callback on a thread of its own, which needs the GIL for it. If Python is being finalised by
then, CPython ends that thread with ``pthread_exit``, which unwinds through C++ and aborts the process: a program that
exits while a communication is under way would die of SIGABRT because somebody listens, where it used to end well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


class CompletionCallbacks:
    """Registers callbacks with futures and knows whether some of them are still to be called.

    A callback counts until it is destroyed, which torch does after it has run, and which takes the GIL once more.

    Attributes:
        alive: every callback holds a reference to it, so how many there are is known without keeping a list of them.
    """

    __slots__ = ("_references", "alive")

    def __init__(self) -> None:
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
        """Whether some have not been destroyed yet."""
        return sys.getrefcount(self.alive) > self._references

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all of them have run. False if that takes longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while self.pending:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
