"""The ideal bubble and what is in flight, by hand."""

from __future__ import annotations

import pytest

from commtrace.planning.layout import Layout
from commtrace.planning.schedule import chunks_in_flight, ideal_bubble


@pytest.mark.parametrize(
    ("layout", "fraction", "ratio"),
    [
        (Layout(microbatches=8), 0, 0),
        (Layout(pp=4, microbatches=8), 3 / 11, 3 / 8),
        (Layout(pp=4, microbatches=8, chunks=2), 3 / 19, 3 / 16),
    ],
)
def test_both_fractions_of_the_bubble(layout: Layout, fraction: float, ratio: float) -> None:
    assert ideal_bubble(layout) == (fraction, ratio)


@pytest.mark.parametrize(
    ("layout", "in_flight"),
    [
        (Layout(pp=4, microbatches=8), [4, 3, 2, 1]),
        (Layout(pp=4, microbatches=2), [2, 2, 2, 1]),
        (Layout(pp=4, microbatches=8, chunks=2), [11, 9, 7, 5]),
        (Layout(pp=2, microbatches=2, chunks=2), [4, 3]),
    ],
)
def test_forwards_that_wait_for_their_backward(layout: Layout, in_flight: list[int]) -> None:
    assert [chunks_in_flight(layout, stage) for stage in range(layout.pp)] == in_flight
