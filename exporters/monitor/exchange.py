"""The exchange between a rank and the monitor: a client in every rank, a server in rank 0 or in ``commtrace monitor``.

Every exchange has a connection of its own and ends within seconds, so a frozen monitor costs only the calling thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.exporters.monitor.messages import (
    GREETING,
    HEADER_BYTES,
    NONCE_BYTES,
    SECONDS,
    MessageError,
    Reply,
    Request,
    check_mac,
    decoded_reply,
    decoded_request,
    encoded,
    header,
    mac_of,
    read_header,
)
from commtrace.exporters.monitor.rendezvous import Address

_PIECE_BYTES: Final = 64 * 1024


class MonitorError(CommtraceError):
    """The monitor was not reached, or refused the request."""


class MonitorClient:
    """Sends requests to the monitor at an address, with the shared token."""

    def __init__(self, address: Address, token: str) -> None:
        self._address = address
        self._token = token
        self._socket: socket.socket | None = None
        self._is_cut = False

    def exchange(self, request: Request) -> Reply:
        """Send a request and return the reply; raise :class:`MonitorError` if it is late or a refusal."""
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
            raise MessageError("the program that listens there is not a commtrace monitor of this version")
        nonces = (greeting[len(GREETING) :], os.urandom(NONCE_BYTES))
        mac = mac_of(self._token, b"request", nonces, body)
        connection.settimeout(_left(deadline))
        connection.sendall(nonces[1] + header(mac, body) + body)
        length, mac = read_header(_received(connection, HEADER_BYTES, deadline))
        answer = _received(connection, length, deadline)
        check_mac(mac_of(self._token, b"reply", nonces, answer), mac)
        return decoded_reply(answer)


def _received(connection: socket.socket, length: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < length:
        connection.settimeout(_left(deadline))
        piece = connection.recv(min(length - len(received), _PIECE_BYTES))
        if not piece:
            raise MessageError("it closed the connection; is its COMMTRACE_MONITOR_TOKEN the same?")
        received += piece
    return bytes(received)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"no complete answer within {SECONDS:g} s")
    return left


_logger = logging.getLogger("commtrace")

_MOST_CONNECTIONS: Final = 64
"""Limit of open connections. An exchange takes milliseconds: beyond it, the oldest client is stuck."""

_BACKLOG: Final = 1_024
_SLOT_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 1.0
_SECONDS_TO_END: Final = 1.0


class ServerError(CommtraceError):
    """The address cannot be listened on."""


class MonitorServer:
    """Listens for ranks and answers their requests on its thread.

    Args:
        address: the only one to listen on; port 0: a free one, which :attr:`address` then has.
        token: that the ranks share.
        answer: returns the reply to a request.
        connections_per_second: limit, as each takes the GIL; None without training in the process.

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
        self._has_begun.wait(_SECONDS_TO_END)  # before that there is nothing to cancel, and the thread would stay
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end, loop, task)
        self._thread.join(_SECONDS_TO_END)
        self._listener.close()

    def _end(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        # First: asyncio of Python 3.11 logs an error if a client connects while accepting is cancelled.
        loop.remove_reader(self._listener)
        task.cancel()

    def abandon_after_fork(self) -> None:
        # The child's copies of the sockets would keep the port open after the parent's end.
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        except asyncio.CancelledError:
            return
        except Exception:
            _logger.warning("commtrace: the monitor has stopped listening; training goes on", exc_info=True)

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
            return  # the client is gone or too slow; a rank logs that on its side
        except Exception:
            _logger.warning("commtrace: the monitor could not answer a request", exc_info=True)

    async def _exchange(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        nonce = os.urandom(NONCE_BYTES)
        await loop.sock_sendall(connection, GREETING + nonce)
        nonces = (nonce, await _read(loop, connection, NONCE_BYTES))
        length, mac = read_header(await _read(loop, connection, HEADER_BYTES))
        body = await _read(loop, connection, length)
        check_mac(mac_of(self._token, b"request", nonces, body), mac)
        answer = encoded(self._reply(body))
        mac = mac_of(self._token, b"reply", nonces, answer)
        await loop.sock_sendall(connection, header(mac, answer) + answer)

    def _reply(self, body: bytes) -> Reply:
        try:
            return self._answer(decoded_request(body))
        except MessageError as error:
            self._refused(error)
            return Reply(refused=str(error)[:500])

    def _refused(self, error: MessageError) -> None:
        # Warned once: the client's token may be wrong.
        if not self._has_refused:
            self._has_refused = True
            _logger.warning("commtrace: the monitor at %s refuses a message: %s", self.address, error)


async def _read(loop: asyncio.AbstractEventLoop, connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        piece = await loop.sock_recv(connection, min(length - len(received), _PIECE_BYTES))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _listening(address: Address) -> socket.socket:
    try:
        family, *_, (host, port, *_) = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ServerError(f"the monitor cannot listen at {address}: {error}") from error
    listener.setblocking(False)
    return listener
