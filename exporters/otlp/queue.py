"""The bounded queue of steps to export, and the exact account of their spans."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from commtrace.live.monitoring.findings import LiveEvent
from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.summary import StepSummary
from commtrace.trace.schema import Row

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MOST_SPANS: Final = 50_000
"""Limit of spans that wait for the receiver; newer ones are dropped and counted."""

SPANS_PER_REQUEST: Final = 512

QUEUE_FULL, REFUSED, UNANSWERED, AT_THE_END = "queue_full", "refused", "unanswered", "at_the_end"
REASONS: Final = (QUEUE_FULL, REFUSED, UNANSWERED, AT_THE_END)
"""Reasons to drop spans: too many wait; the receiver refused them; it did not answer, so it may have them; recording
ended first."""


Settle: TypeAlias = Callable[[int, "bool | None"], None]
"""Takes a number of spans (or requests with metrics), and True if they were taken; None if no answer came."""


class Counts(NamedTuple):
    sent: int
    dropped: Mapping[str, int]


class SignalCounts(NamedTuple):
    spans: Counts
    metric_requests: Counts


class MetricsSnapshot(NamedTuple):
    """All metrics of a rank at ``now_ns``; sums began at ``start_ns``, epoch ns."""

    families: Sequence[Metric]
    counts: SignalCounts
    start_ns: int
    now_ns: int


class Job(NamedTuple):
    """A step to export."""

    summary: StepSummary
    rows: Sequence[Row]  # to become spans, the step first if it is among them
    job_steps: Sequence[JobStep]  # to send now; older steps if they waited for the times of other ranks
    findings: Sequence[LiveEvent]  # of the monitor, since the step before
    epoch_offset_ns: int  # epoch ns minus the times of rows
    clock_error_ns: int  # of that offset
    dropped: int  # spans so far

    @property
    def num_spans(self) -> int:
        return len(self.rows) + len(self.job_steps) + len(self.findings)

    def without_operations(self) -> Job:
        """Return the job without the parts of its summary that no span needs."""
        return self._replace(summary=replace(self.summary, operations=(), collectives=()))


class Account:
    """Counts spans, or requests with metrics: produced = sent + dropped + waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_final = False
        self.produced = 0
        self.sent = 0
        self.dropped = dict.fromkeys(REASONS, 0)

    @property
    def total_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def waiting(self) -> int:
        with self._lock:
            return self.produced - self.sent - sum(self.dropped.values())

    @property
    def counts(self) -> Counts:
        with self._lock:
            return Counts(self.sent, dict(self.dropped))

    def produce(self, count: int) -> None:
        with self._lock:
            self.produced += count

    def drop(self, count: int, reason: str) -> None:
        with self._lock:
            if not self._is_final:
                self.dropped[reason] += count

    def settle(self, count: int, was_sent: bool | None) -> None:
        """Count a batch by its outcome; None if no answer came."""
        if not was_sent:
            self.drop(count, UNANSWERED if was_sent is None else REFUSED)
            return
        with self._lock:
            if not self._is_final:
                self.sent += count

    def finish(self) -> None:
        """Drop the rest; later calls have no effect."""
        with self._lock:
            if not self._is_final:
                self.dropped[AT_THE_END] += self.produced - self.sent - sum(self.dropped.values())
                self._is_final = True


class JobQueue:
    """Steps that wait, with at most ``most_spans`` spans in all. Any thread puts, one gets; a put never blocks."""

    def __init__(self, account: Account, most_spans: int = MOST_SPANS) -> None:
        self._account = account
        self._most_spans = most_spans
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Add a step, or as much of it as fits; count the rest as dropped."""
        self._account.produce(job.num_spans)
        with self._changed:
            fitting = self._fitting(job)
            if fitting.num_spans:
                self._jobs.append(fitting)
                self._waiting += fitting.num_spans
                self._changed.notify()
        if fitting.num_spans < job.num_spans:
            self._account.drop(job.num_spans - fitting.num_spans, QUEUE_FULL)

    def get(self, seconds: float) -> Job | None:
        """Return the oldest step; None if none comes in time, or the queue is closed and empty."""
        with self._changed:
            if not self._jobs and not self._closed:
                self._changed.wait(seconds)
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            self._waiting -= job.num_spans
            return job

    def get_with(self, first: Job, most_spans: int) -> list[Job]:
        """Return ``first`` and the next steps, up to ``most_spans`` spans in all."""
        jobs, spans = [first], first.num_spans
        with self._changed:
            while self._jobs and spans + self._jobs[0].num_spans <= most_spans:
                jobs.append(self._jobs.popleft())
                spans += jobs[-1].num_spans
                self._waiting -= jobs[-1].num_spans
        return jobs

    def close(self) -> None:
        """Wake up the thread in :meth:`get`."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _fitting(self, job: Job) -> Job:
        room = self._most_spans - self._waiting
        if job.num_spans <= room:
            return job
        room -= len(job.job_steps) + len(job.findings)
        if room < 0:
            return job._replace(rows=(), job_steps=(), findings=())
        return job._replace(rows=job.rows[:room])
