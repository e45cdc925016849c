"""Which rows are exported; the queue of steps, and the account of their spans."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commtrace.config import Config, OtlpConfig
from commtrace.exporters.otlp.queue import (
    AT_THE_END,
    QUEUE_FULL,
    REFUSED,
    UNANSWERED,
    Account,
    ExportedStep,
    HeldJobSteps,
    SpanFilter,
    StepQueue,
)
from commtrace.findings.status import LiveEvent
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.recording.options import OTLP_LEVELS
from commtrace.trace import schema
from tests.exporters.otlp.made import WORLD_SIZE, live_rank
from tests.exporters.prometheus.steps import summary
from tests.live.findings import silent_finding
from tests.trace.rows import row


def test_every_level_holds_those_before_it() -> None:
    sizes = [SpanFilter(level).kinds for level in OTLP_LEVELS]

    assert sizes == sorted(sizes, key=len)
    assert all(less < more for less, more in pairwise(sizes))
    assert SpanFilter("modules").kinds == set(range(len(schema.KINDS))) - {schema.MARK, schema.KERNEL, schema.MEMORY}


@pytest.mark.parametrize(
    ("ranks", "taken"),
    [("", [0, 1, 2, 3, 4, 5]), ("0,4", [0, 4]), ("1:6:2", [1, 3, 5]), ("5, 0:2", [0, 1, 5]), ("7", [])],
)
def test_ranks(ranks: str, taken: list[int]) -> None:
    span_filter = SpanFilter.from_config(Config(otlp=OtlpConfig(ranks=ranks)), world_size=6)

    assert [rank for rank in range(6) if span_filter.takes_rank(rank)] == taken
    assert span_filter.first_rank == (taken[0] if taken else -1)


def test_rows_are_chosen_by_the_step_that_they_bear() -> None:
    rows = [row(step=9, start=1), row(step=10, start=2), row(step=11, start=3), row(step=-1, start=4)]
    span_filter = SpanFilter("phases", every=5)

    assert [one[3] for one in span_filter.rows(rows, step=11)] == [2]
    assert [one[3] for one in span_filter.rows(rows, step=10)] == [2, 4]
    assert span_filter.rows([row(kind=schema.COLLECTIVE, step=10)], step=10) == []


def step(rows: int, *, is_root: bool = False, findings: int = 0) -> ExportedStep:
    events = [LiveEvent("found", 0, silent_finding(1), "…")] * findings
    roots = (JobStep(0, 0, 0, 1, 1),) if is_root else ()
    return ExportedStep(summary(), [row(start=number) for number in range(rows)], roots, events, 0, 0, 0)


def test_jobs_that_do_not_fit_are_dropped_and_counted() -> None:
    account = Account()
    queue = StepQueue(account, most_spans=10)
    for rows in (6, 7, 2):
        queue.put(step(rows, is_root=True))

    steps = (queue.get(0) for _ in range(2))
    assert [each and each.num_spans for each in steps] == [7, 3]
    assert queue.get(0) is None
    assert account.produced == 7 + 8 + 3
    assert account.dropped == {QUEUE_FULL: 5 + 3, REFUSED: 0, UNANSWERED: 0, AT_THE_END: 0}


def test_jobs_are_taken_again_after_room_was_made() -> None:
    account = Account()
    queue = StepQueue(account, most_spans=4)
    for _ in range(5):
        queue.put(step(4))
        assert queue.get(0) is not None

    assert account.total_dropped == 0


def test_closing_drops_the_rest_and_nothing_counts_afterwards() -> None:
    account = Account()
    account.produce(10)
    account.settle(3, True)
    account.settle(2, False)
    account.settle(1, None)
    account.finish()
    account.settle(5, True)
    account.finish()

    assert (account.sent, account.dropped) == (3, {QUEUE_FULL: 0, REFUSED: 2, UNANSWERED: 1, AT_THE_END: 4})


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 2), st.booleans()), max_size=30))
def test_produced_is_sent_plus_dropped_plus_waiting(puts: list[tuple[int, bool, int, bool]]) -> None:
    account = Account()
    queue = StepQueue(account, most_spans=12)
    waiting = 0
    for rows, is_root, findings, takes in puts:
        before = account.total_dropped
        one = step(rows, is_root=is_root, findings=findings)
        queue.put(one)
        waiting += one.num_spans - (account.total_dropped - before)
        if takes and (got := queue.get(0)) is not None:
            waiting -= got.num_spans
            account.settle(got.num_spans, rows % 2 == 0)
        assert 0 <= waiting <= 12
        assert account.produced == account.sent + account.total_dropped + waiting


def test_steps_that_wait_together_are_taken_together_as_long_as_they_fit() -> None:
    account = Account()
    queue = StepQueue(account)
    for rows in (3, 4, 3, 1, 9):
        queue.put(step(rows))

    taken = []
    while (first := queue.get(0)) is not None:
        taken.append([one.num_spans for one in queue.get_with(first, 8)])
    assert taken == [[3, 4], [3, 1], [9]]
    queue.put(step(50_000))
    assert account.total_dropped == 0


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


def test_no_more_are_held_than_the_monitor_keeps() -> None:
    held = HeldJobSteps(live_rank(0), 12.0, Clock())
    for step in range(MOST_JOINED + 3):
        held.hold(own(step))

    assert held.release() == (own(0), own(1), own(2))


def test_all_held_steps_are_released_at_the_end() -> None:
    held = HeldJobSteps(live_rank(0), 12.0, Clock())
    held.hold(own(3))

    assert held.release(all_of_them=True) == (own(3),)
