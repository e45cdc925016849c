"""What ranks do between two steps on purpose, and how long they wait there for others: a replay has only the steps.

What a late rank does while others are in the next step is part of that step (:mod:`.step_bounds`). But where ranks meet
before it, as at the end of an evaluation, those that are done wait between the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import IntervalUnion, union
from commtrace.analysis.replay.program import Program
from commtrace.findings.causes import CHECKPOINT, EVALUATION
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64, Spans

ON_PURPOSE: Final[Mapping[str, int]] = {CHECKPOINT: schema.CHECKPOINT, EVALUATION: schema.EVALUATION}
"""The kinds of spans by cause. Of nested ones the first counts."""


class BetweenSteps(NamedTuple):
    """Times between each step and the one before, ns; those after the last step of the run count for that one."""

    pauses_ns: Mapping[str, Int64]  # by ON_PURPOSE, without waiting; shape (ranks, steps)
    waited_ns: Int64  # for communication, shape (ranks, steps)

    @classmethod
    def of(cls, run: Run, program: Program) -> BetweenSteps:
        """Return the times between the steps of a program; ``run`` has the rows between them, on one clock."""
        shape = program.start_ns.shape
        pauses = {cause: np.zeros(shape, np.int64) for cause in ON_PURPOSE}
        waited = np.zeros(shape, np.int64)
        for row, rank in enumerate(program.ranks.tolist()):
            trace = run.ranks[rank]
            if np.isin(trace.spans.kind, [*ON_PURPOSE.values()]).any():
                of_causes, waited[row] = _of_rank(trace, program.steps, program.start_ns[row])
                for cause, ns in zip(ON_PURPOSE, of_causes, strict=True):
                    pauses[cause][row] = ns
        return cls(pauses, waited)

    @classmethod
    def joined(cls, parts: Sequence[BetweenSteps]) -> BetweenSteps:
        """Return the times of the steps of all parts."""
        pauses = {cause: np.hstack([part.pauses_ns[cause] for part in parts]) for cause in ON_PURPOSE}
        return cls(pauses, np.hstack([part.waited_ns for part in parts]))

    def of_steps(self, chosen: Bool) -> BetweenSteps:
        return BetweenSteps({cause: ns[:, chosen] for cause, ns in self.pauses_ns.items()}, self.waited_ns[:, chosen])


def _of_rank(trace: RankTrace, steps: Int64, begins: Int64) -> tuple[list[Int64], Int64]:
    """Return the time of each cause, and the waiting, before each step and after the last one of the run."""
    spans = trace.spans
    of_steps = np.flatnonzero(spans.kind == schema.STEP)
    of_steps = of_steps[np.argsort(spans.start[of_steps], kind="stable")]
    number, end = spans.step[of_steps], spans.end[of_steps]
    following = np.searchsorted(number, steps)  # the steps of a program are in order
    ended_before = np.where(following > 0, end[np.maximum(following - 1, 0)], begins)
    gaps = [(np.minimum(ended_before, begins), begins)]
    if steps[-1] == number[-1]:  # after it
        last, until = np.zeros((2, len(steps)), np.int64)
        last[-1], until[-1] = end[-1], max(int(spans.end.max()), int(end[-1]))
        gaps.append((last, until))
    covered = _rows(spans, schema.STALL)
    waited = _inside(union(*covered), gaps)
    times, before = [], waited
    for kind in ON_PURPOSE.values():
        rows = _rows(spans, kind)
        covered = np.concatenate([covered[0], rows[0]]), np.concatenate([covered[1], rows[1]])
        so_far = _inside(union(*covered), gaps)
        times.append(so_far - before)
        before = so_far
    return times, waited


def _rows(spans: Spans, kind: int) -> tuple[Int64, Int64]:
    rows = spans.kind == kind
    return spans.start[rows], spans.end[rows]


def _inside(covering: IntervalUnion, gaps: Sequence[tuple[Int64, Int64]]) -> Int64:
    return np.asarray(sum(covering.before(until) - covering.before(since) for since, until in gaps), np.int64)
