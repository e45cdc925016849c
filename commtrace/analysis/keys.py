"""Join rows by several columns: one sortable integer per row, so that joining is one sort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Bool, Int64

_LARGEST = 2**62


def pack(columns: Sequence[npt.NDArray[np.generic]]) -> Int64:
    """Return numbers that are equal exactly where all integer columns are equal, and that sort like the columns do."""
    first, *more = columns
    key, key_range = _from_zero(first)
    for column in more:
        digits, digits_range = _from_zero(column)
        if key_range * digits_range > _LARGEST:
            key, key_range = _dense(key)
        if key_range * digits_range > _LARGEST:
            digits, digits_range = _dense(digits)
        if digits_range > 1:
            key *= digits_range
            key += digits
            key_range *= digits_range
    return key


def run_begins(column: npt.NDArray[np.generic]) -> Bool:
    """Return where runs of equal values begin, the first value included."""
    begins = np.ones(len(column), np.bool_)
    begins[1:] = column[1:] != column[:-1]
    return begins


def numbered(column: npt.NDArray[np.generic]) -> Int64:
    """Return numbers from 0 that are equal exactly where the values are; meant for few distinct values."""
    # Runs of equal values are common (a rank talks to one group for a while), and the rest is soon sorted.
    changes = run_begins(column)
    _, number = grouped(column.compress(changes))
    return np.asarray(number[np.cumsum(changes) - 1])


def sort_groups(key: npt.NDArray[np.generic]) -> tuple[Int64, Int64]:
    """Return the order that sorts keys, and the begin of each group of equal keys in that order."""
    order = np.argsort(key, kind="stable")
    return order, np.flatnonzero(run_begins(key[order]))


def grouped(key: npt.NDArray[np.generic]) -> tuple[Int64, Int64]:
    """Return the first position of each distinct key, ascending, and each key's number among them."""
    order, begins = sort_groups(key)
    number = np.empty(len(key), np.int64)
    number[order] = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(key))))
    return order[begins], number


def concatenated_ranges(first: Int64, end: Int64) -> Int64:
    """Return ``arange(first[0], end[0])``, ``arange(first[1], end[1])``, … in one array."""
    lengths = end - first
    offsets = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(first - offsets, lengths))


def grouped_rows(columns: Sequence[npt.NDArray[np.generic]]) -> tuple[Int64, Int64]:
    """Return the first position of each distinct row, ascending, and each row's number; fast for long repeats."""
    changes = np.zeros(len(columns[0]), np.bool_)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    begins = np.flatnonzero(changes)
    example, number = grouped(pack([column[begins] for column in columns]))
    return begins[example], number[np.cumsum(changes) - 1]


def find_rows(known: Sequence[npt.NDArray[np.generic]], wanted: Sequence[npt.NDArray[np.generic]]) -> Int64:
    """Return the first known row, of columns, that each wanted row equals; −1 for none."""
    first, number = grouped(pack([np.concatenate(columns) for columns in zip(known, wanted, strict=True)]))
    row = first[number[len(known[0]) :]]
    return np.where(row < len(known[0]), row, -1)


def _from_zero(column: npt.NDArray[np.generic]) -> tuple[Int64, int]:
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    if high - low >= _LARGEST:
        return _dense(column)
    return np.subtract(column, low, dtype=np.int64), high - low + 1


def _dense(column: npt.NDArray[np.generic]) -> tuple[Int64, int]:
    number = numbered(column)
    return number, int(number.max(initial=0)) + 1
