"""Waiting for other processes and threads, which have no clock that a test could turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(
    is_so: Callable[[], _T], seconds: float = 60.0, told: Callable[[], object] = str, *, every: float = 0.01
) -> _T:
    """Wait for something to become true, and return it; fail with what ``told`` returns after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: {told()}"
        time.sleep(every)
    return found
