"""Where the time of each step went, exactly: every instant of a rank's step is in one state.

>>> table = partition(run, match(run))                          # doctest: +SKIP
>>> table.total("bubble") / table.wall_ns                       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.claims import Claims, Standing, claims_of_block
from commtrace.analysis.intervals import Segments, Union, paint, union
from commtrace.analysis.keys import grouped
from commtrace.analysis.match import Matches
from commtrace.analysis.operations import communication_rows, is_kernel_trace, of_one_sort
from commtrace.analysis.roles import Roles, find_roles
from commtrace.analysis.side_by_side import side_by_side
from commtrace.analysis.states import BUBBLE, IDLE, OTHER, TRANSFER, WAIT, State, states_of
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


@dataclass(frozen=True, slots=True)
class Partition:
    """One row per rank and step, by rank and then by start.

    Attributes:
        states: the columns of ``ns``; see :mod:`commtrace.analysis.states`.
        rank, step: which row is which.
        start, end: of the step, ns.
        ns: rows × states, time in each state; the sum of a row is end − start, to the nanosecond.
        hidden_ns: time during which a communication of the rank was in flight and the lane did not stand still for
            any; it lies beside the states, not among them.
        stalled_ns: by rank, aligned with its span rows: for a stall, how much of the steps it stands for as wait or
            bubble, and as transfer (two columns). Summed up, they are the exposed and bubble states. In a trace of
            kernels, which has no stalls, the communication rows themselves.
    """

    states: tuple[State, ...]
    rank: Int32
    step: Int32
    start: Int64
    end: Int64
    ns: Int64
    hidden_ns: Int64
    stalled_ns: Mapping[int, Int64]

    @property
    def wall_ns(self) -> Int64:
        return np.asarray(self.end - self.start)

    def total(self, kind: str, detail: str | None = None) -> Int64:
        """Time of each row in the states of a kind; of one phase or role if ``detail`` says which."""
        chosen = [
            column for column, state in enumerate(self.states) if state.kind == kind and detail in (None, state.detail)
        ]
        return np.asarray(self.ns[:, chosen].sum(axis=1))


def partition(run: Run, matches: Matches, roles: Roles | None = None, steps: Sequence[int] | None = None) -> Partition:
    """Partition every step of every rank.

    Args:
        run: on one clock.
        matches: of this run.
        roles: of this run, where the caller has them.
        steps: only these. What began in others and reaches into them counts all the same.
    """
    roles = roles or find_roles(run)
    blocks = of_one_sort(run.blocks)
    parts = side_by_side(_partition_block, [(run, block, matches, roles, steps) for block in blocks])
    return Partition(
        states=states_of(roles.words),
        rank=np.concatenate([part.rank for part in parts]),
        step=np.concatenate([part.step for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        end=np.concatenate([part.end for part in parts]),
        ns=np.concatenate([part.ns for part in parts]),
        hidden_ns=np.concatenate([part.hidden_ns for part in parts]),
        stalled_ns={
            rank: own
            for block, part in zip(blocks, parts, strict=True)
            for rank, own in block.split(part.stalled_ns).items()
        },
    )


@dataclass(frozen=True, slots=True)
class _BlockPartition:
    """The rows of some ranks; the fields are those of :class:`Partition`."""

    rank: Int32
    step: Int32
    start: Int64
    end: Int64
    ns: Int64
    hidden_ns: Int64
    stalled_ns: Int64


class StepTimes(NamedTuple):
    """What :func:`step_times` tells. Steps are numbered by rank and then by start.

    Attributes:
        row: span rows of the steps.
        ns: as in :class:`Partition`.
        stall_step, stall_row, stall_ns: for how long a step stood still for a stall, or in a trace of kernels for a
            communication; each pair once, those of a step behind those of the one before, none of 0 ns.
    """

    row: Int64
    ns: Int64
    stall_step: Int64
    stall_row: Int64
    stall_ns: Int64


def step_times(run: Run, block: Block, matches: Matches, roles: Roles) -> StepTimes:
    """The partition of a block, with what every single step stood still for.

    Args:
        run: on one clock.
        block: of it: ranks whose kernels were all traced, or none's.
        matches, roles: of this run.
    """
    painted = _painted(run, block, matches, roles, None)
    inside, segments = painted.inside, painted.segments
    standing = painted.stalled[inside.segment]
    row = painted.claims.row[segments.winner[inside.segment[standing]]]
    example, which = grouped(inside.step[standing] * len(block.spans) + row)
    return StepTimes(
        row=painted.steps.row,
        ns=_time_per_state(painted),
        stall_step=inside.step[standing][example],
        stall_row=row[example],
        stall_ns=np.rint(np.bincount(which, inside.length[standing], len(example))).astype(np.int64),
    )


class _Painted(NamedTuple):
    """The axis of a block, cut into segments.

    Attributes:
        steps: of the block.
        axis: what to add to the times of each row.
        start, end: of the steps, on the axis.
        claims, segments: whose every instant is.
        inside: the segments of the steps.
        states: of the run.
        state, stalled: of each segment: which it is in, and whether the lane stands still in it.
    """

    steps: _Steps
    axis: Int64
    start: Int64
    end: Int64
    claims: Claims
    segments: Segments
    inside: _Inside
    states: tuple[State, ...]
    state: Int32
    stalled: Bool


def _painted(run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None) -> _Painted:
    steps = _steps(block, wanted)
    claims = claims_of_block(run, block, _standing(block, matches, roles), roles)
    axis = block.per_row(block.end_to_end())
    start, end = steps.start + axis[steps.row], steps.end + axis[steps.row]
    segments = paint(claims.start, claims.end, claims.precedence(), np.concatenate([start, end]))
    states = states_of(roles.words)
    unclaimed = State(IDLE if is_kernel_trace(block.spans) else OTHER)
    state = np.append(claims.state, states.index(unclaimed))[segments.winner]
    stalled = np.array([one.kind in (WAIT, TRANSFER, BUBBLE) for one in states]).take(state)
    inside = _segments_of_steps(segments, start, end)
    return _Painted(steps, axis, start, end, claims, segments, inside, states, state, stalled)


def _partition_block(
    run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None
) -> _BlockPartition:
    spans = block.spans
    painted = _painted(run, block, matches, roles, wanted)
    steps, segments, inside, stalled = painted.steps, painted.segments, painted.inside, painted.stalled
    return _BlockPartition(
        rank=block.rank()[steps.row],
        step=spans.step[steps.row],
        start=steps.start,
        end=steps.end,
        ns=_time_per_state(painted),
        hidden_ns=_hidden(_in_flight(spans, painted.axis), segments, inside, stalled, painted.start, painted.end),
        stalled_ns=_per_stall(painted.claims, segments, inside, stalled, painted.states, len(spans)),
    )


class _Steps(NamedTuple):
    """Step rows of a block, by rank and then by start."""

    row: Int64
    start: Int64
    end: Int64


def _steps(block: Block, wanted: Sequence[int] | None) -> _Steps:
    spans = block.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    if wanted is not None:
        rows = rows[np.isin(spans.step[rows], wanted)]
    rank = block.rank()[rows]
    rows = rows[np.lexsort((spans.step[rows], spans.end[rows], spans.start[rows], rank))]
    return _Steps(rows, spans.start[rows], np.maximum(spans.start[rows], spans.end[rows]))


def _standing(block: Block, matches: Matches, roles: Roles) -> Standing:
    return Standing(
        block.together({rank: matches.ranks[rank].ready for rank in block.ranks}),
        block.together({rank: matches.ranks[rank].stall_ready for rank in block.ranks}),
        block.together({rank: roles.ranks[rank].role for rank in block.ranks}),
    )


@dataclass(frozen=True, slots=True)
class _Inside:
    """Which segments lie in which step; a segment of overlapping steps is listed for each of them."""

    step: Int64
    segment: Int64
    length: Int64


def _segments_of_steps(segments: Segments, start: Int64, end: Int64) -> _Inside:
    first = np.searchsorted(segments.edges, start)
    count = np.searchsorted(segments.edges, end) - first
    step = np.repeat(np.arange(len(start)), count)
    position = np.arange(len(step)) - np.repeat(np.cumsum(count) - count, count)
    segment = first[step] + position
    return _Inside(step, segment, np.diff(segments.edges)[segment])


def _time_per_state(painted: _Painted) -> Int64:
    # float64 sums are exact here: they stay far below 2⁵³ ns, which is 104 days.
    steps, states, inside = len(painted.steps.row), len(painted.states), painted.inside
    cell = inside.step * states + painted.state[inside.segment]
    return np.rint(np.bincount(cell, inside.length, steps * states)).astype(np.int64).reshape(steps, states)


def _hidden(in_flight: Union, segments: Segments, inside: _Inside, stalled: Bool, start: Int64, end: Int64) -> Int64:
    of_step = in_flight.before(end) - in_flight.before(start)
    standing = np.flatnonzero(stalled[inside.segment])
    segment, step = inside.segment[standing], inside.step[standing]
    # Stalls follow one another: what lies between the first begin and the last end of each run of them.
    begins = np.ones(len(standing), np.bool_)
    begins[1:] = (np.diff(segment) != 1) | (np.diff(step) != 0)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(standing))[: len(first)] - 1
    inside_ns = in_flight.before(segments.edges[segment[last] + 1]) - in_flight.before(segments.edges[segment[first]])
    while_standing = np.bincount(step[first], inside_ns, len(start))
    return np.asarray(of_step - np.rint(while_standing).astype(np.int64))


def _in_flight(spans: Spans, axis: Int64) -> Union:
    rows = np.flatnonzero(communication_rows(spans))
    return union(spans.start[rows] + axis[rows], spans.end[rows] + axis[rows])


def _per_stall(
    claims: Claims, segments: Segments, inside: _Inside, stalled: Bool, states: tuple[State, ...], spans: int
) -> Int64:
    """Spans × (wait or bubble, transfer); a row has one claim of either sort at most."""
    standing = np.flatnonzero(stalled[inside.segment])
    claim = segments.winner[inside.segment[standing]]
    stood = np.rint(np.bincount(claim, inside.length[standing], len(claims.row))).astype(np.int64)
    of_claims = np.flatnonzero(stood)
    is_transfer = np.array([state.kind == TRANSFER for state in states]).take(claims.state[of_claims])
    per_stall = np.zeros((spans, 2), np.int64)
    per_stall[claims.row[of_claims], is_transfer.astype(np.int64)] = stood[of_claims]
    return per_stall
