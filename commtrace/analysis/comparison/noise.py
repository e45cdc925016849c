"""The noise of a median, or of a mean: the smallest significant difference between two recordings.

If a side was recorded several times, the noise includes the scatter of its medians between starts of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.statistics import student
from commtrace.trace.json_values import JsonObject

Samples = npt.NDArray[np.floating | np.integer]

Statistic = Callable[..., Any]
"""``np.median`` or ``np.mean``."""

FEWEST_SAMPLES: Final = 5
"""Fewest steps from which the noise can be known."""

_RESAMPLES: Final = 1000
_SEED: Final = 20_260_101
_COVERAGE_PERCENT: Final = 95.0


@dataclass(frozen=True, slots=True)
class MeasuredChange:
    """A median, or a mean, in two recordings; the mean of those where a side was recorded several times."""

    before: float | None  # None where a recording has none
    after: float | None
    noise: float | None  # half the width of the 95 % interval of differences by chance; None with too few samples

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def relative(self) -> float | None:
        """Return the difference as a share of ``before``; None where that is 0 or unknown."""
        difference = self.difference
        return None if difference is None or not self.before else difference / self.before

    @property
    def is_real(self) -> bool:
        """Return whether the difference is larger than the noise."""
        difference = self.difference
        return difference is not None and self.noise is not None and abs(difference) > self.noise

    def to_json(self) -> JsonObject:
        return {
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "relative": self.relative,
            "noise": self.noise,
            "is_real": self.is_real,
        }


def change_of_runs(
    before: Sequence[Samples], after: Sequence[Samples], statistic: Statistic = np.median
) -> MeasuredChange:
    """Compare two series that were each taken one or several times; recordings without a sample do not count.

    Of several, the noise is the larger of the noise within them and half of Student's interval of the difference of the
    two means, with one variance for both sides.
    """
    before, after = ([samples for samples in side if len(samples)] for side in (before, after))
    if len(before) < 2 and len(after) < 2:
        first, second = (side[0] if side else np.empty(0) for side in (before, after))
        return change_of_run(first, second, statistic)
    medians = [np.array([float(statistic(samples)) for samples in side]) for side in (before, after)]
    means = [float(side.mean()) if len(side) else None for side in medians]
    if not (before and after) or min(len(samples) for side in (before, after) for samples in side) < FEWEST_SAMPLES:
        return MeasuredChange(means[0], means[1], None)
    within = _noise_within(before, after, statistic)
    return MeasuredChange(means[0], means[1], max(within, _noise_between(medians)))


def _noise_within(before: Sequence[Samples], after: Sequence[Samples], statistic: Statistic) -> float:
    random = np.random.default_rng(_SEED)
    spread = np.zeros(_RESAMPLES)
    for side in (before, after):
        for samples in side:
            spread += (_resampled(samples, random, statistic) - statistic(samples)) / len(side)
    return float(np.percentile(np.abs(spread), _COVERAGE_PERCENT))


def _noise_between(medians: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return half of Student's interval of the difference of the two means."""
    freedom = sum(len(side) - 1 for side in medians)
    variance = sum(float(((side - side.mean()) ** 2).sum()) for side in medians) / freedom
    return student(freedom) * float(np.sqrt(variance * sum(1 / len(side) for side in medians)))


def change_of_run(before: Samples, after: Samples, statistic: Statistic = np.median) -> MeasuredChange:
    """Compare two series of samples, each in time order.

    The noise comes from a moving-block bootstrap of both medians, since neighbouring samples are alike: Künsch, The
    Jackknife and the Bootstrap for General Stationary Observations (1989).
    """
    medians = [float(statistic(samples)) if len(samples) else None for samples in (before, after)]
    if min(len(before), len(after)) < FEWEST_SAMPLES:
        return MeasuredChange(medians[0], medians[1], None)
    random = np.random.default_rng(_SEED)
    spread = _resampled(after, random, statistic) - _resampled(before, random, statistic)
    centred = np.abs(spread - (statistic(after) - statistic(before)))
    return MeasuredChange(medians[0], medians[1], float(np.percentile(centred, _COVERAGE_PERCENT)))


def _resampled(samples: Samples, random: np.random.Generator, statistic: Statistic) -> npt.NDArray[np.float64]:
    count = len(samples)
    block = max(1, round(count ** (1 / 3)))
    starts = random.integers(0, count - block + 1, (_RESAMPLES, -(-count // block)))
    rows = (starts[:, :, np.newaxis] + np.arange(block)).reshape(_RESAMPLES, -1)[:, :count]
    return np.asarray(statistic(np.asarray(samples, np.float64)[rows], axis=1))
