"""Medians by group, with and without the own value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.analysis.replay.peers import compare_with_peers, grouped_median, leave_one_out_median
from commtrace.analysis.replay.segments import BETWEEN, Segments

GROUPS_AND_VALUES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=30)


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


def test_work_of_one_step_in_many_is_a_small_part_of_each() -> None:
    """Ranks 0 and 1 do the same in every step; in the first one rank 1 does something else for 900 ns."""
    every = [(rank, step, 0, 100) for rank in (0, 1) for step in range(9)]
    once = [(rank, 0, 1, 10 + 890 * rank) for rank in (0, 1)]
    rank, step, ordinal, work = (np.array(column, np.int64) for column in zip(*every, *once, strict=True))
    zeros = np.zeros(len(rank), np.int64)
    columns = dict.fromkeys(Segments.__dataclass_fields__, zeros)
    segments = Segments(**{**columns, "rank": rank, "step": step, "ordinal": ordinal, "work_ns": work})

    compared = compare_with_peers(segments, work, np.ones(len(rank), bool))

    assert compared.excess_ns()[compared.rank == 1].sum() == pytest.approx(890 / 9)


def test_a_pause_between_phases_that_only_one_rank_of_a_stage_makes_is_none_on_the_others() -> None:
    """Ranks 0 and 1 do the same; rank 1 pauses for 30 ns before it. Rank 2 is another stage."""
    rows = [(rank, step, rank == 2, 1, 100) for rank in (0, 1, 2) for step in range(4)]
    rows += [(1, step, 0, BETWEEN + 1, 30) for step in range(4)]
    rank, step, stage, kind, work = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    columns = dict.fromkeys(Segments.__dataclass_fields__, np.zeros(len(rank), np.int64))
    told = {"rank": rank, "step": step, "stage": stage, "kind": kind, "work_ns": work}
    segments = Segments(**{**columns, **told})

    compared = compare_with_peers(segments, work, np.ones(len(rank), bool))

    assert compared.from_typical_ns() == {0: pytest.approx(-15), 1: pytest.approx(15), 2: 0.0}
    assert compared.excess_ns()[compared.rank == 1].sum() == pytest.approx(30)
    assert compared.ratio[kind > BETWEEN].tolist() == [0.0] * 4
