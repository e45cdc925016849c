"""The monitor's side of the exchange: a thread that listens, in rank 0 of a job or in ``commtrace monitor``.

A client must prove the token first. Each connection has seconds for one exchange, and the size of a message and the
number of connections are bounded. In a training process the connections per second are bounded too, because each one
takes the GIL from training.

>>> server = MonitorServer(Address("127.0.0.1", 0), token, store)   # doctest: +SKIP
>>> server.address, server.close()                                  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

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

_logger = logging.getLogger("commtrace")

_MOST_CONNECTIONS: Final = 64
"""At a time. An honest exchange takes milliseconds: where there are more, the oldest is somebody who dawdles."""

_BACKLOG: Final = 1_024
_PIECE_BYTES: Final = 64 * 1024
_SLOT_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 1.0
_SECONDS_TO_END: Final = 1.0


class ServerError(CommtraceError):
    """The address cannot be listened on."""


class MonitorServer:
    """Listens for ranks and answers their requests.

    Args:
        address: to listen on, this one only; port 0: a free one.
        token: that the ranks share.
        answer: a request's reply. Called on the server's thread.
        connections_per_second: limit; None for no limit.

    Attributes:
        address: on which it listens.

    Raises:
        ServerError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        answer: Callable[[Request], Reply],
        *,
        connections_per_second: float | None = None,
    ) -> None:
        self._listener = _listening(address)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._token = token
        self._answer = answer
        self._slot_connections = (
            None if connections_per_second is None else max(round(connections_per_second * _SLOT_SECONDS), 1)
        )
        self._has_refused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commtrace-monitor-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut open exchanges."""
        self._has_begun.wait(_SECONDS_TO_END)  # else there is nothing to cancel yet, and the thread would stay
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(self._end, loop, task)
        self._thread.join(_SECONDS_TO_END)
        self._listener.close()

    def _end(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        """Listen no more first: asyncio of Python 3.11 logs an error if a client comes as accepting is cancelled."""
        loop.remove_reader(self._listener)
        task.cancel()

    def abandon_after_fork(self) -> None:
        """Close the copies of the sockets in a forked child, so that the port does not outlive the parent."""
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        except asyncio.CancelledError:
            return
        except Exception:
            _logger.warning("commtrace: the monitor listens no more; training goes on", exc_info=True)

    async def _listen(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._has_begun.set()
        connections: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        accepted, slot = 0, loop.time()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left, or the other side is gone already
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            task = loop.create_task(self._serve(connection))
            connections[task] = connection
            task.add_done_callback(lambda ended: connections.pop(ended).close())
            if len(connections) > _MOST_CONNECTIONS:
                next(iter(connections)).cancel()
            await asyncio.sleep(0)  # accepting what waits already lets nothing else run
            accepted += 1
            if self._slot_connections is not None and accepted >= self._slot_connections:
                await asyncio.sleep(max(slot + _SLOT_SECONDS - loop.time(), 0.0))
                accepted, slot = 0, loop.time()

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.wait_for(self._exchange(connection), SECONDS)
        except MessageError as error:
            self._refused(error)
        except (OSError, EOFError, asyncio.TimeoutError):
            return  # whoever it was has gone, or dawdles; a rank says so on its side
        except Exception:
            _logger.warning("commtrace: the monitor could not answer a request", exc_info=True)

    async def _exchange(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        nonce = os.urandom(NONCE_BYTES)
        await loop.sock_sendall(connection, GREETING + nonce)
        nonces = (nonce, await _received(loop, connection, NONCE_BYTES))
        length, mac = read_header(await _received(loop, connection, HEADER_BYTES))
        body = await _received(loop, connection, length)
        check_mac(mac_of(self._token, b"request", nonces, body), mac)
        answer = encoded(self._reply(body))
        mac = mac_of(self._token, b"reply", nonces, answer)
        await loop.sock_sendall(connection, header(mac, answer) + answer)

    def _reply(self, body: bytes) -> Reply:
        try:
            return self._answer(decoded(body, Request))
        except MessageError as error:
            self._refused(error)
            return Reply(refused=str(error)[:500])

    def _refused(self, error: MessageError) -> None:
        """Warn once about a refused client: its token may be wrong."""
        if not self._has_refused:
            self._has_refused = True
            _logger.warning("commtrace: the monitor at %s refuses a message: %s", self.address, error)


async def _received(loop: asyncio.AbstractEventLoop, connection: socket.socket, length: int) -> bytes:
    """Read so many bytes; memory is taken as they come."""
    received = bytearray()
    while len(received) < length:
        piece = await loop.sock_recv(connection, min(length - len(received), _PIECE_BYTES))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _listening(address: Address) -> socket.socket:
    """Return a socket that listens on one address of this host."""
    try:
        family, _, _, _, place = _resolved(address)
        listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ServerError(f"the monitor cannot listen at {address}: {error}") from error
    listener.setblocking(False)
    return listener


def _resolved(address: Address) -> tuple[Any, ...]:
    return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
