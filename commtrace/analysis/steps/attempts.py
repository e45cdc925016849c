"""Steps that ran more than once: after a restart of the job from a checkpoint, or a rollback within one launch.

A summary's tables are of the last attempt of each step; all attempts are listed in time order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import grouped, pack
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans

_FIRST_EARLIER: Final = -2
"""Rows of step n in a repeated attempt have the number −2 − n."""


class Attempt(NamedTuple):
    """One attempt of a step, counted from 1, in a launch of the job, counted from 0; ``start_ns`` is epoch ns."""

    attempt: int
    launch: int
    start_ns: int
    duration_ns: int


class RepeatedStep(NamedTuple):
    """A step that ran more than once, with its attempts in time order."""

    step: int
    attempts: tuple[Attempt, ...]

    def to_json(self) -> JsonObject:
        return {"step": self.step, "attempts": [attempt._asdict() for attempt in self.attempts]}


@dataclass(frozen=True, slots=True)
class LaunchSteps:
    """Every attempt of every step of one launch, by number and occurrence: columns of equal length.

    It begins on the first rank and ends on the last one, epoch ns; its length is the mean over the ranks.
    """

    launch: int  # number of earlier starts of the job
    is_numbered: bool  # the program numbers its steps
    step: Int64
    occurrence: Int64  # number of earlier runs in this launch
    start_ns: Int64
    end_ns: Int64
    duration_ns: Int64

    @classmethod
    def of(cls, launch: Run) -> LaunchSteps:
        is_numbered = all("step_numbers" in trace.topology for trace in launch.ranks.values())
        columns = _together([_times_of_block(launch, block) for block in launch.blocks])
        return cls(launch.any_metadata.attempt, is_numbered, *columns)

    def only(self, steps: Collection[int]) -> LaunchSteps:
        """Return the attempts of these steps."""
        rows = np.isin(self.step, [*steps])
        names = ("step", "occurrence", "start_ns", "end_ns", "duration_ns")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


_Times: TypeAlias = tuple[Int64, Int64, Int64, Int64]


def _times_of_block(launch: Run, block: Block) -> _Times:
    spans = block.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    rank, number = block.rank()[rows], number_of(spans.step[rows]).astype(np.int64)
    order = np.lexsort((spans.start[rows], number, rank))
    rows, rank, number = rows[order], rank[order], number[order]
    first, which = grouped(pack((rank, number)))
    offset = block.per_row(np.array([launch.ranks[member].metadata.anchor.offset_ns for member in block.ranks]))[rows]
    return number, np.arange(len(rows)) - first[which], spans.start[rows] + offset, spans.end[rows] + offset


def _together(ranks: Sequence[_Times]) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """Return each attempt with its earliest begin, its latest end, and its mean length."""
    step, occurrence, start, end = (np.concatenate(columns) for columns in zip(*ranks, strict=True))
    first, which = grouped(pack((step, occurrence)))
    start_ns, end_ns = start[first], end[first]
    np.minimum.at(start_ns, which, start)
    np.maximum.at(end_ns, which, end)
    total_ns = np.zeros(len(first), np.int64)
    np.add.at(total_ns, which, end - start)
    return step[first], occurrence[first], start_ns, end_ns, total_ns // np.bincount(which, minlength=len(first))


def repeated_steps(launches: Sequence[LaunchSteps]) -> list[RepeatedStep]:
    """Return the steps that ran more than once, ascending; launches are oldest first."""
    # Only numbers of the program's own identify the steps of two launches.
    comparable = launches if all(launch.is_numbered for launch in launches) else launches[-1:]
    if not comparable:
        return []
    step, count = np.unique(np.concatenate([launch.step for launch in comparable]), return_counts=True)
    again = step[count > 1]
    by_step: dict[int, list[Attempt]] = {number: [] for number in again.tolist()}
    for launch in sorted(comparable, key=lambda launch: launch.launch):
        repeated = launch.only(again.tolist())
        for number, start, duration in zip(
            repeated.step.tolist(), repeated.start_ns.tolist(), repeated.duration_ns.tolist(), strict=True
        ):
            attempts = by_step[number]
            attempts.append(Attempt(len(attempts) + 1, launch.launch, start, duration))
    return [RepeatedStep(number, tuple(attempts)) for number, attempts in by_step.items()]


class Repetitions(NamedTuple):
    """The steps that one process ran more than once."""

    number: Int32  # ascending
    until_ns: Int64  # end of the last attempt but one

    @classmethod
    def of(cls, spans: Spans) -> Repetitions:
        rows = np.flatnonzero((spans.kind == schema.STEP) & (spans.step >= 0))
        rows = rows[np.lexsort((spans.end[rows], spans.step[rows]))]
        number, end = spans.step[rows], spans.end[rows]
        follows = number[1:] == number[:-1]  # on another attempt of the same step
        last_but_one = np.flatnonzero(follows & ~np.append(follows[1:], False))
        return cls(number[last_but_one], end[last_but_one])

    def renumber(self, spans: Spans) -> Spans:
        """Return spans with other numbers for the rows of all attempts but the last one."""
        if not len(self.number):
            return spans
        at = np.minimum(np.searchsorted(self.number, spans.step), len(self.number) - 1)
        is_earlier_one = (self.number[at] == spans.step) & (spans.start < self.until_ns[at])
        return spans.replace(step=np.where(is_earlier_one, earlier_number(spans.step), spans.step))


def separate_attempts(run: Run) -> Run:
    """Return the run with other numbers for the rows of all attempts of a step but its last one."""
    ranks = {rank: _with_last_attempts(trace) for rank, trace in run.ranks.items()}
    if all(ranks[rank] is trace for rank, trace in run.ranks.items()):
        return run
    return replace(run, ranks=ranks)


def without_last_attempts(run: Run) -> Run | None:
    """Return all but the last attempts of steps that one process repeated; None if no step was repeated.

    Of three attempts the first two are left, so that a second call returns the first one alone.
    """
    run = separate_attempts(run)
    kept = {rank: is_earlier(trace.spans.step) for rank, trace in run.ranks.items()}
    if not any(rows.any() for rows in kept.values()):
        return None
    ranks = {}
    for rank, trace in run.ranks.items():
        spans = trace.spans.take(kept[rank])
        ranks[rank] = replace(trace, spans=spans.replace(step=number_of(spans.step)))
    return replace(run, ranks=ranks)


def is_earlier(step: Int32) -> Bool:
    """Return a mask of the rows of attempts that the same process repeated."""
    return np.asarray(step <= _FIRST_EARLIER)


def earlier_number(step: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers that rows of these steps carry in a repeated attempt; of such numbers, the true ones."""
    return _FIRST_EARLIER - step


def number_of(step: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the true numbers of steps, also of repeated attempts."""
    return np.where(is_earlier(step), earlier_number(step), step)


def _with_last_attempts(trace: RankTrace) -> RankTrace:
    repeated = Repetitions.of(trace.spans)
    return replace(trace, spans=repeated.renumber(trace.spans)) if len(repeated.number) else trace
