"""In which steps rows lie that carry the number of one, and rows that do not."""

from __future__ import annotations

import numpy as np

from commtrace.analysis.steps.attempts import earlier_number
from commtrace.analysis.windows.step_axis import StepAxis
from commtrace.trace import schema
from commtrace.trace.spans import Spans
from tests.factory import span

AXIS = StepAxis(np.array([4, 5, 7]), np.array([100, 200, 300]), np.array([190, 290, 400]))


def spans(*rows: tuple[int, int, int]) -> Spans:
    """Rows of (start, end, step)."""
    return Spans.from_rows([span("user", start, end, step=step) for start, end, step in rows], [])


def test_steps_are_read_in_the_order_in_which_they_began() -> None:
    table = Spans.from_rows([span("forward", 1, 2, step=0), span("step", 5, 9, step=1), span("step", 0, 5, step=0)], [])
    axis = StepAxis.of(table)

    assert [column.tolist() for column in axis] == [[0, 1], [0, 5], [5, 9]]


def test_steps_that_are_read_part_by_part_are_the_same() -> None:
    parts = spans((20, 30, 7), (0, 10, 5)), spans((10, 19, 6))
    axis = StepAxis.none()
    for part in parts:
        axis = axis.plus(StepAxis.of(part.replace(kind=np.full(len(part), schema.STEP, np.int8))))

    assert [column.tolist() for column in axis] == [[5, 6, 7], [0, 10, 20], [10, 19, 30]]


def test_a_row_belongs_to_its_step_or_to_the_one_that_began_last() -> None:
    reach = AXIS.reach(spans((250, 260, 5), (295, 299, -1), (300, 310, -1), (20, 30, -1), (295, 305, 4), (410, 420, 8)))

    assert reach.place.tolist() == [1, 1, 2, -1, 0, 2]


def test_a_row_of_a_repeated_step_belongs_to_the_attempt_that_had_begun() -> None:
    axis = StepAxis(np.array([0, 1, 0, 1]), np.array([0, 10, 20, 30]), np.array([9, 19, 29, 39]))

    assert axis.reach(spans((1, 2, 0), (25, 26, 0), (12, 13, 1), (31, 33, 1), (-5, -1, 1))).place.tolist() == [
        0, 2, 1, 3, 1,
    ]  # fmt: skip


def test_a_row_touches_the_steps_in_which_it_lasts() -> None:
    reach = AXIS.reach(spans((120, 350, 4), (150, 200, 4), (150, 201, 4), (200, 200, 5), (20, 900, -1)))

    assert list(zip(reach.first.tolist(), reach.last.tolist(), strict=True)) == [
        (0, 2),
        (0, 0),
        (0, 1),
        (1, 1),
        (-1, 2),
    ]


def test_steps_that_overlap_intervals() -> None:
    first, last = AXIS.overlapping(np.array([190, 189, 0, 400]), np.array([200, 201, 900, 500]))

    assert list(zip(first.tolist(), last.tolist(), strict=True)) == [(1, 0), (0, 1), (0, 2), (3, 2)]


def test_the_last_steps_are_split_off() -> None:
    before, last = AXIS.split(-2)

    assert (before.number.tolist(), last.number.tolist()) == ([4], [5, 7])


def test_numbers_and_times_bound_the_rows_of_a_range_of_steps() -> None:
    least, most, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max, np.iinfo(np.int32).max

    assert (AXIS.numbers(1, 1), AXIS.times(1, 1)) == ((5, 5), (200, 299))
    assert (AXIS.numbers(-1, 0), AXIS.times(-1, 0)) == ((0, 4), (least, 199))
    assert (AXIS.numbers(1, 5), AXIS.times(1, 5)) == ((5, highest), (200, most))
    assert (AXIS.numbers(0, 1), AXIS.times(0, 1)) == ((4, 5), (100, 299))
    none = StepAxis.none()
    assert (none.numbers(-1, -1), none.times(-1, -1)) == ((0, highest), (least, most))


def test_rows_of_an_earlier_attempt_carry_the_number_of_their_step() -> None:
    axis = StepAxis(np.array([4, *earlier_number(np.array([5])), 5, 6]), *np.array([[0, 10, 20, 30], [9, 19, 29, 39]]))

    assert axis.numbers(0, 1) == (4, 5)
