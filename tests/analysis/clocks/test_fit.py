"""Rows that clocks are fitted to: what is left of very many does not depend on how they were parted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.clocks.fit import NormalEquations, Thinned, least_power, multiples
from commtrace.trace.spans import Spans


def rows(seqs: list[int]) -> Spans:
    return Spans.from_rows([{"kind": "collective", "seq": seq} for seq in seqs], [])


def test_few_rows_all_stay() -> None:
    assert least_power(np.arange(9), 10) == 0


def test_many_rows_are_thinned_to_every_second_fourth_or_eighth() -> None:
    assert least_power(np.arange(10), 10) == 1
    assert least_power(np.arange(100), 13) == 4
    assert np.flatnonzero(multiples(np.arange(10), 2)).tolist() == [0, 4, 8]


def test_rows_without_a_number_go_first() -> None:
    assert multiples(np.array([-1, 0, 1]), 0).tolist() == [True, True, True]
    assert multiples(np.array([-1, 0, 1]), 1).tolist() == [False, True, False]


@given(seqs=st.lists(st.integers(0, 200), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_parts_leave_what_the_whole_leaves(seqs: list[int], cuts: list[int]) -> None:
    thinned = Thinned.none()
    for first, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(seqs)], strict=True):
        thinned = thinned.plus(rows(seqs[first:end]), fewer_than=8)

    power = least_power(np.array(seqs, np.int64), 8)
    assert thinned.power == power
    assert thinned.spans.seq.tolist() == [seq for seq in seqs if seq % 2**power == 0]


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_equations_of_a_chain_of_clocks_are_solved_whatever_the_weights(weights: list[float], seed: int) -> None:
    # Each clock is compared with the next one, at two instants; only clock 0 is held.
    size, random = 2 * (len(weights) + 1), np.random.default_rng(seed)
    matrix = np.zeros((size, size))
    for clock, weight in enumerate(weights):
        for at in (0.1, 0.9):
            difference = np.zeros(size)
            difference[2 * clock : 2 * clock + 4] = 1, at, -1, -at
            matrix += weight * np.outer(difference, difference)
    matrix[np.arange(1, size, 2), np.arange(1, size, 2)] += 0.01
    matrix[:2], matrix[:, :2], matrix[[0, 1], [0, 1]] = 0, 0, 1
    expected = np.append([0, 0], random.normal(scale=1e6, size=size - 2))
    clock_of = np.arange(size) // 2
    row, column = np.nonzero((matrix != 0) | (clock_of[:, None] == clock_of))
    equations = NormalEquations(row, column, matrix[row, column], matrix @ expected, 0.01)
    np.testing.assert_array_equal(equations.dense(), matrix)
    np.testing.assert_allclose(equations.solve(np.zeros(size)), np.linalg.solve(matrix, matrix @ expected), atol=1e-3)
