"""Where the work of a step begins: its time before that lies between it and the step before.

A step lasts from the end of the one before. What a script does outside of steps that it marks, and an evaluation or a
checkpoint between two iterations, is recorded as rows of kind ``between`` at the begin of the step.
"""

from __future__ import annotations

import numpy as np

from commtrace.trace import schema
from commtrace.trace.spans import Int64, Spans


def work_begins(spans: Spans, steps: Int64) -> Int64:
    """Return, of these rows of steps of one rank, the instant at which the work of each begins, ns."""
    start, end = spans.start[steps], spans.end[steps]
    between = np.flatnonzero(spans.kind == schema.BETWEEN)
    if not len(between):
        return start
    between = between[np.argsort(spans.end[between], kind="stable")]
    last = between[np.maximum(np.searchsorted(spans.end[between], end, side="right") - 1, 0)]
    is_within = (spans.start[last] >= start) & (spans.end[last] <= end)
    return np.where(is_within, spans.end[last], start)
