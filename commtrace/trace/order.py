"""Sorting orders of integer columns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

_LARGEST: Final = 2**62


def stable_order(key: npt.NDArray[Any]) -> Int64:
    """What sorts integers; equal ones keep their order. Ten times as fast as a stable ``argsort``, for most keys.

    Each key takes its position along in its low bits: numbers are sorted far faster than positions are by numbers.
    """
    bits = max(len(key) - 1, 1).bit_length()
    low, high = (int(key.min()), int(key.max())) if len(key) else (0, 0)
    if high - low >= _LARGEST >> bits:
        return np.argsort(key, kind="stable")
    together = key.astype(np.int64)
    together -= low
    together <<= bits
    together |= np.arange(len(key))
    together.sort()
    together &= (1 << bits) - 1
    return together
