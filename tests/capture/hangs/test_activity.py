"""The activity of a quiet rank, with a clock in our hands."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.collectives.groups import GroupState
from commtrace.capture.collectives.operations import OPERATIONS
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.collectives.waits import wrap_wait
from commtrace.capture.device.clock import HostClock
from commtrace.capture.hangs.activity import ActivityWatch, _frames_of_main_thread
from commtrace.capture.records import Launch
from commtrace.integrations import loop
from commtrace.trace import schema
from commtrace.trace.schema import Coordinates
from tests.capture.recording import Recording, fake_backend
from tests.factory import group

SECOND = 1_000_000_000


class Quiet:
    """A recording and its activity, at a time that tests set."""

    def __init__(self) -> None:
        self.now = 100 * SECOND
        self.recording = Recording()
        self.tracer = self.recording.tracer
        self.activity = ActivityWatch(self.tracer, now=lambda: self.now, frames=lambda: ("train.py:7 step",))

    def activities(self, seconds: float) -> list[dict[str, Any]]:
        """The marks of the next so many seconds, two passes a second."""
        details = []
        for _ in range(int(2 * seconds)):
            self.now += SECOND // 2
            details += [detail for name, detail in self.activity.marks() if name == "activity"]
        return details


def test_it_is_reported_once_at_first_and_then_every_two_seconds_of_quiet() -> None:
    quiet = Quiet()

    (first,) = quiet.activities(0.5)
    assert (first["again_within_ns"], first["frames"]) == (3 * SECOND, ["train.py:7 step"])
    assert [detail["no_progress_ns"] / SECOND for detail in quiet.activities(6)] == [2, 4, 6]


def test_a_busy_rank_says_nothing() -> None:
    quiet = Quiet()
    quiet.activities(0.5)
    for _ in range(10):
        quiet.tracer.append((lambda entry: [], schema.USER))
        assert quiet.activities(0.5) == []
        quiet.recording.recorder.flush()


def test_garbage_of_other_threads_is_no_progress() -> None:
    quiet = Quiet()
    quiet.activities(4)
    quiet.tracer.append((lambda entry: [], schema.GC))
    reported = quiet.activities(2)
    quiet.recording.recorder.flush()
    reported += quiet.activities(2)
    assert [detail["no_progress_ns"] / SECOND for detail in reported] == [4, 6]


def test_a_rank_that_is_quiet_for_long_says_so_more_seldom() -> None:
    quiet = Quiet()
    quiet.activities(70)
    activities = quiet.activities(60)

    assert len(activities) == 6
    assert {detail["again_within_ns"] for detail in activities} == {11 * SECOND}


def test_steps_that_are_not_recorded_are_progress_all_the_same() -> None:
    quiet = Quiet()
    quiet.activities(0.5)
    for step in range(10):
        quiet.tracer.coordinates = Coordinates(step)
        activities = quiet.activities(1)
    assert [detail["no_progress_ns"] for detail in activities] == [SECOND // 2]


def test_the_open_phases_are_shown_innermost_first() -> None:
    quiet = Quiet()
    quiet.tracer.begin_step(5)
    outer = quiet.tracer.enter(schema.FORWARD, "forward", microbatch=2, chunk=0, stage=1)
    inner = quiet.tracer.enter(schema.MODULE, "layers.3")
    (detail,) = quiet.activities(0.5)

    assert detail["at"] == [5, 2, 0, 1]
    assert [(span["kind"], span["name"]) for span in detail["open"]] == [("module", "layers.3"), ("forward", "forward")]
    assert [span["since"] for span in detail["open"]] == [inner.start, outer.start]

    quiet.tracer.leave(inner)
    quiet.tracer.leave(outer)
    assert quiet.tracer.innermost is None


def launch(seq: int, *, is_async: bool = False, start: int = 7) -> Launch:
    state = GroupState(group("dp", 0, 1), (0, 1))
    return Launch(
        OPERATIONS["allreduce"], state, seq, 40, -1, torch.float32, -1, is_async, Coordinates(), None, start,
    )  # fmt: skip


def test_a_communication_is_in_flight_when_two_passes_have_seen_it() -> None:
    quiet = Quiet()
    first, second = launch(3), launch(4, is_async=True)

    assert quiet.activity.in_flight([first]) == []
    (communication,) = quiet.activity.in_flight([first, second])
    assert communication.to_json() == {
        "operation": "all_reduce", "group": group("dp", 0, 1).id, "seq": 3, "peer": -1, "bytes": 40, "dtype": "float32",
        "is_async": False, "start": 7, "blocking": False,
    }  # fmt: skip
    assert [entry.seq for entry in quiet.activity.in_flight([second])] == [4]


def test_a_blocking_call_comes_first_even_when_nobody_else_knows_it() -> None:
    quiet = Quiet()
    others, blocking = launch(3, is_async=True), launch(9)
    quiet.tracer.blocked[0] = blocking
    quiet.activity.in_flight([others])

    communications = quiet.activity.in_flight([others])
    assert [(entry.seq, entry.blocking) for entry in communications] == [(9, True), (3, False)]


def test_numbers_of_communications_are_read_without_being_taken() -> None:
    recording = Recording()
    with fake_backend(world_size=2), recording.capturing():
        activity = ActivityWatch(recording.tracer, frames=tuple)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        dist.send(tensor, 1, tag=3)
        ((_, detail),) = activity.marks()
        dist.all_reduce(tensor)
        world = next(iter(recording.tracer.groups.states.values())).group.id

        assert detail["collectives"] == {str(world): 2}
        assert detail["p2p"] == [[world, True, 1, 3, 1]]
        assert [row.seq for row in recording.rows(schema.COLLECTIVE)] == [0, 1, 2]


def test_a_wait_that_blocks_is_seen_from_outside() -> None:
    recording = Recording()
    tracer = recording.tracer
    seen: list[Any] = []

    class SlowWork:
        def wait(self) -> None:
            seen.append(tracer.blocked[0])

    capture, work, pending = ProcessGroupCapture(tracer), SlowWork(), launch(5)
    capture.pending[id(work)] = (pending, None, weakref.ref(work))
    wrap_wait(SlowWork.wait, tracer, capture.pending, "waits")(work)

    assert seen == [pending]
    assert tracer.blocked[0] is None


class LosesMarks(HostClock):
    """Raises as a clock does whose mark was lost, or whose driver has failed."""

    def resolve(self, mark: Any) -> int | None:
        raise RuntimeError("the driver has failed")


def test_a_lost_mark_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Quiet()
    quiet.tracer.clock = LosesMarks()
    quiet.tracer.enter(schema.FORWARD, "forward")
    (detail,) = quiet.activities(0.5)
    assert [(span["name"], span["since"]) for span in detail["open"]] == [("forward", None)]

    behind = launch(5)
    monkeypatch.setattr(quiet.activity, "_on_device", lambda: [behind])
    quiet.activity.in_flight([])
    (communication,) = quiet.activity.in_flight([])
    assert (communication.seq, communication.blocking) == (5, False)


def test_the_frames_are_those_of_the_main_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(_frames_of_main_thread()))
    thread.start()
    thread.join()

    assert any("test_the_frames_are_those_of_the_main_thread" in frame for frame in found)


def test_a_wrapper_of_ours_is_no_place_in_the_program() -> None:
    found: list[str] = []
    recording = Recording()
    uninstall = loop.install(recording.tracer)
    try:
        result = torch.ones(1, requires_grad=True) * 2
        result.register_hook(lambda _: found.extend(_frames_of_main_thread()))
        result.sum().backward()
    finally:
        uninstall()
    assert any("test_a_wrapper_of_ours_is_no_place_in_the_program" in frame for frame in found)
    assert not any(loop.__name__.replace(".", "/") in frame for frame in found)
