"""Gathers rows until a step is complete and tells the listeners."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from commtrace.live.device import Device, training_device
from commtrace.live.gil import let_go_of_the_gil
from commtrace.live.listener import StepListener
from commtrace.live.rank import LiveRank
from commtrace.live.summarise import StepWindow, summarise
from commtrace.live.summary import StepSummary
from commtrace.trace import schema
from commtrace.trace.spans import Spans
from commtrace.trace.writer import Row

_logger = logging.getLogger("commtrace")

MOST_ROWS: Final = 100_000
"""So many rows are kept for steps that are not complete; of more, the oldest are let go, which is said once."""

_KIND, _NAME, _START, _END, _STEP = 0, 1, 3, 4, 5
_ID: Final = schema.SCHEMA.get_field_index("id")
_LARGEST: Final = np.iinfo(np.int64).max


class StepCollector:
    """A sink of the recorder: summarises every step once its rows are in.

    A step is closed by the second pass after its ``step`` row: what is only known later (the end of an asynchronous
    communication) may arrive after it. What comes later still is counted in a later step.

    Args:
        rank: is kept up to date with what the rows tell.
        listeners: told of every step.
        dropped: spans dropped so far, by kind.
        thread_ns: CPU time of the calling thread.
        device: what the process trains on; without, torch is asked.
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
        self._pending: list[Row] = []
        self._handed = bytearray()  # aligned with the pending rows: 1 for those that a listener has had
        self._ripe: list[Row] = []
        self._told_overhead_ns = 0
        self._told_dropped: Mapping[str, int] = {}
        self._is_off = False
        self._overflow_told = False

    def write(self, rows: list[Row]) -> None:
        """Take the rows of one pass. Never raises: a trace is written whatever becomes of its live view."""
        if self._is_off or not self._listeners:
            return
        try:
            self._take(rows)
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
        """In a forked child: nothing here is its own."""
        self._is_off = True
        for listener in self._listeners:
            listener.abandon_after_fork()

    def _take(self, rows: Sequence[Row]) -> None:
        for mark in (row for row in rows if row[_KIND] == schema.MARK):
            self.rank.learn(mark)
        self.rank.spans += sum(row[_KIND] != schema.MARK for row in rows)
        new = [row for row in rows if row[_KIND] != schema.MARK or row[_STEP] >= 0]
        self._pending += new
        self._handed += bytes(len(new))
        ripe, self._ripe = self._ripe, [row for row in new if row[_KIND] == schema.STEP]
        self.rank.dropped = dict(self._dropped())
        self.rank.overhead_ns = self._thread_ns()
        if ripe:
            self._close_steps(sorted(ripe, key=lambda step: (step[_END], step[_START])))
        self._bound()

    def _close_steps(self, steps: Sequence[Row]) -> None:
        names: list[str] = []
        rows = self._pending
        let_go_of_the_gil()
        spans = Spans.from_tuples(rows, names)
        details = {row[_ID]: row[-1] for row in rows if row[-1] and row[_KIND] != schema.MARK}
        handed = np.frombuffer(self._handed, np.bool_).copy()
        device = self._device()
        for position, step in enumerate(steps):
            let_go_of_the_gil()
            own = ~handed & self._belongs(spans, step, steps[position + 1 :])
            handed |= own
            own_rows = [rows[at] for at in np.flatnonzero(own).tolist()]
            window = StepWindow(names, spans, own, details)
            number, start, end = step[_STEP], step[_START], step[_END]
            self._tell(
                summarise(window, number, start, end, self.rank, device=device, **self._told(own_rows)), own_rows
            )
        # What reaches beyond the steps that are closed is a part of the next one's partition as well.
        reaches = (spans.end > max(step[_END] for step in steps)) & ~np.isin(spans.kind, (schema.STEP, schema.MARK))
        kept = np.flatnonzero(~handed | reaches)
        self._pending = [rows[at] for at in kept.tolist()]
        self._handed = bytearray(handed[kept].tobytes())

    @staticmethod
    def _belongs(spans: Spans, step: Row, later_steps: Sequence[Row]) -> Any:
        """Rows that the step is handed: those that bear its number, what came before it, what was in no step."""
        start, end = step[_START], step[_END]
        again = min((row[_START] for row in later_steps if row[_STEP] == step[_STEP]), default=_LARGEST)
        numbered = (spans.step == step[_STEP]) & (spans.start < again)
        earlier = (spans.start < start) | ((spans.step < 0) & (spans.start < end))
        is_step = spans.kind == schema.STEP
        this_step = is_step & (spans.start == start) & (spans.end == end) & (spans.step == step[_STEP])
        return np.where(is_step, this_step, numbered | earlier)

    def _told(self, own_rows: Sequence[Row]) -> dict[str, Any]:
        rank = self.rank
        overhead, self._told_overhead_ns = rank.overhead_ns - self._told_overhead_ns, rank.overhead_ns
        before, self._told_dropped = self._told_dropped, rank.dropped
        news = {kind: count - before.get(kind, 0) for kind, count in rank.dropped.items()}
        return {
            "spans": sum(row[_KIND] != schema.MARK for row in own_rows),
            "overhead_ns": overhead,
            "dropped": {kind: count for kind, count in news.items() if count},
            "counts": _counts(own_rows),
        }

    def _tell(self, summary: StepSummary, rows: Sequence[Row]) -> None:
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
        del self._pending[:excess]
        del self._handed[:excess]
        if not self._overflow_told:
            self._overflow_told = True
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
        _logger.warning("commtrace: %s did not close in order", type(listener).__name__, exc_info=True)


def _counts(rows: Sequence[Row]) -> dict[str, float]:
    """What the script told of the step, added up."""
    counts: dict[str, float] = {}
    for row in rows:
        if row[_KIND] == schema.MARK and row[_NAME] == "count":
            for name, number in json.loads(row[-1]).items():
                counts[name] = counts.get(name, 0) + number
    return counts
