"""Bandwidths as people write them: ``300GB/s``, ``200Gbit/s``."""

from __future__ import annotations

import re
from typing import Final

_RATE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:(MB|GB|TB|Mbit|Gbit|Tbit)/s)?")
_UNITS: Final = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8}


def parse_rate(text: str, *, plain: str = "") -> float:
    """Return bytes per second, above 0.

    Args:
        plain: The unit of a number without one, such as ``GB``. Empty: a unit must be given.

    Raises:
        ValueError: it is no bandwidth.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, unit = match[1], match[2] or plain
    if not unit or float(number) == 0:
        raise ValueError(text)
    return float(number) * _UNITS[unit]
