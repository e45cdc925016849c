"""Intervals of spans on a lane, each with the state that it claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.states import (
    BUBBLE,
    CLAIM_OF_KIND,
    CLAIM_OF_TRACED_KIND,
    STALL_PRIORITY,
    TRACED_COMMUNICATION_PRIORITY,
    TRANSFER,
    WAIT,
    Claim,
    State,
    states_of,
)
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import communication_rows, is_kernel_trace
from commtrace.analysis.matching.roles import PIPELINE, Roles, is_p2p
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Int32, Int64, Spans


class Claims(NamedTuple):
    """Intervals on one axis; all arrays have the same length.

    Attributes:
        start, end: ns; never empty.
        state: position in the run's states.
        priority: where intervals overlap, the highest is believed.
        row: the span that claims.
    """

    start: Int64
    end: Int64
    state: Int32
    priority: Int32
    row: Int64

    def precedence(self) -> Int64:
        """Return a number from 0 to n − 1 per claim: the higher one wins.

        By priority, then the innermost (the later start, then the earlier end). The state decides what is left, so
        that the order of the input never does.
        """
        order = np.lexsort((self.state, -self.end, self.start, self.priority))
        precedence = np.empty(len(order), np.int64)
        precedence[order] = np.arange(len(order))
        return precedence

    def filled(self) -> Claims:
        """Return those that claim an instant at all."""
        rows = np.flatnonzero(self.end > self.start)
        columns: list[Any] = [column[rows] for column in self]
        return Claims(*columns)


class Standing(NamedTuple):
    """The ready time and role of a block's stalls, aligned with its rows.

    Attributes:
        ready: when a communication waited for nobody any more.
        stall_ready: of a stall: when the communication that it stalled on did.
        role: what it was for.
    """

    ready: Int64
    stall_ready: Int64
    role: Int32

    @classmethod
    def of(cls, block: Block, matches: Matches, roles: Roles) -> Standing:
        return cls(
            block.together({rank: matches.ranks[rank].ready for rank in block.ranks}),
            block.together({rank: matches.ranks[rank].stall_ready for rank in block.ranks}),
            block.together({rank: roles.ranks[rank].role for rank in block.ranks}),
        )


class Stalls(NamedTuple):
    """Rows during which the lane stands still, on one axis: they claim wait until they are ready, then transfer.

    Attributes:
        start, end: ns; never empty.
        ready: within them.
        wait, transfer: positions in the run's states.
        row: the span.
    """

    start: Int64
    ready: Int64
    end: Int64
    wait: Int32
    transfer: Int32
    row: Int64

    def claims(self, priority: int) -> tuple[Claims, Claims]:
        """Return what they claim, of this priority: as wait and as transfer."""
        priorities = np.full(len(self.row), priority, np.int32)
        return (
            Claims(self.start, self.ready, self.wait, priorities, self.row).filled(),
            Claims(self.ready, self.end, self.transfer, priorities, self.row).filled(),
        )


class LaneClaims(NamedTuple):
    """The intervals that the spans of a block claim on its lanes, the ranks end to end.

    Attributes:
        work: of all that is no stall.
        stalls: while the lane stands still.
        priority: of the stalls.
    """

    work: Claims
    stalls: Stalls
    priority: int


def together(parts: Sequence[Claims]) -> Claims:
    """Return the claims of all parts."""
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Claims(*columns)


def claims_of_block(run: Run, block: Block, standing: Standing, roles: Roles, axis: Int64) -> LaneClaims:
    """Everything that the spans claim.

    A trace of kernels holds no stalls: in it, communication itself claims the time at which no kernel computes.

    Args:
        run: with the names.
        block: ranks whose kernels were all traced, or none's.
        standing: of its rows.
        roles: of the run.
        axis: what to add to the times of each row.
    """
    spans = block.spans
    states = states_of(roles.words)
    if is_kernel_trace(spans):
        work = _work_claims(spans, states, CLAIM_OF_TRACED_KIND, axis)
        rows, ready, priority = communication_rows(spans), standing.ready, TRACED_COMMUNICATION_PRIORITY
    else:
        work = _work_claims(spans, states, CLAIM_OF_KIND, axis)
        rows, ready, priority = spans.kind == schema.STALL, standing.stall_ready, STALL_PRIORITY
    chosen = np.flatnonzero(rows & (spans.end > spans.start))
    return LaneClaims(
        work=work,
        stalls=_stalls(run, spans, chosen, ready[chosen], roles, standing.role[chosen], states, axis),
        priority=priority,
    )


def _work_claims(spans: Spans, states: tuple[State, ...], claim_of_kind: Mapping[int, Claim], axis: Int64) -> Claims:
    state_of_kind = np.full(len(schema.KINDS), -1, np.int32)
    priority_of_kind = np.zeros(len(schema.KINDS), np.int32)
    for kind, claim in claim_of_kind.items():
        state_of_kind[kind] = states.index(claim.state)
        priority_of_kind[kind] = claim.priority
    rows = np.flatnonzero((state_of_kind >= 0).take(spans.kind))
    kinds = spans.kind[rows]
    # Modules and users' spans on the host lane run beside the lane and say nothing about it.
    beside = (spans.lane[rows] != schema.COMPUTE) & np.isin(kinds, (schema.MODULE, schema.USER, schema.PHASE))
    rows, kinds = rows[~beside], kinds[~beside]
    start, end, shift = spans.start[rows], spans.end[rows], axis[rows]
    return Claims(start + shift, end + shift, state_of_kind.take(kinds), priority_of_kind.take(kinds), rows).filled()


def _stalls(
    run: Run,
    spans: Spans,
    rows: Int64,
    ready: Int64,
    roles: Roles,
    role: Int32,
    states: tuple[State, ...],
    axis: Int64,
) -> Stalls:
    """Return what these rows say, which are not empty; ``ready`` and ``role`` are theirs."""
    wait_of_role = np.array([states.index(State(WAIT, word)) for word in roles.words], np.int32)
    transfer_of_role = np.array([states.index(State(TRANSFER, word)) for word in roles.words], np.int32)
    # A stage that waits for its neighbour, to give or to take, is in the pipeline's bubble.
    bubble = is_p2p(run, spans)[rows] & (role == roles.code(PIPELINE))
    wait = np.where(bubble, states.index(State(BUBBLE)), wait_of_role.take(role)).astype(np.int32)
    start, end, shift = spans.start[rows], spans.end[rows], axis[rows]
    ready = np.clip(ready, start, end)
    return Stalls(start + shift, ready + shift, end + shift, wait, transfer_of_role.take(role), rows)
