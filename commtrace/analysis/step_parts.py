"""Steps are independent of one another: a run is cut into ranges of them, which are analysed side by side.

A part holds all rows of its steps and whatever else overlaps them in time, so what is found in it does not depend on
where the run was cut. Parts go to a :class:`concurrent.futures.Executor`: threads, processes, or those of a cluster.

>>> with ThreadPoolExecutor() as pool:                          # doctest: +SKIP
...     program = build_program(run, matches, StepWorkers(pool, parts=8))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from commtrace.analysis.match import Matches
from commtrace.analysis.step_bounds import StepBounds
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StepWorkers:
    """Who analyses the parts of a run, and how many parts there are at most."""

    executor: Executor
    parts: int

    def map(self, function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> list[_Result]:
        """``function`` of each of these arguments, in their order."""
        waiting = [self.executor.submit(function, *own) for own in arguments]
        return [one.result() for one in waiting]

    def ranges(self, steps: Sequence[int]) -> list[list[int]]:
        """The steps, cut into ranges of about equal length; none of them empty."""
        return [part.tolist() for part in np.array_split(np.asarray(steps), self.parts) if len(part)]


@dataclass(frozen=True, slots=True)
class StepPart:
    """Some steps of a run.

    Attributes:
        run, matches: the rows of these steps and those that overlap them.
        rows: by rank, which rows of the whole run they are.
    """

    run: Run
    matches: Matches
    rows: Mapping[int, Int64]


def cut(run: Run, matches: Matches, bounds: StepBounds) -> StepPart:
    """The part of these steps. Process groups stay behind: no part needs them, and they are large."""
    rows = {rank: np.flatnonzero(_belongs(trace, bounds)) for rank, trace in run.ranks.items()}
    ranks = {
        rank: replace(trace, spans=trace.spans.take(rows[rank]), groups={}, anchors=(), in_flight=())
        for rank, trace in run.ranks.items()
    }
    matched = {rank: matches.ranks[rank].take(rows[rank]) for rank in ranks}
    return StepPart(replace(run, ranks=ranks), replace(matches, ranks=matched), rows)


def _belongs(trace: RankTrace, bounds: StepBounds) -> Bool:
    spans, rank = trace.spans, np.searchsorted(bounds.ranks, trace.rank)
    chosen = (spans.step >= bounds.steps[0]) & (spans.step <= bounds.steps[-1])
    overlaps = (spans.start <= bounds.end[rank, -1]) & (spans.end >= bounds.start[rank, 0])
    return np.asarray(chosen | (overlaps & (spans.kind != schema.STEP)))
