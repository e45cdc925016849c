"""One sortable integer per row out of several columns: joining rows is then one sort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

_LARGEST = 2**62


def pack(columns: Sequence[npt.NDArray[Any]]) -> Int64:
    """Numbers that are equal exactly where all integer columns are equal, and that sort like the columns do."""
    first, *others = columns
    key, key_range = _from_zero(first)
    for column in others:
        digits, digits_range = _from_zero(column)
        if key_range * digits_range > _LARGEST:
            key, key_range = _dense(key)
        if key_range * digits_range > _LARGEST:
            digits, digits_range = _dense(digits)
        key = key * digits_range + digits
        key_range *= digits_range
    return key


def numbered(column: Int64) -> Int64:
    """Numbers from 0 that are equal exactly where the values are, of a column that has few different ones.

    Process groups are 63-bit hashes, a few thousand of them in millions of rows.
    """
    if not len(column):
        return column
    # Runs of equal values are common (a rank talks to one group for a while), and what is left is soon sorted.
    changes = np.ones(len(column), np.bool_)
    changes[1:] = column[1:] != column[:-1]
    _, positions = np.unique(column[changes], return_inverse=True)
    return np.asarray(positions.reshape(-1)[np.cumsum(changes) - 1], np.int64)


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


def sort_groups(key: Int64) -> tuple[Int64, Int64]:
    """An order that brings equal keys together, and where in that order each group begins. Keys are not negative."""
    order = stable_order(key)
    changes = np.ones(len(key), np.bool_)
    changes[1:] = np.diff(key[order]) != 0
    return order, np.flatnonzero(changes)


def _from_zero(column: npt.NDArray[Any]) -> tuple[Int64, int]:
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    if high - low >= _LARGEST:
        return _dense(column)
    return column.astype(np.int64) - low, high - low + 1


def _dense(column: npt.NDArray[Any]) -> tuple[Int64, int]:
    values, positions = np.unique(column, return_inverse=True)
    return positions.reshape(-1).astype(np.int64), max(len(values), 1)
