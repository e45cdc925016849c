"""Since when a rank is in a step: what it does between two steps holds up the second one."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.replay.step_bounds import StepBounds
from commtrace.analysis.steps.work_begins import work_begins
from commtrace.trace import schema
from tests.factory import Row, collective, group, make_run, span, stall

WORLD = group("dp", 0, 1)


def bounds_of(rows: dict[int, list[Row]], steps: tuple[int, ...] = (0, 1)) -> tuple[list[list[int]], list[list[int]]]:
    found = StepBounds.of(make_run(rows, [WORLD]), np.array(steps))
    return found.start.tolist(), found.end.tolist()


def steps(*bounds: tuple[int, int]) -> list[Row]:
    return [span("step", start, end, step=step) for step, (start, end) in enumerate(bounds)]


def test_steps_that_follow_each_other_are_as_recorded() -> None:
    assert bounds_of({0: steps((0, 10), (10, 20)), 1: steps((1, 12), (12, 21))}) == (
        [[0, 10], [1, 12]],
        [[10, 20], [12, 21]],
    )


def test_a_rank_that_comes_late_begins_with_the_first_one() -> None:
    (_, late), (_, first) = bounds_of({0: steps((0, 10), (50, 60)), 1: steps((0, 12), (12, 61))})[0]

    assert (late, first) == (12, 12)


def test_a_rank_that_comes_late_begins_no_earlier_than_its_last_step_ended() -> None:
    assert bounds_of({0: steps((0, 14), (50, 60)), 1: steps((0, 12), (12, 61))})[0][0] == [0, 14]


def test_a_rank_that_comes_late_begins_no_earlier_than_it_last_waited_for_others() -> None:
    barrier = collective("barrier", WORLD, 0, 15, 30, id=1)
    rows = [*steps((0, 10), (50, 60)), barrier, stall(barrier, 15, 30)]

    assert bounds_of({0: rows, 1: steps((0, 12), (12, 61))})[0][0] == [0, 30]


def test_no_rank_is_late_when_all_pause_between_steps() -> None:
    assert bounds_of({0: steps((0, 10), (40, 60)), 1: steps((0, 12), (40, 61))})[0] == [[0, 40], [0, 40]]


def test_the_time_before_a_step_is_unknown_when_the_step_before_was_not_recorded() -> None:
    rows = {rank: [span("step", 0, 10, step=0), span("step", at, 90, step=2)] for rank, at in ((0, 50), (1, 30))}

    assert bounds_of(rows, (0, 2))[0] == [[0, 50], [0, 30]]


def test_steps_in_another_order_than_their_numbers() -> None:
    with pytest.raises(ReplayError, match="not recorded in the order of their numbers"):
        bounds_of({0: [span("step", 10, 20, step=0), span("step", 0, 10, step=1)]})


def test_the_time_between_steps_is_none_of_a_replay_and_has_its_length() -> None:
    rows = [*steps((0, 10), (10, 60)), span("between", 10, 40, step=1)]
    late = [*steps((0, 10), (10, 60)), span("between", 10, 50, step=1)]
    bounds = StepBounds.of(make_run({0: rows, 1: late}), np.array([0, 1]))

    assert (bounds.start.tolist(), bounds.end.tolist()) == ([[0, 40], [0, 40]], [[10, 60], [10, 60]])
    assert bounds.between_ns.tolist() == [[0, 30], [0, 30]]  # the late one is in the step with the first one


def test_all_rows_between_two_steps_are_before_its_work_and_those_of_other_steps_are_not() -> None:
    rows = [*steps((0, 10), (10, 60), (60, 90)), span("between", 10, 20, step=1), span("between", 20, 35, step=1)]
    spans = make_run({0: rows}).ranks[0].spans

    assert work_begins(spans, np.flatnonzero(spans.kind == schema.STEP)).tolist() == [0, 35, 60]
