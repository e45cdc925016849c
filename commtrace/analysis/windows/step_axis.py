"""Places of rows among the steps of their rank, whether or not they carry the number of one.

A *place* counts steps in the order in which they began. Numbers are the program's own: it may skip or repeat some.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commtrace.analysis.steps.attempts import number_of
from commtrace.analysis.steps.choice import contiguous
from commtrace.trace import schema
from commtrace.trace.spans import Int32, Int64, Spans


class Reach(NamedTuple):
    """The place of the step that each row belongs to, and of the first and the last step that it touches."""

    place: Int64
    first: Int64
    last: Int64


class StepAxis(NamedTuple):
    """The recorded steps of a rank, in the order in which they began; times in ns.

    A row without the number of a recorded step belongs to the step that had begun last before it; −1 before all.
    """

    number: Int32
    start: Int64
    end: Int64

    @classmethod
    def none(cls) -> StepAxis:
        """Return the axis of a rank without recorded steps."""
        return cls.of(Spans.empty())

    @classmethod
    def of(cls, spans: Spans) -> StepAxis:
        """Read the steps among these rows; without a copy if these are nothing but steps, in order."""
        rows = contiguous(spans.kind == schema.STEP)
        number, start, end = spans.step[rows], spans.start[rows], spans.end[rows]
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            number, start, end = number[order], start[order], end[order]
        return cls(number, start, end)

    def plus(self, other: StepAxis) -> StepAxis:
        """Return the steps of both."""
        start = np.concatenate([self.start, other.start])
        order = np.argsort(start, kind="stable")
        return StepAxis(
            np.concatenate([self.number, other.number])[order],
            start[order],
            np.concatenate([self.end, other.end])[order],
        )

    def split(self, at: int) -> tuple[StepAxis, StepAxis]:
        """Return the steps before a place and the others; negative places count from the end."""
        before = StepAxis(self.number[:at], self.start[:at], self.end[:at])
        return before, StepAxis(self.number[at:], self.start[at:], self.end[at:])

    def begun(self, times: Int64) -> Int64:
        """Return the place of the last step that had begun at each instant."""
        return np.asarray(np.searchsorted(self.start, times, side="right") - 1)

    def reach(self, spans: Spans) -> Reach:
        """Return the steps of these rows; an end at the very begin of a step does not touch it."""
        first = self.begun(spans.start)
        last = self.begun(np.maximum(spans.end - 1, spans.start))
        return Reach(self._places(spans, first), first, last)

    def _places(self, spans: Spans, begun: Int64) -> Int64:
        """Return the place of each row's number: of several, the last one that had begun, else the first."""
        order = np.argsort(self.number, kind="stable")
        ordered = self.number[order]
        low, high = (np.searchsorted(ordered, spans.step, side=side) for side in ("left", "right"))
        is_known = (spans.step >= 0) & (high > low)
        place = begun.copy()
        only = np.flatnonzero(is_known & (high - low == 1))
        place[only] = order[low[only]]
        for row in np.flatnonzero(is_known & (high - low > 1)).tolist():
            positions = order[low[row] : high[row]]
            place[row] = positions[max(int(np.searchsorted(positions, begun[row], side="right")) - 1, 0)]
        return place

    def overlapping(self, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last place of the steps that overlap each interval; if none does, last < first."""
        ended = np.maximum.accumulate(self.end)
        return np.searchsorted(ended, begin, side="right"), np.searchsorted(self.start, end) - 1

    def numbers(self, first: int, last: int) -> tuple[int, int]:
        """Return the lowest and the highest number that a row at these places can carry."""
        numbers = number_of(self.number[max(first, 0) : last + 1])
        # Before the first step and after the last one there may be some that were never recorded to end.
        is_first, is_last = first < 0 or not len(numbers), last >= len(self.number) - 1 or not len(numbers)
        return 0 if is_first else int(numbers.min()), int(np.iinfo(np.int32).max) if is_last else int(numbers.max())

    def times(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and the last begin of rows that belong to these places by time alone, inclusive."""
        begin = int(self.start[first]) if 0 <= first < len(self.start) else int(np.iinfo(np.int64).min)
        end = int(self.start[last + 1]) - 1 if last + 1 < len(self.start) else int(np.iinfo(np.int64).max)
        return begin, end
