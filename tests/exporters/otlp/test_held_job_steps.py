"""The span of a job's step waits for the times of all ranks, and no longer than it may."""

from __future__ import annotations

from commtrace.exporters.otlp.held_job_steps import HeldJobSteps
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from tests.exporters.otlp.made import WORLD_SIZE, live_rank


class Clock:
    """Stands still unless it is moved, in seconds."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def own(step: int) -> JobStep:
    return JobStep(step, 0, 1_000 * step, 1_000 * step + 900, 1)


def test_without_a_monitor_nothing_waits() -> None:
    held = HeldJobSteps(live_rank(0), 0.0, Clock())
    held.hold(own(3))

    assert held.release() == (own(3),)
    assert held.release() == ()


def test_a_step_waits_until_all_ranks_are_known_and_has_their_times() -> None:
    live = live_rank(0)
    held = HeldJobSteps(live, 12.0, Clock())
    held.hold(own(3))
    held.hold(own(4))
    assert held.release() == ()

    some = JobStep(4, 0, 4_000, 4_950, WORLD_SIZE - 1)
    live.job_steps = {(3, 0): JobStep(3, 0, 2_990, 3_939, WORLD_SIZE), (4, 0): some}
    assert held.release() == (JobStep(3, 0, 2_990, 3_939, WORLD_SIZE),)
    assert held.release() == ()


def test_after_a_bounded_time_it_has_the_times_of_those_that_are_known() -> None:
    live, clock = live_rank(0), Clock()
    held = HeldJobSteps(live, 12.0, clock)
    held.hold(own(3))
    held.hold(own(4))
    live.job_steps = {(4, 0): JobStep(4, 0, 4_100, 4_950, 2)}  # of two others
    clock.now += 11.9
    assert held.release() == ()

    clock.now += 0.1
    assert held.release() == (own(3), JobStep(4, 0, 4_000, 4_950, 2))


def test_no_more_are_held_than_the_monitor_tells_of() -> None:
    held = HeldJobSteps(live_rank(0), 12.0, Clock())
    for step in range(MOST_JOINED + 3):
        held.hold(own(step))

    assert held.release() == (own(0), own(1), own(2))


def test_at_the_end_all_are_released() -> None:
    held = HeldJobSteps(live_rank(0), 12.0, Clock())
    held.hold(own(3))

    assert held.release(all_of_them=True) == (own(3),)
