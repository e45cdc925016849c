"""The address of the monitor: ``HOST:PORT``."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commtrace.errors import CommtraceError

_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")
_MOST_PORT: Final = 65_535


class AddressError(CommtraceError, ValueError):
    """Something is no address."""


class Address(NamedTuple):
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that ``HOST:PORT`` or ``[IPv6]:PORT`` names.

        Raises:
            AddressError: the text is something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[3]) > _MOST_PORT:
            raise AddressError(f"{text[:300]!r} is no address: write HOST:PORT, or [ADDRESS]:PORT for IPv6")
        return cls(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
