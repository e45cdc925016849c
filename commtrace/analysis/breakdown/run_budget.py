"""Divide the wall time of a whole run: every instant is in one part on every rank, also between steps and attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import paint
from commtrace.analysis.breakdown.rank_means import apportion
from commtrace.analysis.steps.attempts import is_earlier, number_of
from commtrace.analysis.steps.work_begins import work_begins
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64

UNKNOWN, RESTART, START, LOADING, TRAINING, REPEATED, EVALUATION, CHECKPOINT = range(8)
PARTS: Final = ("unknown", "restart", "start", "loading", "training", "repeated", "evaluation", "checkpoint")
"""In ascending priority: the last part that claims an instant gets it."""

PART_OF_KIND: Final = {
    schema.DATA: LOADING,
    schema.STEP: TRAINING,
    schema.EVALUATION: EVALUATION,
    schema.CHECKPOINT: CHECKPOINT,
}


_TOGETHER: Final = 64
"""Ranks whose times are painted on one axis: a run may take months, and their ns must fit into 64 bits."""

_NO_TIMES: Final = np.zeros(0, np.int64)


class PartIntervals(NamedTuple):
    """Intervals of one part, ns, half-open."""

    part: int
    start: Int64
    end: Int64


def divide(claims: Sequence[PartIntervals], begin: int, end: int) -> list[int]:
    """Return the length of each of :data:`PARTS` between two instants, ns; they add up to ``end - begin``."""
    return [int(time) for time in divide_ranks([claims], begin, end)[0]]


def divide_ranks(claims: Sequence[Sequence[PartIntervals]], begin: int, end: int) -> Int64:
    """Return the same of each rank, by its claims: shape (ranks, parts)."""
    parts = [_divide_together(claims[at : at + _TOGETHER], begin, end) for at in range(0, len(claims), _TOGETHER)]
    return np.concatenate([np.zeros((0, len(PARTS)), np.int64), *parts])


def _divide_together(claims: Sequence[Sequence[PartIntervals]], begin: int, end: int) -> Int64:
    length, count = end - begin, len(claims)
    every = [(rank, claim) for rank, claims_of_rank in enumerate(claims) for claim in claims_of_rank]
    lengths = [len(claim.start) for _, claim in every]
    rank = np.repeat(np.array([rank for rank, _ in every], np.int64), lengths)
    part = np.repeat(np.array([claim.part for _, claim in every], np.int64), lengths)
    # The ranks follow each other on one axis.
    starts, ends = (
        np.clip(np.concatenate([_NO_TIMES, *times]), begin, end) - begin + rank * length
        for times in ([claim.start for _, claim in every], [claim.end for _, claim in every])
    )
    priority = np.empty(len(part), np.int64)
    priority[np.argsort(part, kind="stable")] = np.arange(len(part))
    segments = paint(starts, ends, priority, np.arange(count + 1) * length)
    owner = np.append(part, UNKNOWN)[segments.winner]  # an unclaimed segment has the winner −1: the last one
    of_rank = segments.edges[:-1] // max(length, 1)
    ns = np.zeros((count, len(PARTS)), np.int64)
    np.add.at(ns, (of_rank, owner), np.diff(segments.edges))
    return ns


@dataclass(frozen=True, slots=True)
class WallTimeParts:
    """The parts of a wall time, ns."""

    unknown_ns: int = 0  # covered by no record
    restart_ns: int = 0  # between the end of an attempt and the begin of the next
    start_ns: int = 0  # before the first step of an attempt
    loading_ns: int = 0  # waiting for input outside of steps
    training_ns: int = 0  # steps without other parts; waiting for a rank in another part is training
    repeated_ns: int = 0  # the same in steps that a later attempt repeated
    evaluation_ns: int = 0  # inside and between steps
    checkpoint_ns: int = 0  # inside and between steps, also during evaluation

    def by_name(self) -> dict[str, int]:
        """Return the time of each of :data:`PARTS`, in their order."""
        return {part: getattr(self, f"{part}_ns") for part in PARTS}

    @property
    def wall_ns(self) -> int:
        return sum(self.by_name().values())

    def to_json(self) -> JsonObject:
        return {"wall_ns": self.wall_ns, **{f"{part}_ns": time for part, time in self.by_name().items()}}


@dataclass(frozen=True, slots=True)
class RunBudget:
    """The wall time of a run, from the begin of its first process to the last record of its last one."""

    job: WallTimeParts  # mean of the ranks; its parts add up to the wall time
    ranks: Mapping[int, WallTimeParts]  # the parts of each add up to the same wall time
    attempts: int  # launches with files
    repeated_steps: int | None  # None if several attempts lack step numbers of the program's own

    @property
    def goodput(self) -> float | None:
        """Return the share of the wall time in training steps that were kept; None if the run has no length."""
        return self.job.training_ns / self.job.wall_ns if self.job.wall_ns else None

    def to_json(self) -> JsonObject:
        return {
            **self.job.to_json(),
            "goodput": self.goodput,
            "attempts": self.attempts,
            "repeated_steps": self.repeated_steps,
            "ranks": [{"rank": rank, **parts.to_json()} for rank, parts in self.ranks.items()],
        }


def run_budget(run: Run, earlier: Iterable[Run] = ()) -> RunBudget:
    """Divide the wall time of a run: its newest attempt, whole and as recorded, and its earlier ones, oldest first."""
    attempts = [_of_attempt(run_of_attempt) for run_of_attempt in chain(earlier, [run])]
    begin = min(rank_attempt.begin for attempt in attempts for rank_attempt in attempt.values())
    end = max(rank_attempt.end for attempt in attempts for rank_attempt in attempt.values())
    kept_below = _kept_below(attempts)
    is_numbered = all(rank_attempt.is_numbered for attempt in attempts for rank_attempt in attempt.values())
    numbers = sorted(set[int]().union(*attempts))
    divided = divide_ranks([_claims(rank, attempts, kept_below, begin) for rank in numbers], begin, end)
    ranks = {rank: WallTimeParts(*parts) for rank, parts in zip(numbers, divided.tolist(), strict=True)}
    repeated = {
        (number, step)
        for number, attempt in enumerate(attempts)
        for rank_attempt in attempt.values()
        for step in rank_attempt.steps[rank_attempt.is_repeated(kept_below[number])].tolist()
    }
    return RunBudget(
        job=WallTimeParts(*apportion(divided.sum(axis=0), len(ranks))),
        ranks=ranks,
        attempts=len(attempts),
        repeated_steps=len(repeated) if is_numbered or len(attempts) == 1 else None,
    )


class _RankAttempt(NamedTuple):
    """One rank in one attempt, on the wall clock, ns."""

    begin: int
    end: int
    steps: Int64  # step numbers, in the order of step_claim
    is_earlier: Bool  # by step, True if the same process repeated it
    step_claim: PartIntervals
    claims: tuple[PartIntervals, ...]  # of all parts but steps
    is_whole: bool  # nothing after its begin was left out
    is_numbered: bool  # the steps have numbers of the program's own

    def is_repeated(self, kept_below: int) -> Bool:
        """Return a mask of the repeated steps; a later attempt repeated those from ``kept_below`` on."""
        return np.asarray(self.is_earlier | (self.steps >= kept_below))


def _of_attempt(run: Run) -> dict[int, _RankAttempt]:
    return {rank: _of_rank(trace) for rank, trace in run.ranks.items()}


def _of_rank(trace: RankTrace) -> _RankAttempt:
    spans = trace.spans
    # One offset for the whole attempt: a wall clock that is set meanwhile must not make time, or take any away.
    offset = trace.metadata.anchor.offset_ns
    known = [trace.metadata.anchor.monotonic_ns] if trace.metadata.anchor.monotonic_ns else []
    known += [int(spans.start.min()), int(spans.end.max())] if len(spans) else []
    known += [] if trace.last_written_ns is None else [trace.last_written_ns]
    known += [] if trace.process_start_ns is None else [trace.process_start_ns]
    claims = {}
    for kind, part in PART_OF_KIND.items():
        rows = np.flatnonzero(spans.kind == kind)
        start = work_begins(spans, rows) if kind == schema.STEP else spans.start[rows]
        claims[kind] = PartIntervals(part, start + offset, spans.end[rows] + offset)
    return _RankAttempt(
        begin=min(known, default=0) + offset,
        end=max(known, default=0) + offset,
        steps=number_of(spans.step[spans.kind == schema.STEP]).astype(np.int64),
        is_earlier=is_earlier(spans.step[spans.kind == schema.STEP]),
        step_claim=claims.pop(schema.STEP),
        claims=tuple(claims.values()),
        is_whole=not trace.discarded and "steps" not in trace.recording,
        is_numbered="step_numbers" in trace.topology,
    )


def _kept_below(attempts: Sequence[Mapping[int, _RankAttempt]]) -> list[int]:
    """Return, by attempt, the number from which on a later attempt repeated its steps."""
    never = int(np.iinfo(np.int64).max)
    below, first = [], never
    for attempt in reversed(attempts):
        below.append(first)
        if all(rank_attempt.is_numbered for rank_attempt in attempt.values()):
            first = min(
                [
                    first,
                    *(int(rank_attempt.steps.min()) for rank_attempt in attempt.values() if len(rank_attempt.steps)),
                ]
            )
    return below[::-1]


def _claims(
    rank: int, attempts: Sequence[Mapping[int, _RankAttempt]], kept_below: Sequence[int], begin: int
) -> list[PartIntervals]:
    """Return all claims of a rank; a process that began before the previous one ended claims from that end on."""
    attempts_of_rank = [
        (attempt[rank], below) for attempt, below in zip(attempts, kept_below, strict=True) if rank in attempt
    ]
    has_steps = any(len(rank_attempt.steps) for rank_attempt, _ in attempts_of_rank)
    claims: list[PartIntervals] = []
    ended: int | None = None
    for rank_attempt, below in attempts_of_rank:
        if ended is not None:
            claims.append(_single(RESTART, ended, rank_attempt.begin))
        if rank_attempt.is_whole and has_steps:
            first = int(rank_attempt.step_claim.start.min()) if len(rank_attempt.steps) else rank_attempt.end
            claims.append(_single(START, begin if ended is None else max(rank_attempt.begin, ended), first))
        repeated = rank_attempt.is_repeated(below)
        claims += [
            PartIntervals(TRAINING, rank_attempt.step_claim.start[~repeated], rank_attempt.step_claim.end[~repeated]),
            PartIntervals(REPEATED, rank_attempt.step_claim.start[repeated], rank_attempt.step_claim.end[repeated]),
            *rank_attempt.claims,
        ]
        ended = rank_attempt.end if ended is None else max(ended, rank_attempt.end)
    return claims


def _single(part: int, start: int, end: int) -> PartIntervals:
    return PartIntervals(part, np.array([start], np.int64), np.array([max(start, end)], np.int64))
