"""What waits to be exported, bounded, and the exact account of what became of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.summary import StepSummary
from commtrace.trace.rows import Row

MOST_SPANS: Final = 50_000
"""So many spans wait for the receiver; of more, the newest are dropped and counted."""

SPANS_PER_REQUEST: Final = 512

QUEUE_FULL, REFUSED, UNANSWERED, AT_THE_END = "queue_full", "refused", "unanswered", "at_the_end"
REASONS: Final = (QUEUE_FULL, REFUSED, UNANSWERED, AT_THE_END)
"""Why spans are dropped: too many wait; the receiver did not take them; it did not answer, so that nobody knows whether
it has them; recording ended first."""


Settle: TypeAlias = Callable[[int, "bool | None"], None]
"""Told what became of spans, or of requests with metrics: how many, and whether they were taken; None where no answer
came."""


class Counts(NamedTuple):
    """An :class:`Account` at one instant."""

    sent: int
    dropped: Mapping[str, int]


class SignalCounts(NamedTuple):
    """What became of both signals so far.

    Attributes:
        spans: one by one.
        metric_requests: requests, each with all metrics of the rank.
    """

    spans: Counts
    metric_requests: Counts


class Job(NamedTuple):
    """A step to export.

    Attributes:
        summary: of the step.
        rows: those that become spans, the ``step`` row first if it is among them.
        job_steps: those whose span, which holds the steps of all ranks, is to be sent now; other steps than this, where
            they have waited for the times of other ranks.
        findings: of the monitor, since the step before.
        epoch_offset_ns: what turns the times of rows into epoch ns.
        clock_error_ns: of that.
        dropped: spans dropped so far.
    """

    summary: StepSummary
    rows: Sequence[Row]
    job_steps: Sequence[JobStep]
    findings: Sequence[Mapping[str, Any]]
    epoch_offset_ns: int
    clock_error_ns: int
    dropped: int

    @property
    def num_spans(self) -> int:
        return len(self.rows) + len(self.job_steps) + len(self.findings)

    def lean(self) -> Job:
        """Without what spans are not made of."""
        return self._replace(summary=replace(self.summary, operations=(), collectives=()))


class Account:
    """What became of one signal: of spans, or of requests with metrics. Produced = sent + dropped + what waits.

    Several threads count; nobody holds the lock for long.
    """

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
        """How many there are of which nothing is known yet."""
        with self._lock:
            return self.produced - self.sent - sum(self.dropped.values())

    @property
    def counts(self) -> Counts:
        """Return what became of them so far."""
        with self._lock:
            return Counts(self.sent, dict(self.dropped))

    def produce(self, count: int) -> None:
        """So many spans are there to be sent."""
        with self._lock:
            self.produced += count

    def drop(self, count: int, reason: str) -> None:
        """So many are dropped."""
        with self._lock:
            if not self._is_final:
                self.dropped[reason] += count

    def settle(self, count: int, was_sent: bool | None) -> None:
        """A batch was taken, or not; None where no answer came."""
        if not was_sent:
            self.drop(count, UNANSWERED if was_sent is None else REFUSED)
            return
        with self._lock:
            if not self._is_final:
                self.sent += count

    def finish(self) -> None:
        """Nothing more is sent: what waits is dropped. What a thread still tells afterwards is not counted."""
        with self._lock:
            if not self._is_final:
                self.dropped[AT_THE_END] += self.produced - self.sent - sum(self.dropped.values())
                self._is_final = True


class JobQueue:
    """Steps that wait. Any thread puts, one gets; a put never blocks.

    Args:
        account: what is produced and dropped is counted there.
        most_spans: bound of the sum of their spans.
    """

    def __init__(self, account: Account, most_spans: int = MOST_SPANS) -> None:
        self._account = account
        self._most_spans = most_spans
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Take a step, or as much of it as there is room for."""
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
        """Return the oldest step; None if none comes in this time or the queue is closed and empty."""
        with self._changed:
            if not self._jobs and not self._closed:
                self._changed.wait(seconds)
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            self._waiting -= job.num_spans
            return job

    def get_with(self, first: Job, most_spans: int) -> list[Job]:
        """Return a step and those that wait behind it, as many as come to no more than so many spans, itself at
        least.
        """
        jobs, spans = [first], first.num_spans
        with self._changed:
            while self._jobs and spans + self._jobs[0].num_spans <= most_spans:
                jobs.append(self._jobs.popleft())
                spans += jobs[-1].num_spans
                self._waiting -= jobs[-1].num_spans
        return jobs

    def close(self) -> None:
        """Nobody waits for a step any more."""
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
