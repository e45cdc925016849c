"""Factors from robust measures of scatter to standard deviations and errors, for normal noise."""

from __future__ import annotations

from typing import Final

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
