"""How far a median moves by chance: what two recordings must differ by before the difference means anything.

>>> change = change_of_median(before, after)  # doctest: +SKIP
>>> change.is_real                            # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.floating[Any] | np.integer[Any]]

FEWEST_SAMPLES: Final = 5
"""Below this many steps nothing can be said about chance."""

_RESAMPLES: Final = 1000
_SEED: Final = 20_260_101
_COVERAGE_PERCENT: Final = 95.0


@dataclass(frozen=True, slots=True)
class Change:
    """A median in two recordings.

    Attributes:
        before, after: the medians; None where a recording has none.
        noise: half the width of the interval that holds 95 % of the differences that chance alone would make; None
            where there are too few samples to tell.
    """

    before: float | None
    after: float | None
    noise: float | None

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def relative(self) -> float | None:
        """The difference as a share of ``before``; None where that is 0 or unknown."""
        difference = self.difference
        return None if difference is None or not self.before else difference / self.before

    @property
    def is_real(self) -> bool:
        """Whether the difference is larger than the noise. False where the noise is unknown."""
        difference = self.difference
        return difference is not None and self.noise is not None and abs(difference) > self.noise

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "relative": self.relative,
            "noise": self.noise,
            "is_real": self.is_real,
        }


def change_of_median(before: Samples, after: Samples) -> Change:
    """Compare two series of samples, each in the order in which they were taken.

    The noise comes from a moving-block bootstrap of both medians: samples that follow each other are alike, so whole
    blocks are drawn. Künsch, The Jackknife and the Bootstrap for General Stationary Observations (1989).
    """
    medians = [float(np.median(samples)) if len(samples) else None for samples in (before, after)]
    if min(len(before), len(after)) < FEWEST_SAMPLES:
        return Change(medians[0], medians[1], None)
    random = np.random.default_rng(_SEED)
    spread = _resampled_medians(after, random) - _resampled_medians(before, random)
    centred = np.abs(spread - (np.median(after) - np.median(before)))
    return Change(medians[0], medians[1], float(np.percentile(centred, _COVERAGE_PERCENT)))


def _resampled_medians(samples: Samples, random: np.random.Generator) -> npt.NDArray[np.float64]:
    count = len(samples)
    block = max(1, round(count ** (1 / 3)))
    starts = random.integers(0, count - block + 1, (_RESAMPLES, -(-count // block)))
    rows = (starts[:, :, np.newaxis] + np.arange(block)).reshape(_RESAMPLES, -1)[:, :count]
    return np.asarray(np.median(np.asarray(samples, np.float64)[rows], axis=1))
