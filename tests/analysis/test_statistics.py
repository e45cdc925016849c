"""Errors of means, by hand; medians by group, with and without the own value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.statistics import (
    Distribution,
    error_of_means,
    exact_of_each,
    grouped_median,
    leave_one_out_median,
)

GROUPS_AND_VALUES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=30)


def test_means_of_a_group_scatter_alike() -> None:
    error = error_of_means(np.array([1.0, 7.0, 9.0]), np.array([1, 4, 9]), np.array([5, 5, 2]))

    # The first two have a variance of 4, as their group has; the third one is a group of its own.
    assert error.tolist() == [2.0, 1.0, 1.0]


def test_a_mean_of_nothing_has_an_error() -> None:
    assert error_of_means(np.array([4.0]), np.array([0]), np.array([0])).tolist() == [2.0]


@given(GROUPS_AND_VALUES)
def test_grouped_median(rows: list[tuple[int, int]]) -> None:
    group, value = np.array(rows, np.int64).reshape(-1, 2).T
    expected = [np.median(value[group == one]) if (group == one).any() else np.nan for one in range(4)]

    np.testing.assert_array_equal(grouped_median(group, value.astype(np.float64), 4), expected)


@given(GROUPS_AND_VALUES, st.sampled_from([1, 10**9, 2**60]))
def test_grouped_median_of_integers(rows: list[tuple[int, int]], spread: int) -> None:
    """Also of values that are far apart, in groups of a smaller type."""
    group, value = np.array(rows, np.int64).reshape(-1, 2).T
    value = value % 4 * spread - spread
    expected = grouped_median(group, value.astype(np.float64), 4)

    np.testing.assert_allclose(grouped_median(group.astype(np.int32), value, 4), expected, rtol=1e-15)


@given(GROUPS_AND_VALUES)
def test_leave_one_out_median(rows: list[tuple[int, int]]) -> None:
    group, value = np.array(rows, np.int64).reshape(-1, 2).T
    expected = []
    for row in range(len(rows)):
        others = (group == group[row]) & (np.arange(len(rows)) != row)
        expected.append(np.median(value[others]) if others.any() else np.nan)

    np.testing.assert_array_equal(leave_one_out_median(group, value.astype(np.float64)), expected)


VALUES = st.lists(st.integers(0, 2**52), min_size=1, max_size=40)


def of(*values: int) -> Distribution[int]:
    return Distribution.of(np.array(values, np.int64))


def test_few_values_are_told_exactly() -> None:
    found = of(40, 10, 30) + of(20)

    assert [found.nearest_rank(percent) for percent in (1, 50, 51, 99, 100)] == [10, 20, 30, 40, 40]
    assert (len(found), found.median(), found.maximum, found.is_exact) == (4, 25.0, 40, True)


def test_statistics_of_no_values_are_absent() -> None:
    assert of().nearest_rank(50) is None
    assert of().round().median() is None
    assert len(of() + of()) == 0


def test_values_are_rounded_to_the_middle_of_what_their_leading_bits_leave_open() -> None:
    assert of(0, 1, 2_047, 2_048, 2_049, 2_050, 4_096, 4_099).round().rounded.tolist() == [
        0, 1, 2_047, 2_049, 2_051, 4_098,
    ]  # fmt: skip


@given(values=VALUES, percent=st.integers(1, 100))
def test_rounded_quantiles_are_wrong_by_half_a_thousandth_at_most(values: list[int], percent: int) -> None:
    exact, rounded = of(*values), of(*values).round()
    estimate, known = rounded.nearest_rank(percent), exact.nearest_rank(percent)

    assert estimate is not None
    assert known is not None
    assert abs(estimate - known) <= known / 2_048
    assert (len(rounded), rounded.maximum) == (len(exact), exact.maximum)


@given(values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_bandwidths_have_a_median_too(values: list[float]) -> None:
    exact = Distribution.of(np.array(values))
    estimate = exact.round().median()

    assert exact.median() == float(np.median(values))
    assert estimate == pytest.approx(float(np.median(values)), rel=1 / 2_048)


@given(first=VALUES, second=VALUES)
def test_it_does_not_matter_which_part_was_rounded_when(first: list[int], second: list[int]) -> None:
    one, other = of(*first), of(*second)
    sums = [(one + other).round(), one.round() + other, one + other.round(), other.round() + one.round()]

    for found in sums[1:]:
        assert found.rounded.tolist() == sums[0].rounded.tolist()
        assert found.counts.tolist() == sums[0].counts.tolist()
        assert found.maximum == sums[0].maximum


@pytest.mark.parametrize("count", [1, 1_000])
def test_the_memory_of_very_many_values_does_not_grow(count: int) -> None:
    values = np.arange(1_000_000, 1_100_000)
    found: Distribution[int] = Distribution.of(np.tile(values, 10)).round()
    for _ in range(min(count, 5)):
        found += Distribution.of(values)

    assert len(found.rounded) <= 2 * 2_048


def test_exact_values_stand_for_their_group_and_bounds_where_there_are_no_others() -> None:
    exact, group = np.array([True, False, False, False, True]), np.array([1, 1, 2, 2, 3])

    assert exact_of_each(exact, group).tolist() == [True, False, True, True, True]
