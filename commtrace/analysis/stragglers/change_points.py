"""Cut a run at the steps where the work of ranks, stages or links changes, by binary segmentation with CUSUM.

Each cut lies at the row and step where the means on both sides differ most in standard errors (Page, Continuous
Inspection Schemes, 1954; Vostrikova, Detecting "disorder" in multidimensional random processes, 1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.statistics import LOWER_QUARTILE_OF_DISTANCE, MAD_TO_SIGMA
from commtrace.analysis.stragglers.limits import (
    DEPENDENCE,
    FEWEST_FOR_DRIFT,
    MOST_CHANGES,
    NOISIEST,
    SIGMAS_OF_CHANGE,
    SMOOTHED_STEPS,
    SPARE_STEPS,
)
from commtrace.analysis.stragglers.work_statistics import WorkStatistics

Float64 = npt.NDArray[np.float64]


class Series(NamedTuple):
    """Values to be searched for changes, one row per rank, stage or link; ns."""

    values: Float64  # without single steps that differ, shape (rows, steps)
    error: Float64  # standard error of a single step, for means over many
    least: Float64  # the smallest change that counts


EDGE: Final = SMOOTHED_STEPS // 2 + 1
"""The shortest part that smoothing leaves."""


def find_cuts(series: Series, shortest: int, *, goes_on: bool = False) -> list[int]:
    """Return the places, ascending, that cut the steps into parts of at least ``shortest`` steps.

    ``goes_on``: the newest steps are the begin of a part, which may be as short as ``EDGE``.
    """
    return _cut(series, shortest, EDGE if goes_on else shortest, MOST_CHANGES, SPARE_STEPS * series.values.shape[1])


def cut_at(work: WorkStatistics, cuts: Sequence[int]) -> list[WorkStatistics]:
    """Return the stretches between these places among the steps that count."""
    return [_within(work, first, end) for first, end in pairwise([0, *cuts, work.num_steps])] if cuts else [work]


def _within(work: WorkStatistics, first: int, end: int) -> WorkStatistics:
    chosen = np.zeros(len(work.steady), np.bool_)
    chosen[np.flatnonzero(work.steady)[first:end]] = True
    return work.within(chosen)


def without_single_steps(values: Float64) -> Float64:
    half = SMOOTHED_STEPS // 2
    padded = np.pad(values, ((0, 0), (half, half)), mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED_STEPS, axis=1), axis=2))


def error_of_steps(values: Float64, smooth: Float64, level: Float64, shortest: int) -> Float64:
    """Return the standard error of a single step of each row, for means over at least ``shortest`` steps.

    ``smooth`` are the values without single steps. Noise counts as at least a thousandth of ``level``.
    """
    noise = _noise(values, level)
    return np.asarray(DEPENDENCE * noise * _wandering(smooth, noise, shortest))


def error_of_strikes(smooth: Float64) -> Float64:
    """Return the error of values that differ in few steps: what smoothing leaves of these."""
    return np.asarray(DEPENDENCE * np.sqrt((np.diff(smooth, axis=1) ** 2).mean(axis=1) / 2))


def drift(values: Float64, level: Float64) -> float:
    """Return the scatter of a step by slow drift, for means over all steps, as a share of ``level``; 0 of few steps."""
    length = values.shape[1] // 3
    if values.shape[1] < FEWEST_FOR_DRIFT:
        return 0.0
    share = _scatter_of_means(without_single_steps(values), length) / np.maximum(level, 1.0)
    return float(np.median(share) * np.sqrt(length))


def _noise(values: Float64, level: Float64) -> Float64:
    noise = MAD_TO_SIGMA * np.median(np.abs(np.diff(values, axis=1)), axis=1) / np.sqrt(2)
    scatters = noise[noise > 0]  # not so the input of ranks that get theirs from another one
    most = NOISIEST * np.median(scatters) if len(scatters) else 0.0
    return np.asarray(np.maximum(np.minimum(noise, most), 1e-3 * level + 1.0))


def _wandering(steps: Float64, noise: Float64, length: int) -> float:
    """Return the scatter of means of ``length`` steps relative to that of independent steps, on the typical rank."""
    if steps.shape[1] < 3 * length:
        return 1.0
    return max(1.0, float(np.median(_scatter_of_means(steps, length) * np.sqrt(length) / noise)))


def _scatter_of_means(steps: Float64, length: int) -> Float64:
    """Return the scatter of means of ``length`` steps of each row, which shows slow drift as of a device's clock."""
    # The lower quartile of the differences: a change of behaviour lies between many of the means.
    means = np.lib.stride_tricks.sliding_window_view(steps, length, axis=1).mean(axis=2)
    differences = np.quantile(np.abs(means[:, length:] - means[:, :-length]), 0.25, axis=1)
    return np.asarray(differences / LOWER_QUARTILE_OF_DISTANCE / np.sqrt(2))


def _cut(series: Series, shortest: int, shortest_last: int, most: int, spare: float) -> list[int]:
    values, error, least = series
    steps = values.shape[1]
    if most < 1 or steps < shortest + shortest_last:
        return []
    left = np.arange(EDGE, steps - EDGE + 1)
    sums = np.cumsum(values, axis=1)
    before, total = sums[:, left - 1], sums[:, -1:]
    apart = np.abs((total - before) / (steps - left) - before / left)
    sigmas = apart * np.sqrt(left * (steps - left) / steps) / error[:, np.newaxis]
    sigmas[apart < least[:, np.newaxis]] = 0.0
    row, place = np.unravel_index(int(np.argmax(sigmas)), sigmas.shape)
    if sigmas[row, place] < SIGMAS_OF_CHANGE:
        return []
    at = int(left[place])
    if not shortest <= at <= steps - shortest_last:
        # One end differs that is too short to be judged alone.
        is_first, length = at < shortest, min(at, steps - at)
        slower_first = before[:, place] / at > (total[:, 0] - before[:, place]) / (steps - at)
        is_slow = ((sigmas[:, place] >= SIGMAS_OF_CHANGE) & (slower_first == is_first)).any()
        if not is_slow and length <= spare:
            # It stays with its neighbours, as steps that cost nothing.
            rest = series._replace(values=values[:, at:] if is_first else values[:, :at])
            last = shortest_last if is_first else shortest
            return [one + at * is_first for one in _cut(rest, shortest, last, most, spare - length)]
        at = shortest if is_first else steps - shortest_last
    first = _cut(series._replace(values=values[:, :at]), shortest, shortest, most - 1, spare)
    second = _cut(series._replace(values=values[:, at:]), shortest, shortest_last, most - 1 - len(first), spare)
    return [*first, at, *(at + one for one in second)]
