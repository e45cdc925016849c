"""How much the work of healthy ranks drifts from window to window, beyond the noise of their steps.

>>> drift_of(windows, peers)                                    # doctest: +SKIP
0.03
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.limits import MOST_DRIFT, RECORDED
from commtrace.trace.spans import Int64

WINDOWS_OF_DRIFT: Final = 16
"""Windows whose means show the drift: a minute, with windows of the usual length."""

FEWEST_WINDOWS: Final = 3
MOST_RANKS: Final = 512
"""Ranks that are looked at: of more, others tell nothing new."""

_SIGMAS: Final = RECORDED.sigmas * 2**0.5
"""Of the difference of two ranks that drift: a drift lasts, so that chances are as few as stretches of a recording."""


def drift_of(windows: Float64, peers: Int64) -> float:
    """Return the standard deviation of a healthy rank's work between windows, as a share of its work; 0 if unknown.

    What all ranks with the same work share is no drift, and a rank that becomes slow does not make it larger.

    Args:
        windows: the work of each rank in the same windows, and its standard error; shape (ranks, windows, 2).
        peers: equal for ranks that do the same work.
    """
    if windows.shape[1] < FEWEST_WINDOWS:
        return 0.0
    total, error = windows[:, :, 0], windows[:, :, 1]
    variances: list[Float64] = []
    for label in np.unique(peers):
        of_peers = total[peers == label]
        usual, count = np.median(of_peers, axis=0), len(of_peers)
        if count > 1 and (usual > 0).all():
            # The median of few ranks follows each of them.
            variances.append((of_peers / usual).var(axis=1, ddof=1) * count / (count - 1))
    if not variances:
        return 0.0
    freedom = windows.shape[1] - 1
    of_median = (1 - 2 / (9 * freedom)) ** 3  # of a variance, by Wilson and Hilferty
    noise = float(np.median(((error / np.maximum(total, 1.0)) ** 2).mean(axis=1)))
    drift = max(float(np.median(np.concatenate(variances))) / of_median - noise, 0.0) ** 0.5
    return min(float(drift), MOST_DRIFT)


def limit_of_drift(normal_ns: Float64, drift: float = MOST_DRIFT) -> Float64:
    """Return the excess, ns, that two healthy ranks reach by drift."""
    return np.asarray(_SIGMAS * drift * normal_ns)
