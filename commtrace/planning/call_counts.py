"""Count the calls of communication of a run, by rank and step, to compare them with a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.keys import grouped_rows
from commtrace.analysis.matching.operations import communication_rows
from commtrace.trace import schema
from commtrace.trace.run import RankTrace
from commtrace.trace.spans import Bool, Int64, Spans

OUTSIDE: Final = "outside"
_WHEN: Final = (OUTSIDE, "forward", "backward")


class CountedCall(NamedTuple):
    """A kind of communication."""

    role: str
    operation: str
    when: str  # forward, backward, or outside of both
    num_bytes: int  # of the full tensor; −1 if unknown


Counts: TypeAlias = Mapping[CountedCall, int]
"""The calls of one rank in one step."""

Shape: TypeAlias = frozenset[tuple[tuple[str, str, int], int]]
"""Calls by role, operation and bytes, without what is uneven: equal in steps that sent the same."""


def shape(counts: Counts) -> Shape:
    """Return the calls without their place in the step, and those of uneven size without their bytes."""
    shapes: Counter[tuple[str, str, int]] = Counter()
    for call, count in counts.items():
        shapes[call.role, call.operation, -1 if is_uneven(call.role, call.operation) else call.num_bytes] += count
    return frozenset(shapes.items())


def is_uneven(role: str, operation: str) -> bool:
    """Return whether bytes follow the routing of tokens to experts, and so differ between steps and ranks."""
    return (role, operation) == ("ep", "all_to_all") or role == "expert-tp"


class AlikeSteps(NamedTuple):
    """Steps in which a rank sent the same."""

    steps: tuple[int, ...]
    counts: Counts  # of the last of them


@dataclass(frozen=True, slots=True)
class CallCounts:
    """What each rank sent in the steps of a run. The sum of two is that of the steps of both."""

    ranks: Mapping[int, Mapping[Shape, AlikeSteps]]
    optimizer_steps: int  # of all ranks
    recomputations: int

    def __add__(self, other: CallCounts) -> CallCounts:
        ranks = {rank: dict(self.ranks.get(rank, {})) for rank in {**self.ranks, **other.ranks}}
        for rank, counts_of_shape in other.ranks.items():
            for key, alike in counts_of_shape.items():
                before = ranks[rank].get(key, AlikeSteps((), {}))
                ranks[rank][key] = AlikeSteps((*before.steps, *alike.steps), alike.counts)
        return CallCounts(
            ranks,
            self.optimizer_steps + other.optimizer_steps,
            self.recomputations + other.recomputations,
        )

    def usual(self, rank: int) -> AlikeSteps:
        """Return the steps in which a rank sent what it did most often; of equally many, the last ones."""
        return max(self.ranks[rank].values(), key=lambda alike: (len(alike.steps), alike.steps[-1]))

    def unusual_steps(self, rank: int) -> list[int]:
        """Return the steps in which a rank sent something else."""
        usual = self.usual(rank).steps
        return sorted({step for alike in self.ranks[rank].values() for step in alike.steps}.difference(usual))


def count_calls(analysis: Analysis) -> CallCounts:
    """Count the calls of the steps that count; to be handed to ``measure_run``."""
    spans = [trace.spans for trace in analysis.run.ranks.values()]
    return CallCounts(
        ranks={rank: _alike_steps(analysis, trace) for rank, trace in analysis.run.ranks.items()},
        optimizer_steps=sum(int(np.count_nonzero(spans_of_rank.kind == schema.OPTIMIZER)) for spans_of_rank in spans),
        recomputations=sum(int(np.count_nonzero(spans_of_rank.kind == schema.RECOMPUTE)) for spans_of_rank in spans),
    )


def _alike_steps(analysis: Analysis, trace: RankTrace) -> dict[Shape, AlikeSteps]:
    by_shape: dict[Shape, AlikeSteps] = {}
    for step, counts in _steps(analysis, trace):
        key = shape(counts)
        by_shape[key] = AlikeSteps((*(by_shape[key].steps if key in by_shape else ()), step), counts)
    return by_shape


def _steps(analysis: Analysis, trace: RankTrace) -> Iterator[tuple[int, Counts]]:
    """Yield the calls of each step of a rank, also of those without any."""
    spans, roles = trace.spans, analysis.roles
    rows = np.flatnonzero(communication_rows(spans))
    role = roles.ranks[trace.rank].role[rows]
    columns = (spans.step[rows], role, spans.name[rows], _when(spans, rows), spans.bytes[rows])
    counts: dict[int, dict[CountedCall, int]] = {step: {} for step in analysis.steps.used}
    if len(rows):
        example, which = grouped_rows(columns)
        values = zip(*(column[example].tolist() for column in columns), np.bincount(which).tolist(), strict=True)
        for step, word, name, when, num_bytes, count in values:
            call = CountedCall(roles.words[word], analysis.run.names[name], _WHEN[when], num_bytes)
            counts.setdefault(step, {})[call] = count
    yield from sorted(counts.items())


def _when(spans: Spans, rows: Int64) -> Int64:
    """Return for each row the position in ``_WHEN`` of the phase that it was called in."""
    in_forward = _inside(spans, spans.kind == schema.FORWARD, rows)
    in_backward = _inside(spans, spans.kind == schema.BACKWARD, rows)
    return np.where(in_backward, 2, np.where(in_forward, 1, 0)).astype(np.int64)


def _inside(spans: Spans, phases: Bool, rows: Int64) -> Bool:
    begins, ends = np.sort(spans.start[phases]), np.sort(spans.end[phases])
    called = spans.start[rows]
    return np.asarray(np.searchsorted(begins, called, "right") > np.searchsorted(ends, called, "right"))
