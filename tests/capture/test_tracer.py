"""Steps, nested phases, exceptions, and the window of steps that is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from commtrace.capture.tracer import Tracer
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates
from commtrace.trace.selection import StepRange
from tests.capture.recording import Recording


class Ticks:
    """A clock that moves by one at each mark."""

    timing = schema.HOST_TIMING

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def resolve(self, mark: Any) -> int:
        return int(mark)

    def is_capturing(self) -> bool:
        return False

    def refresh(self) -> None:
        return None


@pytest.fixture
def ticking() -> Recording:
    return Recording(Ticks())


def phases(recording: Recording) -> list[tuple[str, int, int, int]]:
    return [(row.name, row.step, row.start, row.end) for row in recording.rows()]


def test_a_step_ends_where_the_next_one_begins(ticking: Recording) -> None:
    tracer = ticking.tracer
    for _ in range(3):
        tracer.begin_step()
    tracer.end_step()

    assert phases(ticking) == [("step", 0, 1, 2), ("step", 1, 2, 3), ("step", 2, 3, 4)]


def test_steps_can_be_numbered_by_the_caller(ticking: Recording) -> None:
    ticking.tracer.begin_step(100)
    ticking.tracer.begin_step()
    ticking.tracer.end_step()

    assert [step for _, step, _, _ in phases(ticking)] == [100, 101]


def test_numbers_that_begin_again_are_counted_on(ticking: Recording) -> None:
    tracer = ticking.tracer
    for number in (5, 6, 5, 6, 5):
        tracer.begin_step(number, is_users=True)
    tracer.end_step()

    assert [step for _, step, _, _ in phases(ticking)] == [5, 6, 7, 8, 9]
    (message,) = tracer.guard.take_messages()
    assert message.startswith("steps are numbered again from 5 after 6;")
    assert message.endswith("goes on with 7")


def test_a_step_lasts_from_the_end_of_the_one_before_and_work_between_them_has_no_number(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.end_step()
    tracer.leave(tracer.enter(schema.DATA, "data"))
    tracer.begin_step()
    tracer.end_step()

    assert phases(ticking) == [
        ("step", 0, 1, 2), ("data", -1, 3, 4), ("between steps", 1, 2, 5), ("step", 1, 2, 6),
    ]  # fmt: skip


def test_a_step_after_one_that_was_not_chosen_lasts_from_its_end_too() -> None:
    recording = Recording(Ticks(), steps="1:9:2")
    for number in range(4):
        recording.tracer.begin_step(number, is_users=True)
        recording.tracer.end_step()

    assert phases(recording) == [
        ("between steps", 1, 1, 2), ("step", 1, 1, 3), ("between steps", 3, 4, 5), ("step", 3, 4, 6),
    ]  # fmt: skip


def test_the_first_step_of_a_training_begins_with_it(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.end_step(is_last=True)
    tracer.clock.mark()
    tracer.begin_step()
    tracer.restart_step(is_first=True)
    tracer.end_step()

    assert phases(ticking) == [("step", 0, 1, 2), ("step", 1, 5, 6)]


def test_what_comes_before_the_work_of_a_step_is_between_it_and_the_one_before(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.begin_step()
    tracer.leave_step()
    tracer.restart_step()
    tracer.return_to_step()
    tracer.restart_step()
    tracer.end_step()

    assert phases(ticking) == [
        ("step", 0, 1, 2), ("between steps", 1, 2, 3), ("between steps", 1, 3, 4), ("step", 1, 2, 5),
    ]  # fmt: skip


def test_a_step_that_is_dropped_leaves_its_time_to_the_next_one(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.begin_step()
    tracer.discard_step(frees_number=True)
    tracer.begin_step()
    tracer.end_step()

    assert phases(ticking) == [("step", 0, 1, 2), ("between steps", 1, 2, 3), ("step", 1, 2, 4)]


def test_the_last_step_ends_with_the_last_phase_in_it(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.leave(tracer.enter(schema.FORWARD, "forward"))
    for _ in range(10):
        tracer.clock.mark()  # a long time passes until the process ends
    tracer.finish()

    assert phases(ticking) == [("forward", 0, 2, 3), ("step", 0, 1, 3)]


def test_work_that_is_no_training_ends_the_step_before_it(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.leave(tracer.enter(schema.OPTIMIZER, "Adam"))
    tracer.end_iteration()
    tracer.leave(tracer.enter(schema.EVALUATION, "evaluation"))
    tracer.begin_step()
    tracer.end_iteration()  # nothing was done in it yet
    tracer.leave(tracer.enter(schema.OPTIMIZER, "Adam"))
    tracer.finish()

    assert phases(ticking) == [
        ("Adam", 0, 2, 3), ("step", 0, 1, 4), ("evaluation", -1, 5, 6), ("between steps", 1, 4, 7), ("Adam", 1, 8, 9),
        ("step", 1, 4, 9),
    ]  # fmt: skip


def test_a_step_that_the_script_marks_is_ended_by_nobody_else(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step(3, is_users=True)
    tracer.leave(tracer.enter(schema.OPTIMIZER, "Adam"))
    tracer.end_iteration()
    tracer.end_step()

    assert phases(ticking) == [("Adam", 3, 2, 3), ("step", 3, 1, 4)]


def test_a_step_without_anything_in_it_is_not_invented(ticking: Recording) -> None:
    ticking.tracer.begin_step()
    ticking.tracer.finish()

    assert phases(ticking) == []


def test_work_that_ends_outside_of_a_step_is_in_none(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.leave(tracer.enter(schema.CHECKPOINT, "load"))

    assert phases(ticking) == [("load", -1, 1, 2)]


def test_inner_phases_take_their_place_from_the_outer_one(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step(4)
    backward = tracer.enter(schema.BACKWARD, "backward", microbatch=3, chunk=1, stage=2)
    recompute = tracer.enter(schema.RECOMPUTE, "recompute")
    assert tracer.coordinates == Coordinates(4, 3, 1, 2)
    tracer.leave(recompute)
    tracer.leave(backward)

    assert tracer.coordinates == Coordinates(4)
    rows = ticking.rows(schema.RECOMPUTE, schema.BACKWARD)
    assert [(row.step, row.microbatch, row.chunk, row.stage) for row in rows] == [(4, 3, 1, 2)] * 2


def test_an_exception_in_a_phase_leaves_no_trace_in_the_coordinates(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    with pytest.raises(ZeroDivisionError):
        run(tracer)

    assert tracer.coordinates == Coordinates(0)
    assert [name for name, *_ in phases(ticking)] == ["inner", "outer"]


def run(tracer: Tracer) -> None:
    outer = tracer.enter(schema.FORWARD, "outer", microbatch=1)
    try:
        inner = tracer.enter(schema.MODULE, "inner")
        try:
            raise ZeroDivisionError
        finally:
            tracer.leave(inner)
    finally:
        tracer.leave(outer)


def test_a_step_that_begins_inside_a_phase_stays(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step(0)
    fit = tracer.enter(schema.USER, "fit")
    tracer.begin_step(1)
    tracer.leave(fit)

    assert tracer.coordinates.step == 1
    assert phases(ticking) == [("step", 0, 1, 3), ("fit", 0, 2, 4)]


@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        (schema.FORWARD, schema.COMPUTE),
        (schema.OPTIMIZER, schema.COMPUTE),
        (schema.DATA, schema.HOST),
        (schema.CHECKPOINT, schema.HOST),
        (schema.EVALUATION, schema.HOST),
    ],
)
def test_the_lane_follows_from_the_kind(ticking: Recording, kind: int, lane: int) -> None:
    ticking.tracer.leave(ticking.tracer.enter(kind, "phase"))

    assert [row.lane for row in ticking.rows()] == [lane]


def test_only_steps_of_the_window_are_recorded() -> None:
    recording = Recording(Ticks(), steps="1:6:2")
    tracer = recording.tracer
    for step in range(8):
        tracer.begin_step(step)
        tracer.leave(tracer.enter(schema.FORWARD, "forward"))
    tracer.finish()

    assert [(name, step) for name, step, _, _ in phases(recording)] == [
        ("forward", 1), ("step", 1), ("forward", 3), ("step", 3), ("forward", 5), ("step", 5),
    ]  # fmt: skip


def test_work_after_the_last_step_of_the_window_is_not_recorded() -> None:
    recording = Recording(Ticks(), steps="0:1")
    tracer = recording.tracer
    tracer.begin_step()
    tracer.end_step()
    tracer.leave(tracer.enter(schema.DATA, "data"))

    assert phases(recording) == [("step", 0, 1, 2)]


def test_a_phase_around_the_beginning_of_the_window_is_not_recorded_in_part() -> None:
    recording = Recording(Ticks(), steps="1:3")
    tracer = recording.tracer
    tracer.begin_step(0)
    fit = tracer.enter(schema.USER, "fit")
    tracer.begin_step(1)
    tracer.leave(fit)
    tracer.begin_step(2)

    assert phases(recording) == [("step", 1, 1, 2)]


def test_a_topology_is_merged_and_changes_its_version(recording: Recording) -> None:
    tracer = recording.tracer
    assert tracer.topology() == (0, {})

    tracer.set_topology({"parallel": {"tp": 2}, "schedule": "1f1b"})
    tracer.set_topology({"schedule": "interleaved 1f1b"})

    assert tracer.topology() == (2, {"parallel": {"tp": 2}, "schedule": "interleaved 1f1b"})


def test_work_after_the_last_optimizer_is_no_part_of_the_last_step(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    tracer.leave(tracer.enter(schema.OPTIMIZER, "optimizer"))
    tracer.leave(tracer.enter(schema.EVALUATION, "evaluation"))
    tracer.finish()

    assert ("step", 0, 1, 3) in phases(ticking)


def test_an_iteration_inside_a_step_of_the_script_is_that_step(ticking: Recording) -> None:
    tracer = ticking.tracer
    for number in (7, 8):
        tracer.begin_step(number, is_users=True)
        tracer.begin_step()  # what an integration does
        tracer.end_step()
    tracer.begin_step()  # no step of the script's is open any more
    tracer.end_step()

    assert [row for row in phases(ticking) if row[0] == "step"] == [
        ("step", 7, 1, 2),
        ("step", 8, 2, 4),
        ("step", 9, 4, 6),
    ]


def test_a_span_beside_the_training_does_not_move_its_place_in_the_schedule(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.begin_step()
    aside = tracer.aside(schema.USER, "upload")
    forward = tracer.enter(schema.FORWARD, "forward", microbatch=3)
    assert aside is not None
    tracer.leave_aside(aside)
    assert tracer.coordinates.microbatch == 3
    tracer.leave(forward)

    rows = {row.name: row for row in ticking.rows()}
    assert rows["upload"].lane == schema.HOST
    assert rows["upload"].microbatch == -1
    assert rows["forward"].microbatch == 3


def test_a_window_of_detail_was_chosen_for_its_steps() -> None:
    plain, chosen, sampled = (Recording(Ticks(), steps=steps).tracer for steps in (None, "2:4", None))
    sampled.detail.every = 3
    requested = Recording(Ticks()).tracer
    requested.detail.add(StepRange(1, 2))

    found = [
        [step for step in range(-1, 7) if tracer.is_in_window(step)] for tracer in (plain, chosen, sampled, requested)
    ]
    assert found == [[], [2, 3], [0, 3, 6], [1]]


def test_a_forked_child_that_trains_records_nothing(ticking: Recording) -> None:
    tracer = ticking.tracer
    tracer.abandon_after_fork()
    tracer.begin_step()
    tracer.leave(tracer.enter(schema.FORWARD, "forward"))
    tracer.end_step()
    tracer.leave(tracer.enter(schema.FORWARD, "forward"))

    assert list(tracer.recorder.buffer) == []
