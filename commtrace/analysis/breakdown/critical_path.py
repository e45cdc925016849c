"""The critical path of a step: the chain of work and communication that the length of the job's step consists of.

The walk goes back from the end of the last rank's step: along a rank's work, and from a stall along the transfer to the
rank that arrived last. It ends at the step's begin, or at the end of the previous step if later: no time counts twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.intervals import paint
from commtrace.analysis.breakdown.states import (
    BETWEEN_STEPS,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    IDLE,
    MEMORY,
    OTHER,
    PHASES,
    REPLAY,
    LaneIntervals,
    ReadyTimes,
    State,
    lane_states,
    states_of,
    together,
)
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.match import Matches, RankMatches, communications_of
from commtrace.analysis.matching.operations import is_kernel_trace, replayed_rows
from commtrace.analysis.matching.roles import Roles
from commtrace.trace import schema
from commtrace.trace.blocks import Block, bounds_of
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64, Spans

TRANSFER: Final = "transfer"
HOST: Final = "host"
UNKNOWN: Final = "unknown"
OTHER_COMPUTE: Final = "other compute"

_KIND_OF_STATE: Final[Mapping[str, str]] = {
    DATA: "input",
    CHECKPOINT: "checkpoint",
    GC: "garbage collection",
    MEMORY: "copies",
    IDLE: HOST,
    OTHER: HOST,
    REPLAY: REPLAY,
    BETWEEN_STEPS: "between steps",
}

KINDS: Final = (
    *(OTHER_COMPUTE if phase == "other" else phase for phase in PHASES),
    *dict.fromkeys(_KIND_OF_STATE.values()),
    TRANSFER,
    UNKNOWN,
)
"""The kinds of a piece, see docs/definitions.md."""


class Piece(NamedTuple):
    """A stretch of the critical path, ns, half-open."""

    start: int
    end: int
    rank: int
    kind: str
    role: str = ""  # of the communication; empty unless the kind is transfer or unknown
    uncertain: bool = False  # shorter than the error between the clocks of its two hosts, or began at a bound

    @property
    def ns(self) -> int:
        return self.end - self.start


class StepPath(NamedTuple):
    """The critical path of one step: adjoining pieces in ascending order."""

    step: int
    pieces: tuple[Piece, ...]


class Share(NamedTuple):
    """The sum of similar pieces over all steps, ns; ``uncertain_ns`` is the part in uncertain pieces."""

    rank: int
    kind: str
    role: str
    ns: int
    uncertain_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The sum of the critical paths of several steps; shares are sorted, longest first."""

    num_steps: int
    shares: tuple[Share, ...]

    @classmethod
    def of(cls, paths: Sequence[StepPath]) -> CriticalPath:
        sums: dict[tuple[int, str, str], list[int]] = {}
        for path in paths:
            for piece in path.pieces:
                totals = sums.setdefault((piece.rank, piece.kind, piece.role), [0, 0])
                totals[0] += piece.ns
                totals[1] += piece.ns * piece.uncertain
        return cls(len(paths), _longest_first(Share(*key, *ns) for key, ns in sums.items()))

    def plus(self, other: CriticalPath) -> CriticalPath:
        """Return the sum with the paths of other steps."""
        sums = {share[:3]: share for share in self.shares}
        for share in other.shares:
            known = sums.get(share[:3], share._replace(ns=0, uncertain_ns=0))
            sums[share[:3]] = known._replace(
                ns=known.ns + share.ns, uncertain_ns=known.uncertain_ns + share.uncertain_ns
            )
        return CriticalPath(self.num_steps + other.num_steps, _longest_first(sums.values()))

    @property
    def ns(self) -> int:
        """Return the length of all steps."""
        return sum(share.ns for share in self.shares)

    @property
    def uncertain_ns(self) -> int:
        """Return the length of uncertain pieces in all steps."""
        return sum(share.uncertain_ns for share in self.shares)

    def to_json(self) -> JsonObject:
        return {
            "steps": self.num_steps,
            "ns": self.ns,
            "uncertain_ns": self.uncertain_ns,
            "shares": [share._asdict() for share in self.shares],
        }


def _longest_first(shares: Iterable[Share]) -> tuple[Share, ...]:
    return tuple(sorted(shares, key=lambda share: (-share.ns, share[:3])))


_EVER: Final = np.iinfo(np.int64).min


def critical_paths(
    run: Run, matches: Matches, roles: Roles, steps: Sequence[int], residual_ns: int = 0
) -> list[StepPath]:
    """Return the critical path of each step of an aligned run; ``residual_ns`` is the error between hosts' clocks."""
    begins, ends = _job_steps(run, steps)
    lanes = _PathLanes(run, matches, roles, residual_ns)
    return [
        StepPath(step, tuple(_merged(reversed([*lanes.walk(begins[step], *ends[step])]))))
        for step in steps
        if step in begins
    ]


def critical_path(context: Context, alignment: Alignment) -> CriticalPath | None:
    """Return the sum of the critical paths of the steps that count; None if the hosts' clocks could not be aligned."""
    if alignment.refused is not None:
        return None
    residual = alignment.residual_ns["p99"]
    return CriticalPath.of(critical_paths(context.run, context.matches, context.roles, context.steps, residual))


def _job_steps(run: Run, steps: Sequence[int]) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Return, by step, the begin of its path, and the rank that ended it last (the lowest of several) with that end."""
    begins: dict[int, int] = {}
    ends: dict[int, tuple[int, int]] = {}
    for rank in sorted(run.ranks):
        spans = run.ranks[rank].spans
        rows = np.flatnonzero(spans.kind == schema.STEP)
        columns = (column[rows].tolist() for column in (spans.step, spans.start, spans.end))
        for step, start, end in zip(*columns, strict=True):
            begins[step] = min(start, begins.get(step, start))
            if step not in ends or end > ends[step][1]:
                ends[step] = (rank, end)
    in_time = sorted(ends, key=lambda step: ends[step][1])  # after a rollback, that is not the order of their numbers
    after = {step: ends[before][1] for before, step in pairwise(in_time)}
    return {step: max(begins[step], after.get(step, _EVER)) for step in steps if step in begins}, ends


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1][2:] == piece[2:]:
            merged[-1] = merged[-1]._replace(end=piece.end)
        elif piece.end > piece.start:
            merged.append(piece)
    return merged


class _Stall(NamedTuple):
    """A stall of a lane."""

    begin: int  # arrival of its own rank
    ready: int  # arrival of the last participant
    ready_exact: bool  # False: a lower bound
    end_exact: bool  # False: the communication was over before the stall
    last_rank: int  # that participant; its own rank without a wait, −1 if unknown
    role: str


class _Interval(NamedTuple):
    start: int  # ns
    kind: str
    stall: _Stall | None = None  # None where the lane did not stall


class _PathLanes:
    def __init__(self, run: Run, matches: Matches, roles: Roles, residual_ns: int) -> None:
        self._run = run
        self._matches = matches
        self._roles = roles
        self._residual_ns = residual_ns
        self._lanes: dict[int, _Lane] = {}

    def walk(self, begin: int, rank: int, now: int) -> Iterator[Piece]:
        """Yield the pieces from ``now`` on ``rank`` back to ``begin``, the latest first; some may be empty."""
        left: set[int] = set()  # ranks that the path has left for others at this very instant
        while now > begin:
            interval = self._lane(rank).before(now)
            since, stall = max(interval.start, begin), interval.stall
            if stall is None:
                yield Piece(since, now, rank, interval.kind)
            elif not stall.end_exact:
                yield Piece(since, now, rank, TRANSFER, stall.role, uncertain=True)  # no longer than the stall
            elif stall.last_rank == rank and now <= stall.ready:
                yield Piece(since, now, rank, HOST)  # it stalled on a communication that it had not launched yet
            elif (
                stall.last_rank not in self._run.ranks
                or now < stall.ready
                or (now == stall.ready and stall.last_rank in left)  # it would go back and forth at this instant
            ):
                yield Piece(since, now, rank, UNKNOWN, stall.role)
            else:
                since = max(stall.ready, begin)
                residual = self._residual_between(rank, stall.last_rank)
                unsure = now - since < residual or not stall.ready_exact
                yield Piece(since, now, rank, TRANSFER, stall.role, uncertain=unsure)
                if stall.last_rank != rank and since - stall.begin <= residual:
                    # The last of the two is unknown, so the time between their arrivals belongs to neither.
                    arrived = max(stall.begin, begin)
                    yield Piece(arrived, since, rank, UNKNOWN, stall.role, uncertain=True)
                    since = arrived
                elif stall.last_rank != rank:
                    left = {*left, rank} if since == now else {rank}
                    rank, now = stall.last_rank, since
                    continue
            left = set()
            now = since

    def _residual_between(self, rank: int, other: int) -> int:
        ranks = self._run.ranks
        return self._residual_ns if ranks[rank].clock_key != ranks[other].clock_key else 0

    def _lane(self, rank: int) -> _Lane:
        if rank not in self._lanes:
            self._lanes[rank] = _Lane.of(self._run, rank, self._matches, self._roles)
        return self._lanes[rank]


@dataclass(frozen=True, slots=True)
class _Lane:
    """The activity of one rank: adjoining intervals in ascending order.

    The columns are read number by number, which numpy does several times slower than a memoryview.
    """

    edges: memoryview  # ns; interval i lasts from edges[i] to edges[i + 1]
    kind: memoryview  # by interval, position in KINDS
    stall: memoryview  # by interval, row of the following columns; −1 without a stall
    begin: memoryview
    ready: memoryview
    ready_exact: memoryview
    end_exact: memoryview
    last_rank: memoryview
    role: memoryview  # position in ``words``
    words: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, rank: int, matches: Matches, roles: Roles) -> _Lane:
        spans = run.ranks[rank].spans
        block = Block((rank,), bounds_of([len(spans)]), spans)
        ready_times = ReadyTimes.of(block, matches, roles)
        lane = lane_states(run, block, ready_times, roles, np.zeros(len(spans), np.int64))
        stalls, work = lane.stalls, len(lane.work.row)
        anything = np.zeros(len(stalls.row), np.int32)
        stands = LaneIntervals(stalls.start, stalls.end, anything, anything + lane.priority, stalls.row)
        every = together((lane.work, stands))
        reach = np.array([spans.start.min(), spans.end.max()] if len(spans) else [], np.int64)
        segments = paint(every.start, every.end, every.precedence(), reach)
        is_stall = segments.winner >= work
        communication = stalls.row if is_kernel_trace(spans) else communications_of(block, stalls.row)
        awaited = np.append(_awaited_rank(spans, rank, matches.ranks[rank]), -1)
        return cls(
            edges=_numbers(segments.edges),
            kind=_numbers(np.append(_kinds(roles)[every.state], KINDS.index(HOST))[segments.winner]),
            stall=_numbers(np.where(is_stall, segments.winner - work, -1)),
            begin=_numbers(np.append(spans.start, 0)[communication]),
            ready=_numbers(np.append(ready_times.ready, 0)[communication]),
            ready_exact=_numbers(np.append(matches.ranks[rank].ready_exact, True)[communication]),
            end_exact=_numbers(np.append(spans.end_exact, True)[communication]),
            # Unrecorded communication has row −1, the last one: unknown.
            last_rank=_numbers(awaited[communication]),
            role=_numbers(ready_times.role[stalls.row]),
            words=roles.words,
        )

    def before(self, now: int) -> _Interval:
        """Return the rank's activity just before this instant."""
        number = bisect_left(self.edges, now) - 1
        if number < 0:
            return _Interval(_EVER, UNKNOWN)  # it had not recorded anything yet
        start = self.edges[number]
        if number == len(self.kind):
            return _Interval(start, UNKNOWN)  # it recorded nothing any more
        row = self.stall[number]
        if row < 0:
            return _Interval(start, KINDS[self.kind[number]])
        role = self.words[self.role[row]]
        stall = _Stall(
            self.begin[row],
            self.ready[row],
            bool(self.ready_exact[row]),
            bool(self.end_exact[row]),
            self.last_rank[row],
            role,
        )
        return _Interval(start, TRANSFER, stall)


def _numbers(column: npt.NDArray[Any]) -> memoryview:
    return column.data


def _kinds(roles: Roles) -> Int64:
    """Return the position in :data:`KINDS` of each state of the run; stalled states are never looked up."""
    return np.array([KINDS.index(_kind(state)) for state in states_of(roles.words)], np.int64)


def _kind(state: State) -> str:
    if state.kind == COMPUTE:
        return OTHER_COMPUTE if state.detail == "other" else state.detail
    return _KIND_OF_STATE.get(state.kind, UNKNOWN)


def _awaited_rank(spans: Spans, rank: int, matches: RankMatches) -> Int64:
    """Return, by communication row, the awaited rank: its own without a wait or if it came last, −1 if unknown."""
    awaited = matches.last_rank.astype(np.int64)
    messages = np.flatnonzero((spans.kind == schema.P2P) & ~replayed_rows(spans))
    if spans.op_in_seq[messages].any():
        ordered = messages[np.argsort(spans.id[messages], kind="stable")]
        begins = spans.op_in_seq[ordered] == 0
        begins[0] = True
        bracket = np.cumsum(begins) - 1
        decided = np.flatnonzero(matches.last_start[ordered] == matches.ready[ordered])
        of_bracket = np.full(int(bracket[-1]) + 1, -1, np.int64)
        of_bracket[bracket[decided]] = matches.last_rank[ordered[decided]]
        awaited[ordered] = np.where(of_bracket[bracket] >= 0, of_bracket[bracket], awaited[ordered])
    return np.where(matches.complete, np.where(matches.ready <= spans.start, rank, awaited), -1)
