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
from commtrace.analysis.intervals import Union, paint, ranges, union
from commtrace.analysis.keys import grouped
from commtrace.analysis.match import Matches
from commtrace.analysis.operations import communication_rows, is_kernel_trace, of_one_sort
from commtrace.analysis.pieces import Pieces, PiecesOfSteps, cut_pieces
from commtrace.analysis.roles import Roles, find_roles
from commtrace.analysis.states import IDLE, OTHER, State, states_of
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Int32, Int64, Spans


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
    parts = [_partition_block(run, block, matches, roles, steps) for block in blocks]
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
    lane = _Lane.of(run, block, matches, roles, None)
    inside = lane.inside
    time_ns = inside.wait_ns + inside.transfer_ns
    stood = np.flatnonzero((time_ns > 0) & lane.pieces.is_standing[inside.piece])
    step, row = inside.step[stood], lane.pieces.row[inside.piece[stood]]
    example, which = grouped(step * len(block.spans) + row)
    return StepTimes(
        row=lane.steps.row,
        ns=lane.time_per_state(),
        stall_step=step[example],
        stall_row=row[example],
        stall_ns=np.rint(np.bincount(which, time_ns[stood], len(example))).astype(np.int64),
    )


def _partition_block(
    run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None
) -> _BlockPartition:
    spans = block.spans
    lane = _Lane.of(run, block, matches, roles, wanted)
    return _BlockPartition(
        rank=block.rank()[lane.steps.row],
        step=spans.step[lane.steps.row],
        start=lane.steps.start,
        end=lane.steps.end,
        ns=lane.time_per_state(),
        hidden_ns=lane.hidden(_in_flight(spans, lane.axis)),
        stalled_ns=lane.per_stall(len(spans)),
    )


@dataclass(frozen=True, slots=True)
class _Lane:
    """The lanes of a block, the ranks end to end, with what is believed of every instant.

    Attributes:
        steps: of the block.
        axis: what to add to the times of each row.
        start, end: of the steps, on the axis.
        states: of the run.
        pieces: in which the lane stands still, or something else is believed before that.
        inside: the parts of the pieces that lie in steps.
        below: what is believed where there is no piece.
        unclaimed: the state in which the lane is where nothing is believed.
    """

    steps: _Steps
    axis: Int64
    start: Int64
    end: Int64
    states: tuple[State, ...]
    pieces: Pieces
    inside: PiecesOfSteps
    below: Claims
    unclaimed: int

    @classmethod
    def of(cls, run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None) -> _Lane:
        steps = _steps(block, wanted)
        axis = block.per_row(block.end_to_end())
        start, end = steps.start + axis[steps.row], steps.end + axis[steps.row]
        claims = claims_of_block(run, block, Standing.of(block, matches, roles), roles, axis)
        pieces = cut_pieces(claims)
        states = states_of(roles.words)
        unclaimed = State(IDLE if is_kernel_trace(block.spans) else OTHER)
        return cls(
            steps=steps,
            axis=axis,
            start=start,
            end=end,
            states=states,
            pieces=pieces,
            inside=pieces.of_steps(start, end),
            below=claims.below,
            unclaimed=states.index(unclaimed),
        )

    def time_per_state(self) -> Int64:
        """Steps × states."""
        steps, states = len(self.steps.row), len(self.states)
        pieces, inside = self.pieces, self.inside
        segments = paint(
            self.below.start, self.below.end, self.below.precedence(), np.concatenate([self.start, self.end])
        )
        state = np.append(self.below.state, self.unclaimed)[segments.winner]
        free_ns = np.diff(segments.edges) - np.diff(self.pieces.union.before(segments.edges))
        step, segment = ranges(np.searchsorted(segments.edges, self.start), np.searchsorted(segments.edges, self.end))
        first = inside.step * states
        time = np.zeros(steps * states)
        for cell, ns in (
            (first + pieces.before[inside.piece], inside.wait_ns),
            (first + pieces.after[inside.piece], inside.transfer_ns),
            (step * states + state[segment], free_ns[segment]),
        ):
            # float64 sums are exact here: they stay far below 2⁵³ ns, which is 104 days.
            time += np.bincount(cell, ns, steps * states)
        return np.rint(time).astype(np.int64).reshape(steps, states)

    def hidden(self, in_flight: Union) -> Int64:
        """Of each step, for how long communication was in flight without the lane standing still."""
        of_step = in_flight.before(self.end) - in_flight.before(self.start)
        standing = self.pieces.standing
        step, index = standing.inside(self.start, self.end)
        begin = np.maximum(standing.start[index], self.start[step])
        end = np.minimum(standing.end[index], self.end[step])
        inside_ns = in_flight.before(end) - in_flight.before(begin)
        while_standing = np.bincount(step, inside_ns, len(self.start))
        return np.asarray(of_step - np.rint(while_standing).astype(np.int64))

    def per_stall(self, spans: int) -> Int64:
        """Spans × (wait or bubble, transfer)."""
        inside = self.inside
        standing = np.flatnonzero(self.pieces.is_standing[inside.piece])
        cell = 2 * self.pieces.row[inside.piece[standing]]
        stalled = np.zeros(2 * spans, np.int64)
        np.add.at(stalled, cell, inside.wait_ns[standing])
        np.add.at(stalled, cell + 1, inside.transfer_ns[standing])
        return stalled.reshape(spans, 2)


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


def _in_flight(spans: Spans, axis: Int64) -> Union:
    rows = np.flatnonzero(communication_rows(spans))
    return union(spans.start[rows] + axis[rows], spans.end[rows] + axis[rows])
