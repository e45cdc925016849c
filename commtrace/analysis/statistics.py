"""Factors from robust measures of scatter to standard deviations and errors, for normal noise."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

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


def error_of_means(
    variance: npt.NDArray[np.float64], count: npt.NDArray[np.int64] | int, group: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
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
