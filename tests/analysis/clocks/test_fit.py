"""Rows that clocks are fitted to: what is left of very many does not depend on how they were parted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.clocks.fit import Thinned, least_power, multiples
from commtrace.trace.spans import Spans


def rows(seqs: list[int]) -> Spans:
    return Spans.from_rows([{"kind": "collective", "seq": seq} for seq in seqs], [])


def test_few_rows_all_stay() -> None:
    assert least_power(np.arange(9), 10) == 0


def test_of_many_rows_every_second_fourth_or_eighth_stays() -> None:
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
