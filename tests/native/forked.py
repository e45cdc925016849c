"""What a forked child of the test does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest


def in_child(action: Callable[[], bool], timeout_seconds: float = 30.0) -> bool:
    """Return what ``action`` returns in a forked child; False if that ends in any other way.

    A child that does not end is killed, and fails the test.
    """
    child = os.fork()
    if child == 0:
        outcome = False
        try:
            outcome = action()
        finally:
            os._exit(0 if outcome else 1)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("a forked child hangs")
