"""The call that the current thread is passing to torch; code below the call cannot see it."""

from __future__ import annotations

import threading
from typing import Any


class CallingThread(threading.local):
    """Every thread sees values of its own.

    Attributes:
        has_counted: the communication that it is handing on has been counted; what of it passes a kernel or a hook of
            torch's further down is the same one.
        waits_in_cpp: it is in a function of C++ that communicates and waits for it itself.
        issuing: what has passed torch's pre-hooks and not yet its post-hooks, the innermost last.
        threads: idents of all threads that have asked, the same for each of them.
    """

    has_counted = False
    waits_in_cpp = False

    def __init__(self, threads: set[int]) -> None:  # Called again, with the same set, by each thread that asks.
        self.issuing: list[Any] = []
        self.threads = threads
        threads.add(threading.get_ident())


def graph_task() -> int:
    """Return the number of the backward pass that this thread is in; −1 outside of one."""
    import torch

    return int(torch._C._current_graph_task_id())
