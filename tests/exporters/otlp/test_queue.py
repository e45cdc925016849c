"""The bounded queue and its account."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commtrace.exporters.otlp.queue import AT_THE_END, QUEUE_FULL, REFUSED, UNANSWERED, Account, Job, JobQueue
from commtrace.live.monitoring.findings import LiveEvent
from commtrace.live.monitoring.job_steps import JobStep
from tests.exporters.prometheus.steps import summary
from tests.trace.rows import row


def job(rows: int, *, is_root: bool = False, findings: int = 0) -> Job:
    told = [LiveEvent("silent", 0.0, 1, "alpha", "…")] * findings
    roots = (JobStep(0, 0, 0, 1, 1),) if is_root else ()
    return Job(summary(), [row(start=number) for number in range(rows)], roots, told, 0, 0, 0)


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    account = Account()
    queue = JobQueue(account, most_spans=10)
    for rows in (6, 7, 2):
        queue.put(job(rows, is_root=True))

    assert [queue.get(0).num_spans for _ in range(2)] == [7, 3]  # type: ignore[union-attr]
    assert queue.get(0) is None
    assert account.produced == 7 + 8 + 3
    assert account.dropped == {QUEUE_FULL: 5 + 3, REFUSED: 0, UNANSWERED: 0, AT_THE_END: 0}


def test_what_comes_in_again_after_room_was_made_is_taken() -> None:
    account = Account()
    queue = JobQueue(account, most_spans=4)
    for _ in range(5):
        queue.put(job(4))
        assert queue.get(0) is not None

    assert account.total_dropped == 0


def test_at_the_end_the_rest_is_dropped_and_nothing_counts_afterwards() -> None:
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
    queue = JobQueue(account, most_spans=12)
    waiting = 0
    for rows, is_root, findings, takes in puts:
        before = account.total_dropped
        one = job(rows, is_root=is_root, findings=findings)
        queue.put(one)
        waiting += one.num_spans - (account.total_dropped - before)
        if takes and (got := queue.get(0)) is not None:
            waiting -= got.num_spans
            account.settle(got.num_spans, rows % 2 == 0)
        assert 0 <= waiting <= 12
        assert account.produced == account.sent + account.total_dropped + waiting


def test_steps_that_wait_together_are_taken_together_as_long_as_they_fit() -> None:
    account = Account()
    queue = JobQueue(account)
    for rows in (3, 4, 3, 1, 9):
        queue.put(job(rows))

    taken = []
    while (first := queue.get(0)) is not None:
        taken.append([one.num_spans for one in queue.get_with(first, 8)])
    assert taken == [[3, 4], [3, 1], [9]]
    queue.put(job(50_000))
    assert account.total_dropped == 0
