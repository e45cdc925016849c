"""The steps to export: which of their spans, the bounded queue, and the exact account."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.config import Config
from commtrace.findings.status import LiveEvent
from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary
from commtrace.recording.options import OTLP_LEVELS
from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.selection import StepRange
from commtrace.trace.spans import RowBatch

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


_ADDED_BY: Final[Mapping[str, frozenset[int]]] = {
    "none": frozenset(),
    "steps": frozenset({schema.STEP}),
    "phases": frozenset(
        {
            schema.FORWARD,
            schema.BACKWARD,
            schema.RECOMPUTE,
            schema.OPTIMIZER,
            schema.DATA,
            schema.CHECKPOINT,
            schema.GC,
            schema.EVALUATION,
            schema.USER,
            schema.PHASE,
            schema.REPLAY,
            schema.BETWEEN,
        }
    ),
    "communication": frozenset({schema.COLLECTIVE, schema.P2P, schema.STALL}),
    "modules": frozenset({schema.MODULE}),
}


@dataclass(frozen=True)
class SpanFilter:
    """The rows that become spans: steps that are multiples of ``every``, of the ranks in ``ranges``, empty for all."""

    level: str = "phases"
    every: int = 1
    ranges: tuple[StepRange, ...] = ()
    world_size: int = 1

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> SpanFilter:
        ranges = tuple(StepRange.parse(part) for part in config.otlp.ranks.split(",") if part.strip())
        return cls(config.otlp.level, config.otlp.sample, ranges, world_size)

    @cached_property
    def kinds(self) -> frozenset[int]:
        levels = OTLP_LEVELS[: OTLP_LEVELS.index(self.level) + 1]
        return frozenset[int]().union(*(_ADDED_BY[level] for level in levels))

    @cached_property
    def first_rank(self) -> int:
        """Return the lowest rank that exports, which also exports the job steps; −1 without any."""
        return next((rank for rank in range(self.world_size) if self.takes_rank(rank)), -1)

    def takes_rank(self, rank: int) -> bool:
        return not self.ranges or any(rank in ranks for ranks in self.ranges)

    def takes_step(self, step: int) -> bool:
        return step % self.every == 0

    def rows(self, rows: Sequence[Row], step: int) -> list[Row]:
        """Return the rows of a closed step that become spans; ``step`` is also the step of rows without one."""
        batch = RowBatch.of(rows)
        spans = batch.columns
        steps = np.where(spans.step < 0, step, spans.step)
        return list(batch.where(np.isin(spans.kind, list(self.kinds)) & (steps % self.every == 0)))


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


class ExportedStep(NamedTuple):
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

    def without_operations(self) -> ExportedStep:
        """Return the step without the parts of its summary that no span needs."""
        return self._replace(summary=replace(self.summary, operations=(), collectives=()))


class HeldJobSteps:
    """Holds each job step until the monitor has sent the times of all ranks, at most ``seconds``. Thread-safe."""

    def __init__(self, rank: LiveRank, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._seconds = seconds if rank.metadata.world_size > 1 else 0.0
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[float, JobStep]] = {}

    def hold(self, own: JobStep) -> None:
        """Add a step with the times of this rank."""
        with self._lock:
            self._held[own.key] = (self._monotonic() + self._seconds, own)

    def release(self, *, all_of_them: bool = False) -> tuple[JobStep, ...]:
        """Return the steps whose wait is over, oldest first, with the times known so far."""
        with self._lock:
            now, known = self._monotonic(), self._rank.job_steps
            too_many = len(self._held) - MOST_JOINED
            released = [
                key
                for number, (key, (until, _)) in enumerate(self._held.items())
                if all_of_them or number < too_many or until <= now or self._is_complete(known.get(key))
            ]
            return tuple(_joined(self._held.pop(key)[1], known.get(key)) for key in released)

    def _is_complete(self, of_all: JobStep | None) -> bool:
        return of_all is not None and of_all.ranks >= self._rank.metadata.world_size


def _joined(own: JobStep, of_all: JobStep | None) -> JobStep:
    # The own times may be missing in those of all ranks.
    if of_all is None:
        return own
    return of_all._replace(begin_ns=min(own.begin_ns, of_all.begin_ns), end_ns=max(own.end_ns, of_all.end_ns))


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


class StepQueue:
    """Steps that wait, with at most ``most_spans`` spans in all. Any thread puts, one gets; a put never blocks."""

    def __init__(self, account: Account, most_spans: int = MOST_SPANS) -> None:
        self._account = account
        self._most_spans = most_spans
        self._steps: deque[ExportedStep] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(self, step: ExportedStep) -> None:
        """Add a step, or as much of it as fits; count the rest as dropped."""
        self._account.produce(step.num_spans)
        with self._changed:
            fitting = self._fitting(step)
            if fitting.num_spans:
                self._steps.append(fitting)
                self._waiting += fitting.num_spans
                self._changed.notify()
        if fitting.num_spans < step.num_spans:
            self._account.drop(step.num_spans - fitting.num_spans, QUEUE_FULL)

    def get(self, seconds: float) -> ExportedStep | None:
        """Return the oldest step; None if none comes in time, or the queue is closed and empty."""
        with self._changed:
            if not self._steps and not self._closed:
                self._changed.wait(seconds)
            if not self._steps:
                return None
            step = self._steps.popleft()
            self._waiting -= step.num_spans
            return step

    def get_with(self, first: ExportedStep, most_spans: int) -> list[ExportedStep]:
        """Return ``first`` and the next steps, up to ``most_spans`` spans in all."""
        steps, spans = [first], first.num_spans
        with self._changed:
            while self._steps and spans + self._steps[0].num_spans <= most_spans:
                steps.append(self._steps.popleft())
                spans += steps[-1].num_spans
                self._waiting -= steps[-1].num_spans
        return steps

    def close(self) -> None:
        """Wake up the thread in :meth:`get`."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _fitting(self, step: ExportedStep) -> ExportedStep:
        room = self._most_spans - self._waiting
        if step.num_spans <= room:
            return step
        room -= len(step.job_steps) + len(step.findings)
        if room < 0:
            return step._replace(rows=(), job_steps=(), findings=())
        return step._replace(rows=step.rows[:room])
