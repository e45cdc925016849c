"""capture/model/late_numbers.py: the steps of a process that joins others which have trained before."""

from __future__ import annotations

import numpy as np

from commtrace.capture.model.late_numbers import LateNumbers
from commtrace.trace.spans import RowBatch, Spans
from tests.capture.recording import Recording
from tests.trace.rows import row


def batch_of(*steps: int) -> RowBatch:
    """The first half of the rows as tuples, the others as columns."""
    rows = [row(step=step) for step in steps]
    half = len(rows) // 2
    names: list[str] = []
    return RowBatch(rows[:half], Spans.from_tuples(rows[half:], names), names)


def renumbered(late: LateNumbers, *steps: int) -> list[int]:
    return [row.step for row in late.renumber(batch_of(*steps))]


def test_steps_that_had_begun_get_the_numbers_that_they_should_have_had() -> None:
    late = LateNumbers(10)

    assert renumbered(late, -1, 0, 1, -1, 2, 3) == [-1, 10, 11, -1, 12, 13]
    assert late.next(4) == 14
    assert renumbered(late, 3, 14, 2, 14) == [13, 14, 12, 14]


def test_later_steps_follow_each_other() -> None:
    late = LateNumbers(3)

    assert [late.next(2), late.next(6), late.next(7)] == [5, 6, 7]
    assert renumbered(late, 0, 1, 5, 6) == [3, 4, 5, 6]


def test_columns_keep_their_type() -> None:
    assert LateNumbers(1).renumber(batch_of(0, 1, 2, 3)).spans.step.dtype == np.int32


def test_a_tracer_counts_on_from_the_steps_of_its_world(recording: Recording) -> None:
    tracer = recording.tracer
    tracer.begin_step()
    assert tracer.count_from(7) is not None
    tracer.begin_step()
    tracer.begin_step()

    assert (tracer.latest_step, tracer.topology()[1]["first_step"]) == (9, 7)


def test_a_tracer_that_has_begun_no_step_begins_with_the_first_of_its_world(recording: Recording) -> None:
    tracer = recording.tracer
    assert tracer.count_from(7) is not None
    tracer.begin_step()

    assert (tracer.latest_step, tracer.topology()[1]["first_step"]) == (7, 7)


def test_numbers_of_the_program_stay(recording: Recording) -> None:
    tracer = recording.tracer
    tracer.begin_step(3)

    assert tracer.count_from(7) is None
    tracer.begin_step(4)
    assert tracer.latest_step == 4
