"""The address and token of the monitor in rank 0, kept in the job's own store.

This takes one short request per rank. Rank 0 writes; the others read with ``compare_set``, the only request that
answers at once whether or not the key exists, so it cannot block the training thread on the shared connection. Any
process that can write to the job's store can answer in the place of rank 0, so the value is checked.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import msgspec

from commtrace.errors import CommtraceError
from commtrace.exporters.monitor.address import Address
from commtrace.exporters.monitor.tokens import checked_token

_LONGEST: Final = 1_024
_NOT_THERE: Final = "-"
_SOMEWHERE: Final = ("192.0.2.1", 9)
"""An address of no host (RFC 5737). A UDP socket that is connected to it tells this host's address; nothing is sent."""

_START_A_MONITOR: Final = "start `commtrace monitor --serve HOST:PORT` and set COMMTRACE_MONITOR_STORE=HOST:PORT"


class RendezvousError(CommtraceError):
    """The job has no store, or an unusable value in it."""


class Published(msgspec.Struct, frozen=True):
    """The entry of rank 0 in the store."""

    address: str
    token: str


def publish(run_id: str, attempt: int, address: Address, token: str) -> None:
    """Publish the monitor's address to the other ranks. Called on rank 0.

    Raises:
        RendezvousError: the job's store does not take it.
    """
    value = msgspec.json.encode(Published(str(address), token)).decode()
    try:
        _store_of_job().set(_key(run_id, attempt), value)
    except (RuntimeError, NotImplementedError) as error:
        raise RendezvousError(f"the job's store does not take the monitor's address: {error}") from error


def find(run_id: str, attempt: int) -> tuple[Address, str] | None:
    """Return the address and the token of the job's monitor; None until rank 0 has published them.

    Raises:
        RendezvousError: the job's store does not answer, or holds something else.
    """
    try:
        value = bytes(_store_of_job().compare_set(_key(run_id, attempt), _NOT_THERE, _NOT_THERE))
    except (RuntimeError, NotImplementedError) as error:
        raise RendezvousError(
            f"the job's store does not tell the monitor's address: {error}; {_START_A_MONITOR}"
        ) from error
    if value == _NOT_THERE.encode():
        return None
    try:
        if len(value) > _LONGEST:
            raise ValueError(f"{len(value)} bytes")
        published = msgspec.json.decode(value, type=Published)
        return Address.parse(published.address), checked_token(published.token)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, CommtraceError) as error:
        raise RendezvousError(f"what the job's store holds is no address of a monitor: {error}") from error


def host_for_ranks() -> str:
    """Return the address of this host at which the other ranks can reach it.

    It is the address by which this host reaches the job's store. With a store at ``localhost`` all ranks are here. If
    the host name resolves to a loopback address (Debian's 127.0.1.1), it is the address of the default route.

    Raises:
        RendezvousError: the job has no store that others can connect to.
    """
    store = _store_of_job()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if not host:
        raise RendezvousError(f"the job's store is a {type(store).__name__}, which has no address; {_START_A_MONITOR}")
    own = _own_address(host, port)
    if host in ("localhost", own) or not own.startswith("127."):
        return own
    return _own_address(*_SOMEWHERE, otherwise=own)


def _own_address(host: str, port: int, otherwise: str | None = None) -> str:
    """Return the address of this host from which a packet to ``host`` would be sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        if otherwise is not None:
            return otherwise
        raise RendezvousError(f"there is no way to {host}: {error}; {_START_A_MONITOR}") from error


def _key(run_id: str, attempt: int) -> str:
    return f"commtrace/monitor/{run_id}/{attempt}"


def _store_of_job() -> Any:
    from torch import distributed as dist

    if not dist.is_initialized():
        raise RendezvousError("torch.distributed is not initialised")
    return vars(dist.distributed_c10d)["_get_default_store"]()
