"""What a rank's spans say about its lane: intervals, each with the state that it claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from commtrace.analysis.match import RankMatches
from commtrace.analysis.operations import communication_rows, is_kernel_trace
from commtrace.analysis.roles import PIPELINE, RankRoles, Roles, is_p2p
from commtrace.analysis.states import (
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
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int32, Int64, Spans


class Claims(NamedTuple):
    """Intervals of one rank; all arrays have the same length.

    Attributes:
        start, end: ns.
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
        """A number from 0 to n − 1 per claim: the higher one wins.

        By priority, then the innermost (the later start, then the earlier end). The state decides what is left, so
        that the order of the input never does.
        """
        order = np.lexsort((self.state, -self.end, self.start, self.priority))
        precedence = np.empty(len(order), np.int64)
        precedence[order] = np.arange(len(order))
        return precedence


def claims_of_rank(run: Run, trace: RankTrace, matches: RankMatches, roles: Roles) -> Claims:
    """Everything that the rank's spans claim, stalls cut into their wait and their transfer.

    A trace of kernels holds no stalls: in it, communication itself claims the time at which no kernel computes.
    """
    spans = trace.spans
    states = states_of(roles.words)
    if is_kernel_trace(spans):
        work = _work_claims(spans, states, CLAIM_OF_TRACED_KIND)
        rows, ready, priority = communication_rows(spans), matches.ready, TRACED_COMMUNICATION_PRIORITY
    else:
        work = _work_claims(spans, states, CLAIM_OF_KIND)
        rows, ready, priority = spans.kind == schema.STALL, matches.stall_ready, STALL_PRIORITY
    of_rank = roles.ranks[trace.rank]
    parts = (work, *_standing_claims(run, spans, np.flatnonzero(rows), ready, priority, roles, of_rank, states))
    return Claims(
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.state for part in parts]),
        np.concatenate([part.priority for part in parts]),
        np.concatenate([part.row for part in parts]),
    )


def _work_claims(spans: Spans, states: tuple[State, ...], claim_of_kind: Mapping[int, Claim]) -> Claims:
    state_of_kind = np.full(len(schema.KINDS), -1, np.int32)
    priority_of_kind = np.zeros(len(schema.KINDS), np.int32)
    for kind, claim in claim_of_kind.items():
        state_of_kind[kind] = states.index(claim.state)
        priority_of_kind[kind] = claim.priority
    # Modules and users' spans on the host lane run beside the lane and say nothing about it.
    beside = (spans.lane != schema.COMPUTE) & np.isin(spans.kind, (schema.MODULE, schema.USER, schema.PHASE))
    rows = np.flatnonzero((state_of_kind[spans.kind] >= 0) & ~beside)
    kinds = spans.kind[rows]
    return Claims(spans.start[rows], spans.end[rows], state_of_kind[kinds], priority_of_kind[kinds], rows)


def _standing_claims(
    run: Run,
    spans: Spans,
    rows: Int64,
    ready: Int64,
    priority: int,
    roles: Roles,
    of_rank: RankRoles,
    states: tuple[State, ...],
) -> tuple[Claims, Claims]:
    """What rows during which the lane stands still say: wait until they are ready, transfer from then on."""
    role = of_rank.role[rows]
    wait_of_role = np.array([states.index(State(WAIT, word)) for word in roles.words], np.int32)
    transfer_of_role = np.array([states.index(State(TRANSFER, word)) for word in roles.words], np.int32)
    # A stage that waits for its neighbour, to give or to take, is in the pipeline's bubble.
    bubble = is_p2p(run, spans)[rows] & (role == roles.code(PIPELINE))
    wait = np.where(bubble, states.index(State(BUBBLE)), wait_of_role[role]).astype(np.int32)
    cut = np.clip(ready[rows], spans.start[rows], np.maximum(spans.start[rows], spans.end[rows]))
    priorities = np.full(len(rows), priority, np.int32)
    return (
        Claims(spans.start[rows], cut, wait, priorities, rows),
        Claims(cut, spans.end[rows], transfer_of_role[role], priorities, rows),
    )
