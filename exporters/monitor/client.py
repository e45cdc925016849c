"""One rank's side of the exchange with the monitor.

Every exchange has a connection of its own and ends within seconds: a monitor that is frozen, slow or gone only costs
the calling thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.exporters.monitor.address import Address
from commtrace.exporters.monitor.messages import (
    GREETING,
    HEADER_BYTES,
    NONCE_BYTES,
    SECONDS,
    MessageError,
    Reply,
    Request,
    check_mac,
    decoded,
    encoded,
    header,
    mac_of,
    read_header,
)

_PIECE_BYTES: Final = 64 * 1024


class MonitorError(CommtraceError):
    """The monitor was not reached, or refused the request."""


class MonitorClient:
    """Sends requests to a monitor.

    Args:
        address: where it listens.
        token: that it shares with the ranks.
    """

    def __init__(self, address: Address, token: str) -> None:
        self._address = address
        self._token = token
        self._socket: socket.socket | None = None
        self._is_cut = False

    def exchange(self, request: Request) -> Reply:
        """Send a request and return the reply.

        Raises:
            MonitorError: the monitor does not answer in time, or refuses.
        """
        deadline = time.monotonic() + SECONDS
        try:
            body = encoded(request)
            with socket.create_connection(self._address, SECONDS) as connection:
                self._socket = connection
                reply = self._exchanged(connection, body, deadline)
        except MessageError as error:
            raise MonitorError(f"the monitor at {self._address}: {error}") from error
        except OSError as error:
            raise MonitorError(f"the monitor does not answer at {self._address}: {error}") from error
        finally:
            self._socket = None
        if reply.refused:
            raise MonitorError(f"the monitor at {self._address} refuses: {reply.refused}")
        return reply

    def cut(self) -> None:
        """End the present exchange and refuse others; called from another thread."""
        self._is_cut = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def _exchanged(self, connection: socket.socket, body: bytes, deadline: float) -> Reply:
        if self._is_cut:
            raise OSError("the job has ended")
        greeting = _received(connection, len(GREETING) + NONCE_BYTES, deadline)
        if not greeting.startswith(GREETING):
            raise MessageError("what listens there is no commtrace monitor of this version")
        nonces = (greeting[len(GREETING) :], os.urandom(NONCE_BYTES))
        mac = mac_of(self._token, b"request", nonces, body)
        connection.settimeout(_left(deadline))
        connection.sendall(nonces[1] + header(mac, body) + body)
        length, mac = read_header(_received(connection, HEADER_BYTES, deadline))
        answer = _received(connection, length, deadline)
        check_mac(mac_of(self._token, b"reply", nonces, answer), mac)
        reply: Reply = decoded(answer, Reply)
        return reply


def _received(connection: socket.socket, length: int, deadline: float) -> bytes:
    """Read this number of bytes; memory grows as they arrive."""
    received = bytearray()
    while len(received) < length:
        connection.settimeout(_left(deadline))
        piece = connection.recv(min(length - len(received), _PIECE_BYTES))
        if not piece:
            raise MessageError("it closed the connection; does it have another COMMTRACE_MONITOR_TOKEN?")
        received += piece
    return bytes(received)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no whole answer within {SECONDS:g} s")
    return left
