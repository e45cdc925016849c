"""Medians by group, robust errors, and distributions that add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped
from commtrace.trace.spans import Bool, Int64

Float64 = npt.NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviations per median distance from the middle."""

QUARTILES_APART: Final = 1.349
"""Distance of the quartiles in standard deviations."""

MEDIAN_DISTANCE: Final = 0.6745
"""Median distance from the middle in standard deviations; also the median of the upper half."""

LOWER_QUARTILE_OF_DISTANCE: Final = 0.3186
"""Lower quartile of the distances from the middle in standard deviations."""

ERROR_OF_MEDIAN: Final = 1.2533
"""Standard errors of a median per standard error of a mean."""

_STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95 %, both sides, of 1, 2, … degrees of freedom."""
_STUDENT_OF_MORE: Final = 2.1

MOST_EXACT: Final = 1_000_000
"""Values of all distributions of a table together, 8 MB, up to which their quantiles are exact."""

_BITS: Final = 11
"""Leading bits that are kept of very many values, which are then wrong by at most one part in 2^11."""

Values = npt.NDArray[np.integer | np.floating]
Value = TypeVar("Value", int, float)
Key = TypeVar("Key")


def error_of_means(variance: Float64, count: Int64 | int, group: Int64) -> Float64:
    """Return the standard error of means of ``count`` values each, whose variances are pooled by group."""
    _, number = np.unique(group, return_inverse=True)
    number = number.reshape(-1)
    of_group = np.bincount(number, variance) / np.maximum(np.bincount(number), 1)
    return np.asarray(np.sqrt(of_group[number] / np.maximum(count, 1)))


def robust_sigma(values: Float64) -> float:
    """Return the standard deviation by the quartiles: single outliers do not count, two equal camps do."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / QUARTILES_APART


def half_width_of_mean(values: Float64) -> float:
    """Return half of Student's 95 % interval of the mean of two or more independent values."""
    freedom = len(values) - 1
    return student(freedom) * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))


def student(freedom: int) -> float:
    """Return Student's t for 95 %, both sides; for many degrees of freedom up to 7 % too much."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STUDENT_OF_MORE


def sigma_of_deviations(values: Float64 | Int64) -> float:
    """Return the standard deviation by the median distance from the median: up to half of the values may be odd."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def grouped_median(group: npt.NDArray[np.integer], values: Float64 | Int64, groups: int) -> Float64:
    """Return the median of each group; NaN for an empty group."""
    size = np.bincount(group, minlength=groups)
    first = np.concatenate([[0], np.cumsum(size)])
    medians = np.full(groups, np.nan)
    some = size > 0
    ordered = _sorted_within(group, values, size)
    lower, upper = first[:-1] + (size - 1) // 2, first[:-1] + size // 2
    medians[some] = (ordered[lower[some]] + ordered[upper[some]]) / 2
    return medians


_LARGEST_KEY: Final = 2**62

_FEW_GROUPS: Final = 2**16


def _sorted_within(group: npt.NDArray[np.integer], values: Float64 | Int64, size: Int64) -> Float64 | Int64:
    """Return the values by group, ascending in each; ``size`` is of each group.

    numpy sorts plain numbers ten times as fast as it orders by two keys.
    """
    if values.dtype == np.int64 and len(values):
        low = int(values.min())
        stride = int(values.max()) - low + 1
        if stride * len(size) < _LARGEST_KEY:
            key = group.astype(np.int64) * stride + (values.astype(np.int64, copy=False) - low)
            key.sort()
            return np.asarray(key - np.repeat(np.arange(len(size)) * stride - low, size))
    by_value = np.argsort(values)
    number = group[by_value]
    if len(size) <= _FEW_GROUPS:
        number = number.astype(np.uint16)  # sorted by its digits
    return values[by_value[np.argsort(number, kind="stable")]]


def exact_of_each(exact: Bool, group: npt.NDArray[np.integer]) -> Bool:
    """Mark the values of each group to use: the exact ones; all of them, which are bounds, if none is."""
    _, number = grouped(group)
    has_exact = np.bincount(number, exact) > 0
    return np.asarray(exact | ~has_exact[number])


def nan_median(values: Float64) -> Float64:
    """Return the median of the finite values of each row; NaN for rows without any."""
    rows, columns = np.nonzero(np.isfinite(values))
    return grouped_median(rows, values[rows, columns], len(values))


def leave_one_out_median(group: Int64, values: Float64) -> Float64:
    """Return, by value, the median of the other values of its group; NaN if there are none."""
    order = np.lexsort((values, group))
    ordered, ordered_group = values[order], group[order]
    heads = np.flatnonzero(np.concatenate([[True], np.diff(ordered_group) != 0])) if len(values) else order
    first = np.repeat(heads, np.diff(np.append(heads, len(values))))
    size = np.repeat(np.diff(np.append(heads, len(values))), np.diff(np.append(heads, len(values))))
    position = np.arange(len(values)) - first
    medians = np.full(len(values), np.nan)
    several = size > 1
    lower, upper = np.maximum(size - 2, 0) // 2, np.maximum(size - 1, 0) // 2
    lower, upper = lower + (lower >= position), upper + (upper >= position)
    middle = (ordered[(first + lower)[several]] + ordered[(first + upper)[several]]) / 2
    medians[order[several]] = middle
    return medians


@dataclass(frozen=True, slots=True)
class Distribution(Generic[Value]):
    """Non-negative values: exact while few, else to half a thousandth, in memory that does not grow. They add up.

    >>> Distribution.of(np.array([5, 1, 9])).nearest_rank(50)       # doctest: +SKIP
    5
    """

    parts: tuple[Values, ...]  # the exact values, in any order; empty once rounded
    rounded: Values  # ascending
    counts: Int64  # of each rounded value
    maximum: Value  # exact

    @classmethod
    def of(cls, values: Values) -> Distribution[Value]:
        """Return the distribution of int64 or float64 values."""
        return cls((values,), values[:0], np.zeros(0, np.int64), values.max(initial=0).item())

    def __len__(self) -> int:
        return sum(map(len, self.parts)) + int(self.counts.sum())

    @property
    def is_exact(self) -> bool:
        return not len(self.rounded)

    def __add__(self, other: Distribution[Value]) -> Distribution[Value]:
        maximum = max(self.maximum, other.maximum)
        if self.is_exact and other.is_exact:
            return Distribution(self.parts + other.parts, self.rounded, self.counts, maximum)
        first, second = self.round(), other.round()
        values, which = np.unique(np.concatenate([first.rounded, second.rounded]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, which.reshape(-1), np.concatenate([first.counts, second.counts]))
        return Distribution((), values, counts, maximum)

    def round(self) -> Distribution[Value]:
        """Return the same with its values rounded to their leading bits."""
        if not self.is_exact:
            return self
        rounded, counts = np.unique(_rounded(np.concatenate(self.parts)), return_counts=True)
        return Distribution((), rounded, counts.astype(np.int64), self.maximum)

    def nearest_rank(self, percent: int) -> Value | None:
        """Return the smallest value that at least ``percent`` % of the values do not exceed; None without values."""
        count = len(self)
        if not count:
            return None
        return self.maximum if percent == 100 else self._at(-(-percent * count // 100) - 1)

    def median(self) -> float | None:
        """Return the middle value, of an even number of them the mean of the middle two; None without values."""
        count = len(self)
        return float(np.mean([self._at((count - 1) // 2), self._at(count // 2)])) if count else None

    def _at(self, position: int) -> Value:
        if self.is_exact:
            value = np.partition(np.concatenate(self.parts), position)[position]
        else:
            value = self.rounded[np.searchsorted(np.cumsum(self.counts), position, side="right")]
        item: Value = value.item()
        return item


def join_distributions(parts: Iterable[tuple[Key, Distribution[Value]]]) -> dict[Key, Distribution[Value]]:
    """Add up the distributions of each key; all are rounded if they have more than :data:`MOST_EXACT` values."""
    joined: dict[Key, Distribution[Value]] = {}
    for key, distribution in parts:
        joined[key] = joined[key] + distribution if key in joined else distribution
    if sum(map(len, joined.values())) > MOST_EXACT:
        return {key: distribution.round() for key, distribution in joined.items()}
    return joined


def _rounded(values: Values) -> Values:
    """Return the middle of the range left open by the leading bits; whole numbers of few bits stay exact."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    leading = np.floor(np.ldexp(fraction, _BITS))
    is_whole = exponent <= _BITS if values.dtype == np.int64 else leading == 0
    middle = np.ldexp(np.where(is_whole, leading, leading + 0.5), exponent - _BITS)
    return np.asarray(middle.astype(values.dtype))
