"""A connection to a TCPStore that cannot hold anybody up.

A TCPStore waits for the answer to most requests as long as it takes: its timeout is for keys that are not there yet,
and a server that is frozen (stopped, swapped out, cut off) never answers. So we find the socket that a new store has
opened, and bound every wait on it; another thread can cut it at any time.

>>> connection = Connection("login1", 29555)                   # doctest: +SKIP
>>> store = connection.open()                                  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
import weakref
from datetime import timedelta
from typing import Any, Final

TIMEOUT_SECONDS: Final = 3.0
_SECONDS_TO_OPEN: Final = 2.0
"""Less than the timeout: a store whose socket was cut after that gives up instead of opening another one."""

_OWN_SOCKETS: Final = "/proc/self/fd"
_LONGEST_ADDRESS: Final = 128
"""``sizeof(struct sockaddr_storage)``: a family of 16 bits, then, of TCP, the port in the network's order."""

_ASK_FOR_THE_NUMBER_OF_KEYS: Final = struct.pack("<BIB", 0, 0x3C85F7CE, 7)
"""What a TCPStore client of any supported torch says first, and the shortest question that has an answer."""


class Connection:
    """The socket of one TCPStore client of this process.

    Args:
        host, port: of the store.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._known: set[int] | None = None  # while it is being opened: the sockets that are not ours
        self._socket: socket.socket | None = None

    def open(self) -> Any:
        """A TCPStore client whose every request ends within seconds.

        Raises:
            RuntimeError: the store does not answer.
        """
        from torch._C._distributed_c10d import TCPStore

        self._known = _sockets()
        guard = threading.Timer(TIMEOUT_SECONDS, self.cut)
        guard.daemon = True
        guard.start()
        try:
            store = TCPStore(
                self._host,
                self._port,
                is_master=False,
                timeout=timedelta(seconds=_SECONDS_TO_OPEN),
                wait_for_workers=False,
            )
            with self._lock:
                self._socket = self._found(self._known)
        finally:
            guard.cancel()
            with self._lock:
                self._known = None
        with self._lock:
            if self._socket is None:
                raise RuntimeError("its socket cannot be told from others that were opened just now, or was cut")
            _bound(self._socket)
            weakref.finalize(self, self._socket.close).atexit = False
        return store

    def cut(self) -> None:
        """Make whoever waits for an answer fail at once. From any thread, at any time."""
        with self._lock:
            found = self._socket
            if found is None and self._known is not None:
                found = self._found(self._known)
            self._socket = None
        if found is not None:
            with found, contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)

    def _found(self, known: set[int]) -> socket.socket | None:
        """The only socket of this process that is new and leads to the store's port.

        None where there is no such, or another one beside it: whose it is cannot be told, and it is not ours to touch.
        """
        found = [own for inode in _sockets() - known if (own := _duplicate(inode)) is not None]
        leading = [own for own in found if _peer_port(own) == self._port]
        ours = leading[0] if len(leading) == 1 else None
        for own in found:
            if own != ours:
                os.close(own)
        return socket.socket(fileno=ours) if ours is not None else None


def can_bound() -> bool:
    """Whether this system shows a process its own sockets; without that, a frozen store would hold up for ever."""
    return os.path.isdir(_OWN_SOCKETS)


def check_that_somebody_listens(host: str, port: int) -> None:
    """Where nobody does, a TCPStore tries again for longer than its timeout, in C++: a process that ends meanwhile, as
    the last ranks of a job do when the first one is gone, would be aborted when that thread asks for the GIL.

    Raises:
        OSError: nobody listens.
    """
    with socket.create_connection((host, port), TIMEOUT_SECONDS):
        pass


def check_that_it_answers(host: str, port: int) -> None:
    """Ask a store that did not answer before, by a socket of our own: torch would write its stack at every failure.

    Raises:
        OSError: nobody listens, or the store is frozen. Any answer will do, also a refusal.
    """
    with socket.create_connection((host, port), TIMEOUT_SECONDS) as own:
        own.settimeout(TIMEOUT_SECONDS)
        own.sendall(_ASK_FOR_THE_NUMBER_OF_KEYS)
        own.recv(1)


def _sockets() -> set[int]:
    """Inodes of the sockets of this process; empty where that cannot be found out."""
    return set(_descriptors())


def _descriptors() -> dict[int, int]:
    """By inode, a descriptor of every socket."""
    found: dict[int, int] = {}
    try:
        names = os.listdir(_OWN_SOCKETS)
    except OSError:  # not Linux
        return found
    for name in names:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _duplicate(inode: int) -> int | None:
    """A descriptor of our own of this socket: the other one may be closed, and its number be given away.

    Not a Python socket: after ``socket.setdefaulttimeout``, making one turns off blocking for whoever has the socket.
    """
    descriptor = _descriptors().get(inode)
    if descriptor is None:
        return None
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        return None
    return copy


def _peer_port(descriptor: int) -> int:
    """The port that a TCP socket leads to; −1 where it listens, is not connected or is of another sort."""
    address = ctypes.create_string_buffer(_LONGEST_ADDRESS)
    length = ctypes.c_uint32(_LONGEST_ADDRESS)
    if ctypes.CDLL(None).getpeername(descriptor, address, ctypes.byref(length)):
        return -1
    (family,) = struct.unpack_from("=H", address)
    return int(struct.unpack_from("!H", address, 2)[0]) if family in (socket.AF_INET, socket.AF_INET6) else -1


def _bound(own: socket.socket) -> None:
    """A wait in C++ that lasts longer raises there."""
    seconds = struct.pack("ll", int(TIMEOUT_SECONDS), 0)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
    if own.gettimeout() is not None:  # the script has set a default timeout, which makes a socket non-blocking
        own.setblocking(True)
