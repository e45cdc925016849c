"""Assigns rows to steps that are closed together."""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.trace import schema
from commtrace.trace.spans import Int32, Int64, Spans

NOBODY: Final = -1


def owners(spans: Spans, steps: Int64) -> Int64:
    """Of every row the position of its step in ``steps``; ``NOBODY`` where it is for a later pass.

    A step owns its own row. Another row's is the first step that bears its number, or begins after it, or ends after
    it where it was in no step.

    Args:
        spans: rows.
        steps: rows of the steps, by their end, then by their start.
    """
    count = len(steps)
    start, end, number = spans.start[steps], spans.end[steps], spans.step[steps]
    begins_after = np.searchsorted(np.maximum.accumulate(start), spans.start, side="right")
    ends_after = np.where(spans.step < 0, np.searchsorted(end, spans.start, side="right"), count)
    owner = np.minimum(np.minimum(begins_after, ends_after), _numbered(spans, number, start))
    owner = np.where((owner < count) & (spans.kind != schema.STEP), owner, NOBODY)
    owner[steps] = np.arange(count)
    return owner


def _numbered(spans: Spans, number: Int32, start: Int64) -> Int64:
    """Return the first step of the row's number before which this number is not used again; the number of steps
    without.
    """
    count = len(number)
    order = np.argsort(number, kind="stable")
    ordered = np.append(number[order], np.iinfo(number.dtype).max)
    again = _again(number.tolist(), start.tolist())
    at = np.searchsorted(ordered[:count], spans.step)
    found = np.append(order, count)[np.where(ordered[at] == spans.step, at, count)]
    while len(late := np.flatnonzero(spans.start >= again[found])):
        at[late] += 1
        found[late] = order[at[late]]
    return found


def _again(number: list[int], start: list[int]) -> Int64:
    """Return when the number of each step is used again at the earliest by a later one; never, as of the entry
    behind them.
    """
    never = np.iinfo(np.int64).max
    again = np.full(len(number) + 1, never)
    begins: dict[int, int] = {}
    for at in reversed(range(len(number))):
        again[at] = begins.get(number[at], never)
        begins[number[at]] = min(again[at], start[at])
    return again
