"""Medians by group, and errors from robust measures of scatter, for normal noise."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.trace.spans import Int64

Float64 = npt.NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviations per median distance from the middle."""

QUARTILES_APART: Final = 1.349
"""Distance of the quartiles in standard deviations."""

MEDIAN_DISTANCE: Final = 0.6745
"""Median distance from the middle in standard deviations; also the median of what lies above the middle."""

LOWER_QUARTILE_OF_DISTANCE: Final = 0.3186
"""Lower quartile of the distances from the middle in standard deviations."""

ERROR_OF_MEDIAN: Final = 1.2533
"""Standard errors of a median per standard error of a mean."""


def error_of_means(variance: Float64, count: Int64 | int, group: Int64) -> Float64:
    """Return the standard error of each mean, if all of a group scatter alike.

    Args:
        variance: of single values, one for each mean.
        count: how many values each mean is of.
        group: equal for means whose values scatter alike.
    """
    _, number = np.unique(group, return_inverse=True)
    number = number.reshape(-1)
    of_group = np.bincount(number, variance) / np.maximum(np.bincount(number), 1)
    return np.asarray(np.sqrt(of_group[number] / np.maximum(count, 1)))


def robust_sigma(values: Float64) -> float:
    """Return the standard deviation by the quartiles: single outliers do not count, two equal camps do."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / QUARTILES_APART


def grouped_median(group: Int64, values: Float64 | Int64, groups: int) -> Float64:
    """Return the median of the values of each group; NaN for a group without any."""
    size = np.bincount(group, minlength=groups)
    first = np.concatenate([[0], np.cumsum(size)])
    medians = np.full(groups, np.nan)
    some = size > 0
    ordered = values[np.lexsort((values, group))]
    lower, upper = first[:-1] + (size - 1) // 2, first[:-1] + size // 2
    medians[some] = (ordered[lower[some]] + ordered[upper[some]]) / 2
    return medians


def leave_one_out_median(group: Int64, values: Float64) -> Float64:
    """Return, of each value, the median of the other values of its group; NaN for one that is alone."""
    order = np.lexsort((values, group))
    ordered, ordered_group = values[order], group[order]
    heads = np.flatnonzero(np.concatenate([[True], np.diff(ordered_group) != 0])) if len(values) else order
    first = np.repeat(heads, np.diff(np.append(heads, len(values))))
    size = np.repeat(np.diff(np.append(heads, len(values))), np.diff(np.append(heads, len(values))))
    own = np.arange(len(values)) - first
    medians = np.full(len(values), np.nan)
    several = size > 1
    lower, upper = np.maximum(size - 2, 0) // 2, np.maximum(size - 1, 0) // 2
    lower, upper = lower + (lower >= own), upper + (upper >= own)
    middle = (ordered[(first + lower)[several]] + ordered[(first + upper)[several]]) / 2
    medians[order[several]] = middle
    return medians
