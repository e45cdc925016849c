"""Publish the address of the monitor and its token to the ranks, through the job's own store.

Any process that can write to the store can pose as rank 0, so the value is checked.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.recording.options import is_token

_MOST_BYTES: Final = 1_024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def new_token() -> str:
    return secrets.token_hex(32)


def checked_token(text: str) -> str:
    """Return ``text``; raise :class:`ConfigurationError` if it cannot be a token."""
    if not is_token(text):
        raise ConfigurationError("the monitor's token must have 16 to 256 printable ASCII characters and no spaces")
    return text


def token_path() -> Path:
    """Return ``~/.config/commtrace/monitor-token``; raise :class:`ConfigurationError` without a home directory."""
    try:
        directory = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    except RuntimeError as error:
        raise ConfigurationError(f"{error} Set COMMTRACE_MONITOR_TOKEN") from error
    return Path(directory) / "commtrace" / "monitor-token"


def read_token(path: Path) -> str:
    """Return the token in a file that only the user can read.

    Raises:
        ConfigurationError: the file is missing, others can read it, or it holds no token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS or status.st_uid != os.geteuid():
                raise ConfigurationError(f"{path} must be your own file and readable only by you: chmod 600 {path}")
            return checked_token(file.read(_MOST_BYTES).decode("ascii", "replace").strip())
    except OSError as error:
        raise ConfigurationError(
            f"a monitor outside of the job shares a token with its ranks, and {path} cannot be read "
            f"({error.strerror}): set COMMTRACE_MONITOR_TOKEN to what `commtrace monitor` uses"
        ) from error


def make_token(path: Path) -> str:
    """Return the token in the file; create it, readable by the user only, if it is missing.

    Raises:
        ConfigurationError: the file can be neither created nor read.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be created ({error.strerror}): set COMMTRACE_MONITOR_TOKEN") from error
    with open(descriptor, "w") as file:
        file.write(new_token() + "\n")
    return read_token(path)


_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")
_MOST_PORT: Final = 65_535


class AddressError(CommtraceError, ValueError):
    """A text that is not an address."""


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ``HOST:PORT`` or ``[IPv6]:PORT``; raise :class:`AddressError` for other texts."""
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[3]) > _MOST_PORT:
            raise AddressError(f"{text[:300]!r} is not an address: write HOST:PORT, or [ADDRESS]:PORT for IPv6")
        return cls(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_LONGEST: Final = 1_024
_NOT_THERE: Final = "-"
_SOMEWHERE: Final = ("192.0.2.1", 9)
"""An address that no host has (RFC 5737). A UDP socket connected to it knows this host's address; nothing is sent."""

_START_A_MONITOR: Final = "start `commtrace monitor HOST:PORT` and set COMMTRACE_MONITOR_STORE=HOST:PORT"


class RendezvousError(CommtraceError):
    """The job has no store, or an unusable value in it."""


class Published(msgspec.Struct, frozen=True):
    address: str
    token: str


def publish(run_id: str, attempt: int, address: Address, token: str) -> None:
    """Publish the monitor's address from rank 0; raise :class:`RendezvousError` if the job's store does not take it."""
    value = msgspec.json.encode(Published(str(address), token)).decode()
    try:
        _store_of_job().set(_key(run_id, attempt), value)
    except (RuntimeError, NotImplementedError) as error:
        raise RendezvousError(f"the job's store does not accept the monitor's address: {error}") from error


def find(run_id: str, attempt: int) -> tuple[Address, str] | None:
    """Return the address and the token of the job's monitor; None until rank 0 has published them.

    Raises:
        RendezvousError: the job's store does not answer, or holds something else.
    """
    # compare_set is the only request that answers at once whether or not the key exists: another one could block the
    # training thread on the shared connection.
    try:
        value = bytes(_store_of_job().compare_set(_key(run_id, attempt), _NOT_THERE, _NOT_THERE))
    except (RuntimeError, NotImplementedError) as error:
        raise RendezvousError(
            f"the job's store does not return the monitor's address: {error}; {_START_A_MONITOR}"
        ) from error
    if value == _NOT_THERE.encode():
        return None
    try:
        if len(value) > _LONGEST:
            raise ValueError(f"{len(value)} bytes")
        published = msgspec.json.decode(value, type=Published)
        return Address.parse(published.address), checked_token(published.token)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, CommtraceError) as error:
        raise RendezvousError(f"the job's store holds no valid address of a monitor: {error}") from error


def host_for_ranks() -> str:
    """Return the address of this host for other ranks; raise :class:`RendezvousError` without a store to connect to."""
    # The address from which this host reaches the store; with a store at localhost, all ranks are here. If the host
    # name resolves to a loopback address (Debian's 127.0.1.1), the address of the default route.
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
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        if otherwise is not None:
            return otherwise
        raise RendezvousError(f"{host} cannot be reached: {error}; {_START_A_MONITOR}") from error


def _key(run_id: str, attempt: int) -> str:
    return f"commtrace/monitor/{run_id}/{attempt}"


def _store_of_job() -> Any:
    from torch import distributed as dist

    if not dist.is_initialized():
        raise RendezvousError("torch.distributed is not initialised")
    return vars(dist.distributed_c10d)["_get_default_store"]()
