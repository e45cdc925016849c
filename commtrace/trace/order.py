"""Sort integer columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

_LARGEST: Final = 2**62


def stable_order(key: npt.NDArray[np.generic]) -> Int64:
    """Return the indices that sort integers stably, ten times as fast as a stable ``argsort`` for most keys."""
    bits = max(len(key) - 1, 1).bit_length()
    low, high = (int(key.min()), int(key.max())) if len(key) else (0, 0)
    if high - low >= _LARGEST:
        return np.argsort(key, kind="stable")
    digits = np.subtract(key, low, dtype=np.int64)
    if high - low < _LARGEST >> bits:
        return _positions(digits, bits)
    # A key without room for its position is sorted by its low digits first, then by the others.
    width = _LARGEST.bit_length() - 1 - bits
    order = _positions(digits & ((1 << width) - 1), bits)
    digits >>= width
    return order.take(stable_order(digits.take(order)))


# Each key carries its position in its low bits.
def _positions(digits: Int64, bits: int) -> Int64:
    """Return the order of numbers below 2 ** (63 − ``bits``); overwrites them."""
    digits <<= bits
    digits |= np.arange(len(digits))
    digits.sort()
    digits &= (1 << bits) - 1
    return digits
