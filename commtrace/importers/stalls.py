"""Finds stalls in traces that hold only work and communication in flight."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.trace.spans import Int64

_CLOCK_SLACK_NS: Final = 50_000
"""Tolerance between the end of a gap and of its communication, whose ends are read one after the other."""


class Intervals(NamedTuple):
    """Intervals as columns, ns."""

    start: Int64
    end: Int64


class Stalls(NamedTuple):
    """Stalls as columns, ns; ``on`` is the position of the communication."""

    start: Int64
    end: Int64
    on: Int64


def gaps(steps: Intervals, work: Intervals, step: Int64) -> Intervals:
    """Return when a lane is idle in its steps, ascending.

    Args:
        steps: ascending.
        work: of the lane, ascending within each step, and inside of it.
        step: position of the step of each piece of work.
    """
    number = np.arange(len(steps.start))
    # Either end of each step is a piece of work without length.
    order = np.argsort(np.concatenate([number, step, number]), kind="stable")
    start = np.concatenate([steps.start, work.start, steps.end])[order]
    end = np.concatenate([steps.start, work.end, steps.end])[order]
    idle = end[:-1] < start[1:]
    last_of_step = np.cumsum(np.bincount(step, minlength=len(number)) + 2) - 1
    idle[last_of_step[:-1]] = False  # what lies between two steps is in neither
    return Intervals(end[:-1][idle], start[1:][idle])


def stalls(idle: Intervals, communications: Intervals) -> Stalls:
    """Return the stalls in the gaps of a lane; by gap, and in each from its end backwards.

    The communication that ends last in a gap delayed the next work. The time before its launch belongs to the one that
    ends last before that, and so on. Time without communication in flight is no stall, nor is communication that
    continues after the gap.

    Args:
        idle: ascending and disjoint.
        communications: in any order.
    """
    first = np.searchsorted(idle.end, communications.start, "right")
    count = np.maximum(np.searchsorted(idle.start, communications.end, "left") - first, 0)
    on = np.repeat(np.arange(len(count)), count)
    gap = first[on] + np.arange(len(on)) - np.repeat(np.cumsum(count) - count, count)
    waited_for = communications.end[on] <= idle.end[gap] + _CLOCK_SLACK_NS
    on, gap = on[waited_for], gap[waited_for]
    start, end = communications.start[on], communications.end[on]
    begin, until = np.maximum(start, idle.start[gap]), np.minimum(end, idle.end[gap])
    # From the last gap to the first. Of two communications that end together, or just after the gap, the one that
    # started last is the reason.
    order = np.lexsort((end, -start, -until))
    on, gap, begin, until = on[order], gap[order], begin[order], until[order]
    if len(on):
        until[1:] = np.minimum(until[1:], np.minimum.accumulate(begin)[:-1])
    found = np.flatnonzero(until > begin)
    found = found[np.argsort(gap[found], kind="stable")]
    return Stalls(begin[found], until[found], on[found])
