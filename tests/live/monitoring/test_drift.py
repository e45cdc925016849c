"""Drift of healthy ranks between windows, of made numbers."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.stragglers.limits import MOST_DRIFT
from commtrace.live.monitoring.drift import drift_of, limit_of_drift

ALIKE = np.zeros(8, np.int64)


def windows_of(drift: float, *, number: int = 16, ranks: int = 8, error: float = 0.0, seed: int = 1) -> np.ndarray:
    """Work of 100 in windows that are independent of each other, whose steps show the ``error``."""
    scatter = np.hypot(drift, error)
    total = 100 * np.random.default_rng(seed).normal(1.0, scatter, (ranks, number)) if scatter else 100 * ones(number)
    return np.stack([total, np.full(total.shape, 100 * error)], axis=2)


def ones(number: int) -> np.ndarray:
    return np.ones((8, number))


@pytest.mark.parametrize("number", [3, 16])
def test_it_is_the_scatter_that_steps_do_not_explain(number: int) -> None:
    seen = [drift_of(windows_of(0.03, number=number, error=0.01, seed=seed), ALIKE) for seed in range(50)]
    assert np.median(seen) == pytest.approx(0.03, rel=0.15)


def test_noise_of_steps_is_no_drift() -> None:
    seen = [drift_of(windows_of(0.0, error=0.02, seed=seed), ALIKE) for seed in range(50)]
    assert np.median(seen) < 0.01
    assert drift_of(windows_of(0.0), ALIKE) == 0.0


def test_what_all_ranks_share_is_no_drift() -> None:
    windows = windows_of(0.0)
    windows[:, 8:, 0] *= 1.5  # sequences became longer

    assert drift_of(windows, ALIKE) == 0.0


def test_a_rank_that_becomes_slow_does_not_hide_itself() -> None:
    windows = windows_of(0.0)
    windows[3, 8:, 0] *= 1.5

    assert drift_of(windows, ALIKE) == 0.0


def test_stages_have_different_work() -> None:
    windows = windows_of(0.0)
    windows[4:, :, 0] *= 3

    assert drift_of(windows, np.repeat([0, 1], 4)) == 0.0


def test_what_is_more_is_no_drift_of_a_healthy_device() -> None:
    assert drift_of(windows_of(0.3), ALIKE) == MOST_DRIFT


def test_without_peers_or_of_two_windows_it_is_unknown() -> None:
    assert drift_of(windows_of(0.03), np.arange(8)) == 0.0
    assert drift_of(windows_of(0.03, number=2), ALIKE) == 0.0


def test_two_ranks_that_drift_differ_by_no_more_than_the_limit() -> None:
    assert limit_of_drift(np.array([100.0]), 0.02).tolist() == [pytest.approx(2.5 * 2**0.5 * 2)]
    assert limit_of_drift(np.array([100.0])).tolist() == [pytest.approx(17.678, rel=1e-4)]
