"""Completion callbacks that are still to come, and the wait for them before Python ends.

A backend runs a completion callback on a thread of its own, which needs the GIL for it. If Python is being finalised by
then, CPython ends that thread with ``pthread_exit``, which unwinds through C++ and aborts the process: a program that
exits while a communication is under way would die of SIGABRT because somebody listens, where it used to end well.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any


class CompletionCallbacks:
    """Registers callbacks with futures and knows which of them are still to be called.

    A callback counts until it is destroyed, which torch does after it has run, and which takes the GIL once more.
    """

    __slots__ = ("_alive",)

    def __init__(self) -> None:
        self._alive: set[weakref.ref[Any]] = set()

    def add(self, future: Any, completed: Callable[[Any], None]) -> None:
        """Have ``completed`` called when ``future`` is done. Nobody else may keep a reference to ``completed``."""
        self._alive.add(weakref.ref(completed, self._alive.discard))
        future.add_done_callback(completed)

    @property
    def pending(self) -> bool:
        """Whether some have not been destroyed yet."""
        return bool(self._alive)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all of them have run. False if that takes longer than the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while self._alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
