"""Errors of means, by hand; medians by group, with and without the own value."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.statistics import error_of_means, grouped_median, leave_one_out_median

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


@given(GROUPS_AND_VALUES)
def test_leave_one_out_median(rows: list[tuple[int, int]]) -> None:
    group, value = np.array(rows, np.int64).reshape(-1, 2).T
    expected = []
    for row in range(len(rows)):
        others = (group == group[row]) & (np.arange(len(rows)) != row)
        expected.append(np.median(value[others]) if others.any() else np.nan)

    np.testing.assert_array_equal(leave_one_out_median(group, value.astype(np.float64)), expected)
