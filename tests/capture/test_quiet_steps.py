"""Steps of which nothing but the length is recorded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commtrace.trace import schema
from commtrace.trace.quiet import unrecorded
from commtrace.trace.selection import DetailPlan, QuietPlan, StepRange
from tests.capture.recording import Recording, fake_backend


class Quiet(QuietPlan):
    """Steps of the test's choice."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self._steps = steps

    def is_quiet(self, step: int) -> bool:
        return step in self._steps


def train(recording: Recording, steps: int) -> None:
    for _ in range(steps):
        recording.tracer.begin_step()
        recording.tracer.count({"tokens": 7})
        recording.tracer.leave(recording.tracer.enter(schema.FORWARD, "forward"))
        dist.all_reduce(torch.ones(2))
    recording.tracer.end_step()


def test_only_the_length_of_a_quiet_step_is_recorded_and_what_the_script_counts() -> None:
    recording = Recording(quiet=Quiet(1, 2))
    with fake_backend(), recording.capturing():
        train(recording, 5)

    assert [row.step for row in recording.rows(schema.STEP)] == [0, 1, 2, 3, 4]
    assert [row.step for row in recording.rows(schema.FORWARD)] == [0, 3, 4]
    assert [(row.step, row.seq) for row in recording.communications()] == [(0, 0), (3, 3), (4, 4)]
    counted = [row.step for row in recording.sink.rows if row.kind == schema.MARK and row.name == "count"]
    assert counted == [0, 1, 2, 3, 4]


def test_the_numbers_that_communication_took_meanwhile_are_known() -> None:
    recording = Recording(quiet=Quiet(1, 2))
    with fake_backend(), recording.capturing():
        train(recording, 5)
        world = recording.communications()[0].group

    changes = recording.marks("quiet")
    assert [(change.step, change.is_quiet) for change in changes] == [(1, True), (2, True), (3, False)]
    assert unrecorded(changes, world, collectives=5).collectives == ((1, 3),)


def test_a_quiet_step_that_is_the_last_one_ends_as_any_other() -> None:
    recording = Recording(quiet=Quiet(1))
    with fake_backend(), recording.capturing():
        train(recording, 2)
        dist.all_reduce(torch.ones(2))

    assert [row.step for row in recording.rows(schema.STEP)] == [0, 1]
    assert [row.step for row in recording.communications()] == [0, -1]
    assert [change.is_quiet for change in recording.marks("quiet")] == [True, False]


@pytest.mark.parametrize("case", ["asked for", "sampled", "window"])
def test_a_step_that_somebody_wants_in_detail_is_not_quiet(case: str) -> None:
    recording = Recording(quiet=Quiet(1, 2), steps="0:9" if case == "window" else None)
    if case == "asked for":
        recording.tracer.detail.add(StepRange(1, 3))
    elif case == "sampled":
        recording.tracer.detail = DetailPlan(every=1)
        recording.tracer.detail.every = 2
    with fake_backend(), recording.capturing():
        train(recording, 4)

    wanted = [0, 2, 3] if case == "sampled" else [0, 1, 2, 3]
    assert [row.step for row in recording.rows(schema.FORWARD)] == wanted


def test_a_forked_child_has_no_quiet_steps() -> None:
    recording = Recording(quiet=Quiet(1))
    recording.tracer.abandon_after_fork()
    with fake_backend(), recording.capturing():
        train(recording, 3)

    assert recording.rows() == []
    assert recording.marks("quiet") == []


def test_what_began_in_a_recorded_step_and_ends_in_a_quiet_one_is_whole() -> None:
    recording = Recording(quiet=Quiet(1))
    with fake_backend(), recording.capturing():
        recording.tracer.begin_step()
        work = dist.all_reduce(torch.ones(2), async_op=True)
        recording.tracer.begin_step()
        assert work is not None
        work.wait()
        recording.tracer.begin_step()

    (row,) = recording.communications()
    assert (row.step, row.seq) == (0, 0)
    assert row.end >= row.start


def test_the_harvester_takes_nothing_in_quiet_steps_but_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    recording = Recording(quiet=Quiet(1, 2))
    monkeypatch.setattr(recording.recorder, "rest", rests.append)
    for _ in range(4):
        recording.tracer.begin_step()

    assert [seconds > 0 for seconds in rests] == [True, False]  # once for all of a stretch
