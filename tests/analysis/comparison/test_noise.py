"""A difference counts when it is larger than chance would make it."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.comparison.noise import FEWEST_SAMPLES, MeasuredChange, change_of_run, change_of_runs


def test_one_run_of_each_side_is_compared_by_its_steps() -> None:
    random = np.random.default_rng(3)
    before, after = random.normal(100, 5, 40), random.normal(106, 5, 40)

    assert change_of_runs([before], [after]) == change_of_run(before, after)
    assert change_of_runs([np.empty(0), before], [after]) == change_of_run(before, after)


def test_runs_that_differ_among_themselves_are_the_noise() -> None:
    """Steps that hardly scatter, in jobs that got other nodes: 100, 110 against 108 and 118 ms."""
    steps = np.linspace(-0.1, 0.1, 21)
    before, after = [100 + steps, 110 + steps], [108 + steps, 118 + steps]

    single, several = change_of_runs(before[:1], after[:1]), change_of_runs(before, after)

    assert single.is_real, "of one run each nobody can know"
    assert (several.before, several.after, several.is_real) == (105.0, 113.0, False)
    # 4.30 · sqrt((2·25 + 2·25) / 2 · (1/2 + 1/2)), Student's t of two degrees of freedom
    assert several.noise == pytest.approx(4.30 * np.sqrt(50))


def test_runs_that_agree_by_luck_leave_the_noise_of_their_steps() -> None:
    random = np.random.default_rng(5)
    steps = random.normal(100, 5, 41)
    change = change_of_runs([steps, steps[::-1]], [steps])

    assert change.noise is not None
    assert change.noise > 0.5


@pytest.mark.parametrize("runs", [2, 3, pytest.param(6, marks=pytest.mark.thorough)])
def test_chance_between_several_runs_is_called_real_about_once_in_twenty(runs: int) -> None:
    random = np.random.default_rng(runs)

    def side() -> list[np.ndarray]:
        return [random.normal(random.normal(100, 4), 1, 15) for _ in range(runs)]

    real = sum(change_of_runs(side(), side()).is_real for _ in range(300))

    assert real <= 300 * 0.09


def test_a_run_of_few_steps_makes_its_side_unknown() -> None:
    change = change_of_runs([np.full(9, 1), np.full(FEWEST_SAMPLES - 1, 3)], [np.full(9, 2)])

    assert (change.before, change.after, change.noise, change.is_real) == (2.0, 2.0, None, False)


def test_equal_series_differ_by_nothing() -> None:
    change = change_of_run(np.array([5, 5, 5, 5, 5, 5]), np.array([5, 5, 5, 5, 5, 5]))
    assert change == MeasuredChange(5.0, 5.0, 0.0)
    assert (change.difference, change.relative, change.is_real) == (0.0, 0.0, False)


def test_a_shift_of_constant_series_is_real() -> None:
    change = change_of_run(np.full(6, 100), np.full(6, 110))
    assert (change.difference, change.noise) == (10.0, 0.0)
    assert change.relative == pytest.approx(0.1)
    assert change.is_real


def test_few_samples_have_no_known_noise_and_no_real_change() -> None:
    change = change_of_run(np.full(FEWEST_SAMPLES - 1, 1), np.full(100, 99))
    assert (change.before, change.after, change.noise, change.is_real) == (1.0, 99.0, None, False)


def test_a_series_without_samples_has_no_median() -> None:
    change = change_of_run(np.empty(0), np.full(9, 3))
    assert (change.before, change.after, change.difference, change.relative) == (None, 3.0, None, None)
    assert not change.is_real


def test_a_change_from_nothing_has_no_relative_size() -> None:
    change = change_of_run(np.zeros(9), np.full(9, 3))
    assert (change.difference, change.relative, change.is_real) == (3.0, None, True)


def test_chance_is_called_real_about_once_in_twenty() -> None:
    random = np.random.default_rng(1)
    series = random.normal(100, 5, (200, 2, 40))
    real = sum(change_of_run(before, after).is_real for before, after in series)
    assert real <= 24  # 12 % of 200; the nominal 5 % is 10


def test_a_shift_of_three_standard_errors_is_found() -> None:
    random = np.random.default_rng(2)
    found = sum(change_of_run(random.normal(100, 5, 40), random.normal(106, 5, 40)).is_real for _ in range(50))
    assert found >= 45


def test_a_slow_drift_widens_the_noise() -> None:
    """Samples that follow each other are alike: fewer of them are independent than there are."""
    random = np.random.default_rng(3)
    wandering = np.repeat(random.normal(100, 5, 40), 20)
    shuffled = random.permutation(wandering)
    noise = [change_of_run(series, series).noise for series in (wandering, shuffled)]
    assert noise[0] is not None
    assert noise[1] is not None
    assert noise[0] > 1.5 * noise[1]


def test_a_few_slow_steps_change_the_mean_and_not_the_median() -> None:
    random = np.random.default_rng(5)
    before, after = random.normal(19.0, 0.5, 196), random.normal(19.0, 0.5, 196)
    after[random.choice(196, 14, replace=False)] += 100.0

    assert not change_of_run(before, after).is_real
    change = change_of_run(before, after, np.mean)
    assert change.is_real
    assert change.difference == pytest.approx(14 * 100 / 196, abs=0.2)


def test_one_slow_step_is_no_change_of_the_mean() -> None:
    random = np.random.default_rng(6)
    before, after = random.normal(19.0, 0.5, 196), random.normal(19.0, 0.5, 196)
    after[77] += 1_000.0

    assert not change_of_run(before, after, np.mean).is_real
