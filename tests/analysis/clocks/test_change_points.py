"""Jumps of a noisy line, of which nothing but its readings is known."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.clocks.change_points import Change, change_points

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


def line(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Readings with 5 µs of noise, a drift of up to 100 ppm and 1 % that are late by up to 50 ms; by time."""
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(0, count * SECOND, count))
    late = np.where(random.random(count) < 0.01, random.uniform(0, 50 * MILLISECOND, count), 0)
    return times, random.normal(0, 5_000, count) + late + times * random.uniform(-1e-4, 1e-4)


@pytest.mark.parametrize("count", [20, 30, 60, 300])
def test_where_nothing_jumps_nothing_is_found(count: int) -> None:
    assert [change_points(*line(count, seed)) for seed in range(40)] == [[]] * 40


@pytest.mark.parametrize("bursts", [5, 8, 20])
def test_where_nothing_jumps_nothing_is_found_in_bursts_of_readings(bursts: int) -> None:
    """Four readings within 2 ms at the end of each step of 200 ms."""
    for seed in range(100):
        random = np.random.default_rng(seed)
        ends = np.arange(1, bursts + 1)[:, None] * 200 * MILLISECOND
        times = np.sort((ends + random.uniform(0, 2 * MILLISECOND, (bursts, 4))).reshape(-1))
        readings = random.normal(0, 1_500, len(times)) + times * random.uniform(-1e-5, 1e-5)

        assert change_points(times, readings) == []


@pytest.mark.parametrize("count", [20, 30, 60, 300])
@pytest.mark.parametrize("size", [-2 * MILLISECOND, 200_000])
def test_a_jump_is_found_where_it_is(count: int, size: int) -> None:
    at = count // 3
    found = 0
    for seed in range(40):
        times, readings = line(count, seed)
        changes = change_points(times, readings + np.where(np.arange(count) >= at, size, 0))
        found += [change.position for change in changes] == [at] and abs(changes[0].size - size) < 50_000
    # Late readings on either side of the jump hide it now and then.
    assert found >= 36


def test_several_jumps_are_in_order() -> None:
    times = np.arange(200.0) * SECOND
    readings = np.where(times >= 50 * SECOND, 3e6, 0) - np.where(times >= 130 * SECOND, 5e6, 0)
    assert change_points(times, readings) == [Change(50, 3e6), Change(130, -5e6)]
