"""Act at a signal though the main thread may be inside a call of C++ that never ends, where Python runs no handler."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM)
"""With these users and launchers end a job."""


@contextmanager
def acting_on_signals(act: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``act`` in a thread of its own at a signal that ends a job; the signal does nothing else."""
    waiting, woken = socket.socketpair()
    woken.setblocking(False)

    def wait() -> None:
        while number := waiting.recv(1):
            if number[0] in ENDING:
                act(signal.Signals(number[0]))

    threading.Thread(target=wait, name="commtrace-stop", daemon=True).start()
    handlers = {number: signal.signal(number, _nothing) for number in ENDING}
    # It is written at the signal itself, the handlers of Python run later.
    descriptor = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        woken.close()


def _nothing(_signal: int, _frame: FrameType | None) -> None:
    """Be a handler of Python, without which the descriptor is not written."""
