"""Bandwidth of communication: ``algbw = S / t`` and ``busbw = algbw · f``, with the bytes and factors of nccl-tests.

The factors hold for ring algorithms; with others (NVLS, SHARP) busbw is an effective number that may exceed the link.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

WITHOUT_BANDWIDTH: Final = ("barrier",)


def bus_factor(operation: str, group_size: int, *, uneven: bool = False) -> float:
    """Return f: the share of the tensor that crosses the busiest link."""
    if operation == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if operation in ("all_gather", "reduce_scatter") or (operation == "all_to_all" and not uneven):
        return (group_size - 1) / group_size
    return 1.0


def moved_bytes(operation: str, num_bytes: Int64, self_bytes: Int64) -> Int64:
    """Return S of each call: the tensor; of an uneven all_to_all, only the bytes for other ranks."""
    sent = np.maximum(num_bytes, 0)
    if operation != "all_to_all":
        return sent
    return np.where(self_bytes >= 0, sent - self_bytes, sent)


def bus_factors(operation: str, group_size: int, self_bytes: Int64) -> npt.NDArray[np.float64]:
    """Return the factor of each call; even and uneven all_to_all differ."""
    even, uneven = (bus_factor(operation, group_size, uneven=uneven) for uneven in (False, True))
    return np.where((self_bytes >= 0) & (operation == "all_to_all"), uneven, even)
