"""The time for which lanes stand still, cut into pieces that do not overlap."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from commtrace.analysis.claims import Claims, LaneClaims, Stood, together
from commtrace.analysis.intervals import Union, paint
from commtrace.trace.order import stable_order
from commtrace.trace.spans import Bool, Int32, Int64


class PiecesOfSteps(NamedTuple):
    """What of the pieces lies in steps; a piece in several steps is listed for each of them.

    Attributes:
        step, piece: numbers.
        wait_ns, transfer_ns: of the piece in this step, before and after it is ready.
    """

    step: Int64
    piece: Int64
    wait_ns: Int64
    transfer_ns: Int64


class Pieces(NamedTuple):
    """Disjoint intervals in ascending order, none of them empty.

    Attributes:
        start, end: ns.
        ready: where in the piece its state changes.
        before, after: the state until then, and from then on.
        row: the span that claims it.
        is_standing: whether the lane stands still in it; else something is believed before that.
    """

    start: Int64
    ready: Int64
    end: Int64
    before: Int32
    after: Int32
    row: Int64
    is_standing: Bool

    @property
    def union(self) -> Union:
        """The instants in any piece."""
        return Union(self.start, self.end)

    @property
    def standing(self) -> Union:
        """The instants at which the lane stands still."""
        rows = np.flatnonzero(self.is_standing)
        return Union(self.start[rows], self.end[rows])

    def of_steps(self, start: Int64, end: Int64) -> PiecesOfSteps:
        """What of the pieces lies in these steps."""
        step, piece = self.union.inside(start, end)
        begin = np.maximum(self.start[piece], start[step])
        until = np.minimum(self.end[piece], end[step])
        ready = np.clip(self.ready[piece], begin, until)
        return PiecesOfSteps(step, piece, ready - begin, until - ready)


def cut_pieces(claims: LaneClaims) -> Pieces:
    """The pieces in which lanes stand still, and those of what is believed before that."""
    above, stood = claims.above, claims.stood
    start, end = np.concatenate([above.start, stood.start]), np.concatenate([above.end, stood.end])
    alone = _alone(start, end) - len(above.row)
    alone = alone[alone >= 0]
    clean = _whole(stood.of(alone))
    if len(alone) == len(start):
        return clean
    is_tangled = np.ones(len(stood.row), np.bool_)
    is_tangled[alone] = False
    painted = _painted(above, stood.of(np.flatnonzero(is_tangled)), claims.priority)
    columns: list[Any] = [np.concatenate([getattr(part, name) for part in (clean, painted)]) for name in Pieces._fields]
    order = stable_order(columns[0])
    return Pieces(*(column[order] for column in columns))


def _alone(start: Int64, end: Int64) -> Int64:
    """The intervals that no other one overlaps, ascending: nearly all, where a single thread waits."""
    order = np.arange(len(start)) if (start[1:] >= start[:-1]).all() else stable_order(start)
    reach = np.maximum.accumulate(end[order])
    # Edges between what has been and what comes: before the first, between two of them, and behind the last.
    is_apart = np.ones(len(order) + 1, np.bool_)
    is_apart[1:-1] = start[order[1:]] >= reach[:-1]
    return order.compress(is_apart[:-1] & is_apart[1:])


def _whole(stood: Stood) -> Pieces:
    every = np.ones(len(stood.row), np.bool_)
    return Pieces(stood.start, stood.ready, stood.end, stood.wait, stood.transfer, stood.row, every)


def _painted(above: Claims, stood: Stood, priority: int) -> Pieces:
    """Where they overlap, the innermost of the highest priority is believed."""
    wait, transfer = stood.claims(priority)
    every = together((above, wait, transfer))
    segments = paint(every.start, every.end, every.precedence(), np.zeros(0, np.int64))
    claimed = np.flatnonzero(segments.winner >= 0)
    winner = segments.winner[claimed]
    start, end = segments.edges[claimed], segments.edges[claimed + 1]
    # Each of these pieces is wait, or transfer, or neither as a whole.
    is_transfer = winner >= len(above.row) + len(wait.row)
    return Pieces(
        start=start,
        ready=np.where(is_transfer, start, end),
        end=end,
        before=every.state[winner],
        after=every.state[winner],
        row=every.row[winner],
        is_standing=winner >= len(above.row),
    )
