"""Divide each step exactly: every instant of a rank's step is in one state.

>>> partition(run, match(run)).total("bubble")                  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.breakdown.intervals import IntervalUnion, paint, ranges, union
from commtrace.analysis.breakdown.launch_bound import launch_bound
from commtrace.analysis.breakdown.states import (
    IDLE,
    LAUNCHING,
    OTHER,
    UNKNOWN_TIME,
    ReadyTimes,
    State,
    lane_states,
    states_of,
    together,
)
from commtrace.analysis.keys import grouped
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import is_kernel_trace, of_one_sort, timed_rows
from commtrace.analysis.matching.roles import Roles, find_roles
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


@dataclass(frozen=True, slots=True)
class Partition:
    """One row per rank and step, sorted by rank, then by start. Kernel traces have communication for stalls."""

    states: tuple[State, ...]  # columns of ``ns``
    rank: Int32
    step: Int32
    start: Int64
    end: Int64
    ns: Int64  # rows × states; a row adds up to end − start exactly
    hidden_ns: Int64  # communication in flight without a stall; not one of the states
    # Rows × the first states (LAUNCHING): of the time in them, the device waited for its host; −1 if not known.
    launch_bound_ns: Int64
    stalled_ns: Mapping[int, Int64]  # by rank, span rows × (wait or bubble, transfer)

    @property
    def wall_ns(self) -> Int64:
        return np.asarray(self.end - self.start)

    @property
    def launch_bound_of_steps(self) -> Int64:
        """Return the time of each row in which the device waited for its host; −1 if not known."""
        return np.where(self.launch_bound_ns[:, 0] == UNKNOWN_TIME, UNKNOWN_TIME, self.launch_bound_ns.sum(axis=1))

    def total(self, kind: str, detail: str | None = None) -> Int64:
        """Return the time of each row in the states of a kind, or in one phase or role of it."""
        chosen = [
            column for column, state in enumerate(self.states) if state.kind == kind and detail in (None, state.detail)
        ]
        return np.asarray(self.ns[:, chosen].sum(axis=1))


def concatenate(parts: Sequence[Partition]) -> Partition:
    """Return the partition of all parts of one run, without ``stalled_ns``."""
    rank, start = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rank", "start"))
    order = np.lexsort((start, rank))
    return Partition(
        states=parts[0].states,
        rank=rank[order],
        step=np.concatenate([part.step for part in parts])[order],
        start=start[order],
        end=np.concatenate([part.end for part in parts])[order],
        ns=np.concatenate([part.ns for part in parts])[order],
        hidden_ns=np.concatenate([part.hidden_ns for part in parts])[order],
        launch_bound_ns=np.concatenate([part.launch_bound_ns for part in parts])[order],
        stalled_ns={},
    )


def partition(run: Run, matches: Matches, roles: Roles | None = None, steps: Sequence[int] | None = None) -> Partition:
    """Partition the chosen steps of every rank of an aligned run; earlier spans that reach into a step count."""
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
        launch_bound_ns=np.concatenate([part.launch_bound_ns for part in parts]),
        stalled_ns={
            rank: stalled_ns
            for block, part in zip(blocks, parts, strict=True)
            for rank, stalled_ns in block.split(part.stalled_ns).items()
        },
    )


@dataclass(frozen=True, slots=True)
class _BlockPartition:
    rank: Int32
    step: Int32
    start: Int64
    end: Int64
    ns: Int64
    hidden_ns: Int64
    launch_bound_ns: Int64
    stalled_ns: Int64


class StepTimes(NamedTuple):
    """The result of :func:`step_times`; steps are numbered by rank, then by start.

    The stall columns hold unique pairs, ascending by step, none of 0 ns; in a trace of kernels, of communication.
    """

    row: Int64  # span rows of the steps
    ns: Int64  # as in Partition
    launch_bound_ns: Int64  # as in Partition
    stall_step: Int64
    stall_row: Int64
    stall_ns: Int64


def step_times(run: Run, block: Block, matches: Matches, roles: Roles) -> StepTimes:
    """Return the partition of a block with all kernels traced, or none, and the stalls of every step."""
    lanes = _paint_lanes(run, block, matches, roles, None)
    stalled = lanes.stalled()
    step, row = lanes.step[stalled], lanes.row[lanes.segment[stalled]]
    example, which = grouped(step * len(block.spans) + row)
    return StepTimes(
        row=lanes.steps.row,
        ns=lanes.time_per_state(),
        launch_bound_ns=lanes.launch_bound(block),
        stall_step=step[example],
        stall_row=row[example],
        stall_ns=_sums(which, lanes.length_ns[stalled], len(example)),
    )


def _partition_block(
    run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None
) -> _BlockPartition:
    spans = block.spans
    lanes = _paint_lanes(run, block, matches, roles, wanted)
    return _BlockPartition(
        rank=block.rank()[lanes.steps.row],
        step=spans.step[lanes.steps.row],
        start=lanes.steps.start,
        end=lanes.steps.end,
        ns=lanes.time_per_state(),
        hidden_ns=lanes.hidden(_in_flight(spans, lanes.axis)),
        launch_bound_ns=lanes.launch_bound(block),
        stalled_ns=lanes.per_stall(len(spans)),
    )


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The lanes of a block, joined end to end on one axis and cut into segments of one state each."""

    steps: _StepRows
    axis: Int64  # shift of each row's times
    states: tuple[State, ...]
    edges: Int64  # segment i is from edges[i] to edges[i + 1]
    state: Int32
    row: Int64  # by segment, the span that wins; arbitrary if there is none
    is_wait: Bool
    is_transfer: Bool
    step: Int64  # with the next two: segments by step; a segment of overlapping steps is in each
    segment: Int64
    length_ns: Int64

    def stalled(self) -> Int64:
        """Return the positions in ``segment`` at which the lane stalls."""
        return np.flatnonzero((self.is_wait | self.is_transfer)[self.segment])

    def time_per_state(self) -> Int64:
        """Return steps × states, ns."""
        steps, states = len(self.steps.row), len(self.states)
        return _sums(self.step * states + self.state[self.segment], self.length_ns, steps * states).reshape(
            steps, states
        )

    def hidden(self, in_flight: IntervalUnion) -> Int64:
        """Return, by step, the time in which communication was in flight without a stall."""
        start, end = self.steps.start + self.axis[self.steps.row], self.steps.end + self.axis[self.steps.row]
        stalled = self.stalled()
        segment = self.segment[stalled]
        while_stalled = in_flight.before(self.edges[segment + 1]) - in_flight.before(self.edges[segment])
        return np.asarray(
            in_flight.before(end) - in_flight.before(start) - _sums(self.step[stalled], while_stalled, len(start))
        )

    def launch_bound(self, block: Block) -> Int64:
        """Return steps × LAUNCHING, ns, in which the device waited for its host; −1 where no mark tells."""
        waits, before_empty, known = launch_bound(block.spans, block.bounds, block.end_to_end())
        steps, states = len(self.steps.row), len(LAUNCHING)
        start, end = self.steps.start + self.axis[self.steps.row], self.steps.end + self.axis[self.steps.row]
        is_known = np.searchsorted(known, end, side="right") > np.searchsorted(known, start)
        if not is_known.any():
            return np.full((steps, states), UNKNOWN_TIME, np.int64)
        chosen = np.flatnonzero(self.state[self.segment] < states)
        segment = self.segment[chosen]
        in_phases, in_nothing = (
            times.before(self.edges[segment + 1]) - times.before(self.edges[segment]) for times in (waits, before_empty)
        )
        waited = np.where(self.state[segment] == LAUNCHING.index(State(OTHER)), in_nothing, in_phases)
        cell = self.step[chosen] * states + self.state[segment]
        return np.where(
            is_known[:, np.newaxis], _sums(cell, waited, steps * states).reshape(steps, states), UNKNOWN_TIME
        )

    def per_stall(self, spans: int) -> Int64:
        """Return spans × (wait or bubble, transfer), ns."""
        stalled = self.stalled()
        segment = self.segment[stalled]
        cell = 2 * self.row[segment] + self.is_transfer[segment]
        return _sums(cell, self.length_ns[stalled], 2 * spans).reshape(spans, 2)


def _paint_lanes(run: Run, block: Block, matches: Matches, roles: Roles, wanted: Sequence[int] | None) -> _Lanes:
    steps = _steps(block, wanted)
    axis = block.per_row(block.end_to_end())
    start, end = steps.start + axis[steps.row], steps.end + axis[steps.row]
    lane = lane_states(run, block, ReadyTimes.of(block, matches, roles), roles, axis)
    wait, transfer = lane.stalls.intervals(lane.priority)
    every = together((lane.work, wait, transfer))
    segments = paint(every.start, every.end, every.precedence(), np.concatenate([start, end]))
    states = states_of(roles.words)
    unclaimed = State(IDLE if is_kernel_trace(block.spans) else OTHER)
    step, segment = ranges(np.searchsorted(segments.edges, start), np.searchsorted(segments.edges, end))
    first_transfer = len(lane.work.row) + len(wait.row)
    return _Lanes(
        steps=steps,
        axis=axis,
        states=states,
        edges=segments.edges,
        state=np.append(every.state, states.index(unclaimed))[segments.winner],
        row=np.append(every.row, 0)[segments.winner],
        is_wait=(segments.winner >= len(lane.work.row)) & (segments.winner < first_transfer),
        is_transfer=segments.winner >= first_transfer,
        step=step,
        segment=segment,
        length_ns=np.diff(segments.edges)[segment],
    )


def _sums(cell: Int64, ns: Int64, count: int) -> Int64:
    """Sum ns by cell, exactly: float64 sums stay far below 2⁵³ ns, which is 104 days."""
    return np.rint(np.bincount(cell, ns, count)).astype(np.int64)


class _StepRows(NamedTuple):
    row: Int64
    start: Int64
    end: Int64


def _steps(block: Block, wanted: Sequence[int] | None) -> _StepRows:
    spans = block.spans
    rows = np.flatnonzero(spans.kind == schema.STEP)
    if wanted is not None:
        rows = rows[np.isin(spans.step[rows], wanted)]
    rank = block.rank()[rows]
    rows = rows[np.lexsort((spans.step[rows], spans.end[rows], spans.start[rows], rank))]
    return _StepRows(rows, spans.start[rows], np.maximum(spans.start[rows], spans.end[rows]))


def _in_flight(spans: Spans, axis: Int64) -> IntervalUnion:
    rows = np.flatnonzero(timed_rows(spans))
    return union(spans.start[rows] + axis[rows], spans.end[rows] + axis[rows])
