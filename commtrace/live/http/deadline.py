"""Bound the whole of an exchange over HTTP: timeouts of sockets are for each wait, and each may bring one byte.

>>> with Deadline(10.0) as deadline:                                     # doctest: +SKIP
...     deadline.watch(connection)
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Deadline:
    """Ends the connections that it watches when its time is over: who waits on one sees its end."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._watched: list[socket.socket] = []
        self.is_over = False

    def watch(self, connection: socket.socket) -> None:
        """Watch a connection, also while TLS uses it: what is kept is a second handle of the same."""
        with self._lock:
            self._watched.append(connection.dup())
        if self.is_over:
            self._shut_down()

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._watched:
                connection.close()
            self._watched.clear()

    def _end(self) -> None:
        self.is_over = True
        self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            for connection in self._watched:
                with contextlib.suppress(OSError):  # it is not connected any more
                    connection.shutdown(socket.SHUT_RDWR)
