"""Errors of means, by hand."""

from __future__ import annotations

import numpy as np

from commtrace.analysis.statistics import error_of_means


def test_means_of_a_group_scatter_alike() -> None:
    error = error_of_means(np.array([1.0, 7.0, 9.0]), np.array([1, 4, 9]), np.array([5, 5, 2]))

    # The first two have a variance of 4, as their group has; the third one is a group of its own.
    assert error.tolist() == [2.0, 1.0, 1.0]


def test_a_mean_of_nothing_has_an_error() -> None:
    assert error_of_means(np.array([4.0]), np.array([0]), np.array([0])).tolist() == [2.0]
