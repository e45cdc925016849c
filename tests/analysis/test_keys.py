from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.keys import find_rows, grouped, pack, sort_groups

anything = st.integers(-(2**63), 2**63 - 1)
small = st.integers(-3, 3)


@given(st.lists(st.tuples(st.one_of(small, anything), small, st.one_of(small, anything)), min_size=1, max_size=30))
def test_keys_are_equal_and_sort_as_the_rows_do(rows: list[tuple[int, int, int]]) -> None:
    keys = pack([np.array(column, np.int64) for column in zip(*rows, strict=True)]).tolist()
    assert [a == b for a in keys for b in keys] == [a == b for a in rows for b in rows]
    assert [a < b for a in keys for b in keys] == [a < b for a in rows for b in rows]


@pytest.mark.parametrize("largest", [7, 2**40])
def test_groups_are_brought_together_in_order(largest: int) -> None:
    order, begins = sort_groups(np.array([largest, 3, largest, 0, 3]))
    assert order.tolist() == [3, 1, 4, 0, 2]
    assert begins.tolist() == [0, 1, 3]


@given(st.lists(st.integers(0, 5)))
def test_keys_are_numbered_in_their_order(keys: list[int]) -> None:
    first, number = grouped(np.array(keys, np.int64))

    assert [keys[at] for at in first] == sorted(set(keys))
    assert [keys.index(keys[at]) for at in first] == first.tolist()
    assert [keys[first[at]] for at in number] == keys


@given(st.lists(st.tuples(small, small), max_size=8), st.lists(st.tuples(small, small), max_size=8))
def test_rows_are_found_among_the_known_ones(known: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    columns, sought = (list(np.array(rows, np.int64).reshape(-1, 2).T) for rows in (known, wanted))

    assert find_rows(columns, sought).tolist() == [known.index(row) if row in known else -1 for row in wanted]
