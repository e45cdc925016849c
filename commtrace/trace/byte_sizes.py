"""Sizes as people write them: ``500M``, ``2GB``, ``1.5 GiB``."""

from __future__ import annotations

import re
from typing import Final, Literal

_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(I?B)?", re.IGNORECASE | re.ASCII)
_POWERS: Final = " KMGT"


def parse_bytes(text: str, thousand: Literal[1000, 1024], *, plain: str = "B") -> int:
    """Return a number of bytes, rounded down.

    ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are powers of 1024, ``kB``, ``MB``, ``GB`` and ``TB`` of 1000.

    Args:
        thousand: what ``K``, ``M``, ``G`` and ``T`` without a ``B`` are powers of: each command says it.
        plain: the unit of a number without one.

    Raises:
        ValueError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, letter, byte = match.groups()
    if not letter and not byte:
        letter, byte = plain[0].strip("B"), plain[1:] or "B"
    is_binary = byte is not None and byte.upper() == "IB"
    if is_binary and not letter:
        raise ValueError(text)
    base = 1024 if is_binary else 1000 if byte else thousand
    whole, _, part = number.partition(".")
    unit: int = base ** _POWERS.index(letter.upper() or " ")
    return int(whole + part) * unit // int(10 ** len(part))
