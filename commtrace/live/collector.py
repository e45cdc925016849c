"""Gather rows until their step is complete, and hand summaries of complete steps to listeners."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final

import numpy as np

from commtrace.live.gil import GilYield
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepExtras, StepWindow, summarise
from commtrace.live.summary import Device, StepListener, StepSummary, training_device
from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.spans import Bool, Int64, RowBatch, Spans

_logger = logging.getLogger("commtrace")

MOST_ROWS: Final = 100_000
"""Limit of rows kept for incomplete steps; the oldest are dropped, with one warning."""

NOBODY: Final = -1
"""Marks a row that belongs to a later pass."""

_SPARE_NAMES: Final = 1_000
"""Unused names are forgotten when there are this many and twice as many as rows."""


class PendingRows:
    """Rows in the order of arrival, and their columns, whose codes index ``names``."""

    def __init__(self, gil_yield: GilYield) -> None:
        self._gil_yield = gil_yield
        self.rows: list[Row] = []
        self.names: list[str] = []
        self._columns: list[Spans] = []
        self._handed: list[Bool] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Spans:
        """Return the columns of all rows, joined once."""
        self._columns = [Spans.concatenate(self._columns)]
        return self._columns[0]

    @property
    def handed(self) -> Bool:
        """Return a mask of the rows that listeners have received."""
        self._handed = [np.concatenate([np.empty(0, np.bool_), *self._handed])]
        return self._handed[0]

    def add(self, batch: RowBatch) -> None:
        """Take new rows; of marks, those of a step."""
        spans, rows = batch.columns, list[Row](batch)
        is_wanted = (spans.kind != schema.MARK) | (spans.step >= 0)
        if not is_wanted.all():
            kept = np.flatnonzero(is_wanted)
            spans, rows = spans.take(kept), [batch[at] for at in kept.tolist()]
        self._columns.append(self._recoded(spans, batch.names))
        self._handed.append(np.zeros(len(rows), np.bool_))
        self.rows += rows
        self._gil_yield.maybe_yield()

    def _recoded(self, spans: Spans, words: Sequence[str]) -> Spans:
        own = {name: code for code, name in enumerate(self.names)}
        for word in words:
            if word not in own:
                own[word] = len(self.names)
                self.names.append(word)
        codes = np.array([*(own[word] for word in words), schema.NOT_APPLICABLE], np.int32)  # −1 is the last one
        return spans.replace(name=codes[spans.name], dtype=codes[spans.dtype])

    def keep(self, kept: Int64, handed: Bool) -> None:
        """Keep the rows at these ascending positions; ``handed`` is the mask of all rows."""
        self._columns = [self.columns.take(kept)]
        self._handed = [handed[kept]]
        self.rows = [self.rows[at] for at in kept.tolist()]
        self._forget_names()

    def drop_oldest(self, count: int) -> None:
        del self.rows[:count]
        self._handed = [self.handed[count:]]
        while count:
            oldest = self._columns.pop(0)
            if len(oldest) > count:
                self._columns.insert(0, oldest.take(slice(count, None)))
            count -= min(count, len(oldest))
        self._forget_names()

    def _forget_names(self) -> None:
        if len(self.names) > _SPARE_NAMES + 2 * len(self.rows):
            self.names = []
            self._columns = [Spans.from_tuples(self.rows, self.names)]


def owners(spans: Spans, steps: Int64) -> Int64:
    """Return the position of each row's step in ``steps``; ``NOBODY`` for a row of a later pass.

    A step owns its own row. Any other row belongs to the first step that has its number, or begins after it, or ends
    after it if it was in no step.

    ``steps`` are the rows of steps with distinct numbers, by their end, then by their start.
    """
    count = len(steps)
    start, end, number = spans.start[steps], spans.end[steps], spans.step[steps]
    order = np.argsort(number, kind="stable")
    same = order[np.minimum(np.searchsorted(number[order], spans.step), count - 1)]
    numbered = np.where(number[same] == spans.step, same, count)
    begins_after = np.searchsorted(np.maximum.accumulate(start), spans.start, side="right")
    ends_after = np.where(spans.step < 0, np.searchsorted(end, spans.start, side="right"), count)
    owner = np.minimum(np.minimum(begins_after, ends_after), numbered)
    owner = np.where((owner < count) & (spans.kind != schema.STEP), owner, NOBODY)
    owner[steps] = np.arange(count)
    return owner


class StepCollector:
    """A sink of the recorder: summarises every step once its rows are in.

    A step is closed by the second pass after its ``step`` row, because the end of an asynchronous communication may
    arrive later than that row. Rows that come still later are counted in a later step.

    It keeps ``rank`` up to date. The callables return the spans dropped so far by kind, the CPU time of the calling
    thread, and the training device.
    """

    def __init__(
        self,
        rank: LiveRank,
        listeners: Sequence[StepListener],
        *,
        dropped: Callable[[], Mapping[str, int]] = dict,
        thread_ns: Callable[[], int] = time.thread_time_ns,
        device: Callable[[], Device | None] | None = None,
    ) -> None:
        self.rank = rank
        self._listeners = list(listeners)
        self._dropped = dropped
        self._thread_ns = thread_ns
        self._device = device or training_device
        self._gil_yield = GilYield()
        self._pending = PendingRows(self._gil_yield)
        self._steps_are_ripe = False
        self._reported_overhead_ns = 0
        self._reported_dropped: Mapping[str, int] = {}
        self._is_off = False
        self._overflow_warned = False

    def write(self, rows: list[Row]) -> None:
        """Take the rows of one pass. Never raises: the trace does not depend on its live view."""
        if self._is_off or not self._listeners:
            return
        try:
            self._take(rows if isinstance(rows, RowBatch) else RowBatch(rows))
        except Exception:
            self._is_off = True
            _logger.warning("commtrace: live metrics are off; training and the trace go on", exc_info=True)
            self._close_listeners()

    def close(self) -> None:
        """Close the last steps and the listeners."""
        if not self._is_off and self._listeners:
            self.write([])
        self._close_listeners()

    def abandon_after_fork(self) -> None:
        self._is_off = True
        for listener in self._listeners:
            listener.abandon_after_fork()

    def _take(self, rows: RowBatch) -> None:
        marks = [row for row in rows if row.kind == schema.MARK]
        for mark in marks:
            self.rank.learn(mark)
        self.rank.spans += len(rows) - len(marks)
        self.rank.budget.add(rows, self.rank.marks.topology)
        before = len(self._pending)
        self._pending.add(rows)
        self.rank.dropped = dict(self._dropped())
        self.rank.overhead_ns = self._thread_ns()
        if self._steps_are_ripe:
            self._close_steps(before)
        self._steps_are_ripe = schema.STEP in map(attrgetter("kind"), rows)
        self._bound()

    def _close_steps(self, before: int) -> None:
        """Close the steps among the first ``before`` rows, which came with earlier passes."""
        # All together: one computation takes 2.4 ms of CPU for one step and 0.1 ms a step for fifty, on a thread that
        # shares the GIL with training (docs/overhead.md). With steps of 10 ms that is a quarter of a core, or 1 %.
        pending = self._pending
        spans, handed = pending.columns, pending.handed
        ripe = np.flatnonzero(spans.kind[:before] == schema.STEP)
        if not len(ripe):  # they were dropped
            return
        steps = ripe[np.lexsort((spans.start[ripe], spans.end[ripe]))]
        owner = owners(spans, steps)
        owner[handed] = NOBODY
        owned = self._rows_of_steps(owner, len(steps))
        detailed = {row.id: row.detail for row in pending.rows if row.detail and row.kind != schema.MARK}
        window = StepWindow(pending.names, spans, steps, owner, detailed)
        summaries = summarise(window, self.rank, self._extras(spans, owner, len(steps)), self._gil_yield)
        # Rows that reach beyond the closed steps are a part of the next step's partition as well.
        reaches = (spans.end > spans.end[steps[-1]]) & ~np.isin(spans.kind, (schema.STEP, schema.MARK))
        handed = handed | (owner != NOBODY)
        pending.keep(np.flatnonzero(~handed | reaches), handed)
        for summary, own_rows in zip(summaries, owned, strict=True):
            self._gil_yield.maybe_yield()
            self._hand_out(summary, own_rows)

    def _rows_of_steps(self, owner: Int64, count: int) -> list[list[Row]]:
        rows = self._pending.rows
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(count + 1)).tolist()
        at = order.tolist()
        return [[rows[one] for one in at[begin:end]] for begin, end in pairwise(bounds)]

    def _extras(self, spans: Spans, owner: Int64, count: int) -> list[StepExtras]:
        """Return the facts about each step that are not in spans."""
        rank = self.rank
        overhead, self._reported_overhead_ns = rank.overhead_ns - self._reported_overhead_ns, rank.overhead_ns
        before, self._reported_dropped = self._reported_dropped, rank.dropped
        news = {kind: count - before.get(kind, 0) for kind, count in rank.dropped.items()}
        dropped = {kind: count for kind, count in news.items() if count}
        is_mark = spans.kind == schema.MARK
        num_spans = np.bincount(owner[(owner != NOBODY) & ~is_mark], minlength=count).tolist()
        counts: list[dict[str, float]] = [{} for _ in range(count)]
        for at in np.flatnonzero(is_mark & (owner != NOBODY)).tolist():
            _count(counts[owner[at]], self._pending.rows[at])
        device = self._device()
        return [
            StepExtras(
                spans=num_spans[step],
                overhead_ns=overhead if step == 0 else 0,
                dropped=dropped if step == 0 else {},
                counts=counts[step],
                device=device,
            )
            for step in range(count)
        ]

    def _hand_out(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        for listener in list(self._listeners):
            try:
                listener.step(summary, rows)
            except Exception:
                self._listeners.remove(listener)
                _logger.warning(
                    "commtrace: %s failed and is switched off; training and the trace go on",
                    type(listener).__name__,
                    exc_info=True,
                )
                _close(listener)

    def _bound(self) -> None:
        excess = len(self._pending) - MOST_ROWS
        if excess <= 0:
            return
        self._pending.drop_oldest(excess)
        if not self._overflow_warned:
            self._overflow_warned = True
            _logger.warning(
                "commtrace: more than %d rows since the last complete step; the oldest are left out of live metrics "
                "(not of the trace). Where no framework is integrated, mark the steps: with commtrace.step(i):",
                MOST_ROWS,
            )

    def _close_listeners(self) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            _close(listener)


def _close(listener: StepListener) -> None:
    try:
        listener.close()
    except Exception:
        _logger.warning("commtrace: %s did not close cleanly", type(listener).__name__, exc_info=True)


def _count(counts: dict[str, float], mark: Row) -> None:
    if mark.name == "count":
        for name, number in json.loads(mark.detail or "{}").items():
            counts[name] = counts.get(name, 0) + number
