"""The begin and end of each rank's steps in a replay, in which all ranks begin a step together.

The time between steps (evaluation, checkpoints, logs) is left out, but other ranks may wait in the next step meanwhile.
So a late rank begins a step with the first rank, once its step before and its last stall have ended.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.replay.graph import ReplayError
from commtrace.analysis.steps.work_begins import work_begins
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64

NOT_IN_ORDER: Final = "Steps were not recorded in the order of their numbers, so they cannot be replayed."


class StepBounds(NamedTuple):
    """Begin and end of steps, ns."""

    ranks: Int64  # numbers, ascending
    steps: Int64  # numbers, ascending
    start: Int64  # shape (ranks, steps)
    end: Int64  # shape (ranks, steps)
    between_ns: Int64  # from the recorded begin of each step to ``start``, shape (ranks, steps)

    @classmethod
    def of(cls, run: Run, steps: Int64) -> StepBounds:
        """Return the bounds of steps, at least one, that every rank recorded on one clock.

        Raises:
            ReplayError: the steps were not recorded in the order of their numbers.
        """
        ranks = sorted(run.ranks)
        begin, start, end, since = np.array([_of_rank(run.ranks[rank], steps) for rank in ranks], np.int64).transpose(
            1, 0, 2
        )
        if (start[:, 1:] < start[:, :-1]).any():
            raise ReplayError(NOT_IN_ORDER)
        start = np.minimum(start, np.maximum(start.min(axis=0), since))
        return cls(np.array(ranks, np.int64), steps, start, end, np.maximum(start - begin, 0))

    def of_ranks(self, ranks: Int64) -> StepBounds:
        rows = np.searchsorted(self.ranks, ranks)
        columns = (column[rows] for column in (self.start, self.end, self.between_ns))
        return StepBounds(ranks, self.steps, *columns)


def _of_rank(trace: RankTrace, steps: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the begin of each step, of its work, its end, and the time since which the rank could have been in it."""
    spans = trace.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    number, work = spans.step[rows], work_begins(spans, rows)
    index = np.minimum(np.searchsorted(steps, number), len(steps) - 1)
    wanted = steps[index] == number
    index = index[wanted]
    begin, start, end, since = np.zeros((4, len(steps)), np.int64)
    begin[index], start[index], end[index] = spans.start[rows][wanted], work[wanted], spans.end[rows][wanted]
    # If the step before is not known, the time before a step is not either.
    ended_before = np.append(spans.start[rows][:1], spans.end[rows][:-1])
    follows = np.append(False, np.diff(number) == 1)
    since[index] = np.where(follows, ended_before, spans.start[rows])[wanted]
    if (since < start).any():
        stalls = spans.end[spans.kind == schema.STALL]
        last = np.searchsorted(np.sort(stalls), start, side="right") - 1
        waited = np.sort(stalls)[np.maximum(last, 0)] if len(stalls) else since
        since = np.where(last >= 0, np.maximum(since, np.minimum(waited, start)), since)
    return begin, start, end, since
