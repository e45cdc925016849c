"""Gather rows until their step is complete, and hand summaries of complete steps to listeners."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from commtrace.live.gil import GilYield
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepExtras, SummaryInput, summarise
from commtrace.live.summary import DeviceMemory, StepListener, StepSummary, training_device
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
    """Rows in the order of arrival, as columns whose codes index ``names``; ``made`` are those that came as rows."""

    def __init__(self, gil_yield: GilYield) -> None:
        self._gil_yield = gil_yield
        self.made: list[Row] = []
        self.names: list[str] = []
        self._columns: list[Spans] = []
        self._handed: list[Bool] = []
        self._is_made: list[Bool] = []

    def __len__(self) -> int:
        return sum(map(len, self._columns))

    @property
    def columns(self) -> Spans:
        """Return the columns of all rows, joined once."""
        self._columns = [Spans.concatenate(self._columns)]
        return self._columns[0]

    @property
    def handed(self) -> Bool:
        """Return a mask of the rows that listeners have received."""
        return _joined(self._handed)

    @property
    def is_made(self) -> Bool:
        """Return a mask of the rows that are in ``made``, where they have the same order."""
        return _joined(self._is_made)

    def add(self, batch: RowBatch) -> None:
        """Take new rows; of marks, those of a step."""
        spans, rows = batch.columns, batch.rows
        is_made = np.arange(len(spans)) < len(rows)
        is_wanted = (spans.kind != schema.MARK) | (spans.step >= 0)
        if not is_wanted.all():
            rows = [rows[at] for at in np.flatnonzero(is_wanted & is_made).tolist()]
            spans, is_made = spans.take(is_wanted), is_made[is_wanted]
        self._columns.append(self._recoded(spans, batch.names))
        self._handed.append(np.zeros(len(spans), np.bool_))
        self._is_made.append(is_made)
        self.made += rows
        self._gil_yield.maybe_yield()

    def _recoded(self, spans: Spans, words: Sequence[str]) -> Spans:
        own = {name: code for code, name in enumerate(self.names)}
        for word in words:
            if word not in own:
                own[word] = len(self.names)
                self.names.append(word)
        codes = np.array([*(own[word] for word in words), schema.NOT_APPLICABLE], np.int32)  # −1 is the last one
        return spans.replace(name=codes[spans.name], dtype=codes[spans.dtype])

    def made_at(self, rows: Int64) -> list[Row]:
        """Return the rows at these positions, of those that came as rows."""
        number = np.cumsum(self.is_made) - 1
        return [self.made[at] for at in number[rows[self.is_made[rows]]].tolist()]

    def in_groups(self, group: Int64, count: int) -> list[RowBatch]:
        """Return the rows of each group, by the number of its group; rows of a negative one are left out."""
        order = np.argsort(group, kind="stable")
        order = order[np.searchsorted(group[order], 0) :]
        is_made = self.is_made[order]
        of_rows, of_spans = order[is_made], order[~is_made]
        rows, spans = self.made_at(of_rows), self.columns.take(of_spans)
        numbers = np.arange(count + 1)
        bounds_of_rows = pairwise(np.searchsorted(group[of_rows], numbers).tolist())
        bounds_of_spans = pairwise(np.searchsorted(group[of_spans], numbers).tolist())
        return [
            RowBatch(rows[slice(*bounds)], spans.take(slice(*bounds_of_columns)), self.names)
            for bounds, bounds_of_columns in zip(bounds_of_rows, bounds_of_spans, strict=True)
        ]

    def keep(self, kept: Int64, handed: Bool) -> None:
        """Keep the rows at these ascending positions; ``handed`` is the mask of all rows."""
        self.made = self.made_at(kept)
        self._columns = [self.columns.take(kept)]
        self._handed = [handed[kept]]
        self._is_made = [self.is_made[kept]]
        self._forget_names()

    def drop_oldest(self, count: int) -> None:
        del self.made[: np.count_nonzero(self.is_made[:count])]
        self._handed = [self.handed[count:]]
        self._is_made = [self.is_made[count:]]
        while count:
            oldest = self._columns.pop(0)
            if len(oldest) > count:
                self._columns.insert(0, oldest.take(slice(count, None)))
            count -= min(count, len(oldest))
        self._forget_names()

    def _forget_names(self) -> None:
        if len(self.names) > _SPARE_NAMES + 2 * len(self):
            spans = self.columns
            used = np.unique(np.concatenate([spans.name, spans.dtype]))
            used = used[used >= 0]
            codes = np.full(len(self.names) + 1, schema.NOT_APPLICABLE, np.int32)  # −1 is the last one
            codes[used] = np.arange(len(used))
            self._columns = [spans.replace(name=codes[spans.name], dtype=codes[spans.dtype])]
            self.names = [self.names[code] for code in used.tolist()]


def _joined(masks: list[Bool]) -> Bool:
    """Join masks, once."""
    masks[:] = [np.concatenate([np.empty(0, np.bool_), *masks])]
    return masks[0]


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
        device: Callable[[], DeviceMemory | None] | None = None,
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

    def write(self, rows: Sequence[Row]) -> None:
        """Take the rows of one pass. Never raises: the trace does not depend on its live view."""
        if self._is_off or not self._listeners:
            return
        try:
            self._take(RowBatch.of(rows))
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
        marks = [row for row in rows.rows if row.kind == schema.MARK]
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
        self._steps_are_ripe = bool((rows.columns.kind == schema.STEP).any())
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
        owned = pending.in_groups(owner, len(steps))
        detailed = {row.id: row.detail for row in pending.made if row.detail and row.kind != schema.MARK}
        self.rank.follow(spans.take(owner >= 0), pending.names)
        source = SummaryInput(pending.names, spans, steps, owner, detailed)
        is_quiet = [self.rank.own_cost.is_quiet(step) for step in spans.step[steps].tolist()]
        summaries = summarise(source, self.rank, self._extras(spans, owner, is_quiet), self._gil_yield)
        # Rows that reach beyond the closed steps are a part of the next step's partition as well.
        reaches = (spans.end > spans.end[steps[-1]]) & ~np.isin(spans.kind, (schema.STEP, schema.MARK))
        handed = handed | (owner != NOBODY)
        pending.keep(np.flatnonzero(~handed | reaches), handed)
        for summary, own_rows, quiet in zip(summaries, owned, is_quiet, strict=True):
            self.rank.own_cost.add(summary.step, summary.duration_ns, summary.counts)
            self._gil_yield.maybe_yield()
            if not quiet:  # nothing is known of it that a listener could tell
                self._hand_out(summary, own_rows)

    def _extras(self, spans: Spans, owner: Int64, is_quiet: Sequence[bool]) -> list[StepExtras]:
        """Return the facts about each step that are not in spans."""
        rank, count = self.rank, len(is_quiet)
        first = is_quiet.index(False) if False in is_quiet else -1
        if first < 0:
            return [StepExtras(0, 0, {}, counts, None) for counts in self._counts(spans, owner, count)]
        overhead, self._reported_overhead_ns = rank.overhead_ns - self._reported_overhead_ns, rank.overhead_ns
        before, self._reported_dropped = self._reported_dropped, rank.dropped
        news = {kind: count - before.get(kind, 0) for kind, count in rank.dropped.items()}
        dropped = {kind: count for kind, count in news.items() if count}
        is_mark = spans.kind == schema.MARK
        num_spans = np.bincount(owner[(owner != NOBODY) & ~is_mark], minlength=count).tolist()
        counts = self._counts(spans, owner, count)
        device = self._device()
        return [
            StepExtras(
                spans=num_spans[step],
                overhead_ns=overhead if step == first else 0,
                dropped=dropped if step == first else {},
                counts=counts[step],
                device=device,
            )
            for step in range(count)
        ]

    def _counts(self, spans: Spans, owner: Int64, count: int) -> list[dict[str, float]]:
        """Return what the script counted in each step."""
        counts: list[dict[str, float]] = [{} for _ in range(count)]
        told = np.flatnonzero((spans.kind == schema.MARK) & (owner != NOBODY))
        for step, mark in zip(owner[told].tolist(), self._pending.made_at(told), strict=True):
            _count(counts[step], mark)
        return counts

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
