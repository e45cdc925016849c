"""Where compute lanes stood still, for traces that tell when they worked and when communication was in flight."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.trace.spans import Int64

_CLOCK_SLACK_NS: Final = 50_000
"""What is over so soon after a gap may have ended it: the ends of work and of communication are read one by one."""


class Intervals(NamedTuple):
    """Stretches of time, ns, column by column; none ends before it starts."""

    start: Int64
    end: Int64


class Stalls(NamedTuple):
    """A lane stood still from ``start`` to ``end``; ``on`` is a position in the communications given."""

    start: Int64
    end: Int64
    on: Int64


def gaps(steps: Intervals, work: Intervals, step: Int64) -> Intervals:
    """Where a lane did nothing, between the pieces of its work and the bounds of their steps; ascending.

    Args:
        steps: one behind the other.
        work: what the lane did, ascending within each step, and inside of it.
        step: of each piece of work, the position of its step.
    """
    number = np.arange(len(steps.start))
    # A piece of no length stands at either end of each step.
    order = np.argsort(np.concatenate([number, step, number]), kind="stable")
    start = np.concatenate([steps.start, work.start, steps.end])[order]
    end = np.concatenate([steps.start, work.end, steps.end])[order]
    idle = end[:-1] < start[1:]
    last_of_step = np.cumsum(np.bincount(step, minlength=len(number)) + 2) - 1
    idle[last_of_step[:-1]] = False  # what lies between two steps is in neither
    return Intervals(end[:-1][idle], start[1:][idle])


def stalls(idle: Intervals, communications: Intervals) -> Stalls:
    """What the lane stood still for in its gaps; by gap, and in each from its end backwards.

    What ends last in a gap is what kept the next piece of work from beginning. Before it came into flight, what ends
    last before that; and so on. Time at which nothing was in flight is no stall, nor is time at which only that was
    which goes on while the lane works again: the lane did not wait for it.

    Args:
        idle: the gaps, ascending and apart from each other.
        communications: what was in flight.
    """
    first = np.searchsorted(idle.end, communications.start, "right")
    count = np.maximum(np.searchsorted(idle.start, communications.end, "left") - first, 0)
    on = np.repeat(np.arange(len(count)), count)
    gap = first[on] + np.arange(len(on)) - np.repeat(np.cumsum(count) - count, count)
    waited_for = communications.end[on] <= idle.end[gap] + _CLOCK_SLACK_NS
    on, gap = on[waited_for], gap[waited_for]
    start, end = communications.start[on], communications.end[on]
    begin, until = np.maximum(start, idle.start[gap]), np.minimum(end, idle.end[gap])
    # From the last gap to the first, as the gaps are apart. Of two communications that end together, or just after the
    # gap, the one that came into flight last is the reason.
    order = np.lexsort((end, -start, -until))
    on, gap, begin, until = on[order], gap[order], begin[order], until[order]
    if len(on):
        until[1:] = np.minimum(until[1:], np.minimum.accumulate(begin)[:-1])
    found = np.flatnonzero(until > begin)
    found = found[np.argsort(gap[found], kind="stable")]
    return Stalls(begin[found], until[found], on[found])
