"""Finds where a noisy straight line jumps and stays there, by the medians of windows on either side.

>>> change_points(times, differences)                           # doctest: +SKIP
[Change(position=412, size=-3000120.0)]
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.statistics import ERROR_OF_MEDIAN, MAD_TO_SIGMA

Float64 = npt.NDArray[np.float64]

WINDOW: Final = 15
"""So many readings on either side decide: their medians ignore those that were seen late."""

_WINDOWS: Final = 5
"""Windows are smaller where there are too few readings for so many of them: in most of them there must be no jump."""

_SMALLEST_WINDOW: Final = 4
_SMALLEST_STEP_NS: Final = 20_000
_SIGMAS: Final = 6.0
"""Of medians of whole windows; more of smaller ones, since few readings do not tell well how much they scatter."""

_SPREADS: Final = 8.0
"""A step must stand out from how the medians of neighbouring windows differ elsewhere, not only from the readings."""

_PERSISTENCE: Final = 0.8
_NEIGHBOURHOOD: Final = 4 * WINDOW
"""So much of what is so near to the step must be on its side of it: operations whose ends are seen late by turns are
no steps."""

_MOST_CHANGES: Final = 8


class Change(NamedTuple):
    """From this position on, the line lies higher by ``size`` ns."""

    position: int
    size: float


def change_points(time: Float64, difference: Float64, most: int = _MOST_CHANGES) -> list[Change]:
    """Return where the line jumps, in order: the largest jump first, then those on either side of it."""
    found = _largest_jump(time, difference) if most else None
    if found is None:
        return []
    position = found.position
    left = change_points(time[:position], difference[:position], most - 1)
    right = change_points(time[position:], difference[position:], most - 1 - len(left))
    return [*left, found, *(Change(position + one.position, one.size) for one in right)]


def without_drift(time: Float64, difference: Float64) -> Float64:
    """Return the difference less its slope: the median over pairs a tenth of the time apart, few of which hold a jump.

    By time, not by number: of readings that come in bursts, as those of a step do, neighbours tell only their noise.
    """
    if not len(time) or time[-1] <= time[0]:
        return difference
    later = np.searchsorted(time, time + (time[-1] - time[0]) / 10)
    earlier = np.flatnonzero(later < len(time))
    later = later[earlier]
    slope = np.median((difference[later] - difference[earlier]) / (time[later] - time[earlier]))
    return np.asarray(difference - slope * time)


def noise_of(level: Float64) -> float:
    """Standard deviation of single readings; jumps do not count."""
    return MAD_TO_SIGMA * float(np.median(np.abs(np.diff(level)))) / float(np.sqrt(2))


def error_of_median(noise: float, count: int) -> float:
    """Standard error of the median of so many readings."""
    return noise * ERROR_OF_MEDIAN / float(np.sqrt(count))


def _largest_jump(time: Float64, difference: Float64) -> Change | None:
    window = min(WINDOW, len(time) // _WINDOWS)
    if window < _SMALLEST_WINDOW:
        return None
    level = without_drift(time, difference)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(level, window), axis=1)
    jumps = medians[window:] - medians[:-window]  # jumps[i]: between readings i + window − 1 and i + window
    largest = int(np.argmax(np.abs(jumps)))
    error_of_jump = error_of_median(noise_of(level), window) * float(np.sqrt(2))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(jumps - np.median(jumps))))
    if abs(jumps[largest]) < max(_SMALLEST_STEP_NS, _SIGMAS * WINDOW / window * error_of_jump, _SPREADS * spread):
        return None
    left, right = float(medians[largest]), float(medians[largest + window])
    position = largest + _best_split(level[largest : largest + 2 * window], left, right)
    return Change(position, right - left) if _persists(level, position, left, right) else None


def _persists(level: Float64, position: int, left: float, right: float) -> bool:
    nearer_to_left = np.abs(level - left) < np.abs(level - right)
    before = nearer_to_left[max(0, position - _NEIGHBOURHOOD) : position]
    after = ~nearer_to_left[position : position + _NEIGHBOURHOOD]
    return bool(min(before.mean(), after.mean()) >= _PERSISTENCE)


def _best_split(level: Float64, left: float, right: float) -> int:
    """Return where the readings go over from one level to the other: least absolute error."""
    error_left = np.concatenate([[0.0], np.cumsum(np.abs(level - left))])
    error_right = np.concatenate([[0.0], np.cumsum(np.abs(level - right)[::-1])])[::-1]
    return 1 + int(np.argmin((error_left + error_right)[1:-1]))
