"""Since when ranks are slow, to the step, from made windows of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commtrace.findings.status import CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring.watch import Watch
from commtrace.live.monitoring.window import MOST_SUMS, ReportWindow, WindowReport
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.trace.metadata import ClockAnchor
from tests.factory import metadata

MS = 1_000_000
SECONDS = 4.0

Work = Callable[[int, int], float]
"""Work of a rank in a step, ms."""


def windows(work: Work, *, steps: int, ranks: int, step_ms: int = 100, first: int = 0) -> Iterator[list[WindowReport]]:
    """The reports of a job whose step n begins at n times ``step_ms``, window after window."""
    anchor = ClockAnchor(monotonic_ns=0, realtime_ns=0, bracket_ns=40)
    gathered = [
        ReportWindow(LiveRank(metadata(rank, world_size=ranks, anchor=anchor), Path("run"))) for rank in range(ranks)
    ]
    number = 0
    for step in range(first, steps):
        for rank, own in enumerate(gathered):
            work_ns, duration_ns = round(work(rank, step) * MS), step_ms * MS
            phases, exposed = {"forward": work_ns}, {"dp": duration_ns - work_ns}
            own.add(StepSummary("made", rank, step, (step - first) * duration_ns, duration_ns, phases, exposed))
        if (step - first + 1) * step_ms >= 1e3 * SECONDS * (number + 1):
            number += 1
            yield [own.close(number, 0) for own in gathered]


def watched(work: Work, **job: int) -> tuple[Watch, list[LiveEvent]]:
    watch, events = Watch(job["ranks"], SECONDS), []
    for number, reports in enumerate(windows(work, **job), 1):
        events += watch.join(reports, now=number * SECONDS)
    return watch, events


def named(events: list[LiveEvent]) -> list[tuple[tuple[int, ...], int, float, int]]:
    return [
        (one.ranks, one.since_step, (one.since_ns or 0) / 1e9, one.since_within_steps)
        for one in (event.finding for event in events if event.kind == FOUND)
    ]


def noisy(work: Work, share: float = 0.01) -> Work:
    random = np.random.default_rng(7)
    return lambda rank, step: work(rank, step) * (1 + random.normal(0, share))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("begin", [30, 39, 40, 41, 63, 117])
def test_a_rank_is_slow_since_the_step_in_which_it_became_slow_and_the_time_is_that_step_s(
    ranks: int, begin: int
) -> None:
    def work(rank: int, step: int) -> float:
        return 80 if rank == 1 and step >= begin else 60

    watch, events = watched(noisy(work), steps=240, ranks=ranks)
    ((slow, since_step, since, within),) = named(events)
    assert (slow, since_step, within) == ((1,), begin, 0)
    assert since == pytest.approx(begin / 10)
    assert f"for {events[0].time_ns / 1e9 - begin / 10:.1f} s, since step {begin}, 00:00:{begin // 10:02} UTC." in (
        events[0].sentence
    )
    (straggler,) = watch.findings
    assert straggler.since_step == begin
    assert straggler.since_ns == pytest.approx(begin * 1e8)


def test_slowness_from_before_the_first_window_dates_to_the_first_compared_step() -> None:
    watch, events = watched(noisy(lambda rank, step: 80 if rank == 1 else 60), steps=120, ranks=4)
    (straggler,) = watch.findings
    assert (straggler.since_step, straggler.since_first_compared) == (1, True)
    assert straggler.since_ns == pytest.approx(1e8)
    assert ", since step 1, the first one compared, 00:00:00 UTC. " in events[0].sentence


def test_a_fault_that_comes_and_goes_has_the_begin_of_its_last_time() -> None:
    """It is gone for two windows between."""

    def work(rank: int, step: int) -> float:
        return 80 if rank == 1 and (30 <= step < 150 or step >= 237) else 60

    _, events = watched(noisy(work), steps=400, ranks=3)
    assert [event.kind for event in events] == [FOUND, CLEARED, FOUND]
    assert [(step, within) for _, step, _, within in named(events)] == [(30, 0), (237, 0)]


def test_a_fault_with_gaps_shorter_than_a_window_has_one_begin() -> None:
    def work(rank: int, step: int) -> float:
        return 90 if rank == 1 and step >= 30 and step % 30 < 20 else 60

    watch, events = watched(noisy(work), steps=400, ranks=4)
    assert [event.kind for event in events] == [FOUND]
    assert watch.findings[0].since_step == 30


def test_each_of_two_slow_ranks_in_turn_has_its_own_begin() -> None:
    def work(rank: int, step: int) -> float:
        return 80 if step >= 30 and rank == (1 if step < 133 else 2) else 60

    _, events = watched(noisy(work), steps=300, ranks=4)
    assert [(ranks, step) for ranks, step, *_ in named(events)] == [((1,), 30), ((2,), 133)]


def test_one_of_two_ranks_hands_its_fault_to_the_other() -> None:
    """Of two, neither is a majority: the past decides."""

    def work(rank: int, step: int) -> float:
        return 80 if step >= 90 and rank == (0 if step < 190 else 1) else 60

    _, events = watched(noisy(work), steps=400, ranks=2)
    assert [(ranks, step) for ranks, step, *_ in named(events)] == [((0,), 90), ((1,), 190)]


def test_the_begin_is_known_to_the_step_when_steps_are_longer_than_half_a_window() -> None:
    def work(rank: int, step: int) -> float:
        return 2_500 if rank == 1 and step >= 7 else 1_500

    watch, events = watched(noisy(work), steps=24, ranks=4, step_ms=3_000)
    assert [event.kind for event in events] == [FOUND]
    assert [(one.since_step, one.since_ns, one.since_within_steps) for one in watch.findings] == [(7, 21 * 10**9, 0)]


def test_steps_too_short_for_a_sum_each_are_dated_to_a_sum_and_that_is_reported() -> None:
    """400 steps of 10 ms in a window are 50 sums of 8."""

    def work(rank: int, step: int) -> float:
        return 9 if rank == 1 and step >= 1_003 else 6

    watch, events = watched(noisy(work), steps=4_000, ranks=4, step_ms=10)
    (straggler,) = watch.findings
    assert straggler.since_within_steps == 8
    assert abs(straggler.since_step - 1_003) <= 8
    assert straggler.since_ns == pytest.approx(straggler.since_step * 1e7)
    assert f"since about step {straggler.since_step} (± 8), 00:00:10 UTC" in events[0].sentence


def test_the_place_of_a_small_change_in_much_noise_is_given_with_its_error() -> None:
    def work(rank: int, step: int) -> float:
        return 66 if rank == 1 and step >= 130 else 60

    misses: list[float] = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        watch, _ = watched(lambda rank, step: work(rank, step) + random.normal(0, 3), steps=420, ranks=4)  # noqa: B023
        misses += [abs(one.since_step - 130) / max(one.since_within_steps, 1) for one in watch.findings]
    assert len(misses) >= 15
    assert np.quantile(misses, 0.9) <= 1


def test_steps_that_are_done_again_replace_their_first_attempt() -> None:
    """A fault from step 30 on is gone after a rollback from 121 to 20, and comes back in step 160."""
    watch, events = Watch(4, SECONDS), []
    first = windows(lambda rank, step: 80 if rank == 1 and step >= 30 else 60, steps=121, ranks=4)
    again = windows(lambda rank, step: 80 if rank == 1 and step >= 160 else 60, steps=321, first=20, ranks=4)
    for number, reports in enumerate([*first, *again], 1):
        events += watch.join([replace(one, window=number) for one in reports], now=number * SECONDS)
    assert [step for _, step, *_ in named(events)] == [30, 160]


def test_a_report_holds_the_work_of_each_step_or_of_sums_that_all_ranks_divide_alike() -> None:
    (report, *_) = next(windows(lambda rank, step: 60, steps=100, ranks=2))
    assert len(report.work_sums) == 40
    assert report.work_sums[3] == (3, 1, 60 * MS, 300 * MS)
    (report, *_) = next(windows(lambda rank, step: 6, steps=500, first=5, ranks=2, step_ms=10))
    assert len(report.work_sums) <= MOST_SUMS
    assert report.steps_per_sum == 8
    assert report.work_sums[:2] == ((5, 3, 18 * MS, 0), (8, 8, 48 * MS, 30 * MS))
    assert sum(one.steps for one in report.work_sums) == report.steps


def test_the_history_of_a_large_job_is_bounded() -> None:
    ranks = 20_000
    watch = Watch(ranks, SECONDS)
    history = watch._history
    (report, *_) = next(windows(lambda rank, step: 60, steps=41, ranks=1))
    for window in range(12):
        sums = tuple(one._replace(step=one.step + 40 * window) for one in report.work_sums)
        history.add(WindowReport(0, "node0", 0, window, work_sums=sums))
    assert sum(len(one.rows) for one in history._of_rank[0]) <= 4_194_304 // ranks
