"""The edges of a program, and what weighs on each: pieces of work, a transfer, a fixed time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commtrace.analysis.replay.joins import Joins
from commtrace.analysis.replay.lanes import Lanes
from commtrace.trace.spans import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges in this order: along the lanes; from them to the joins; back from an own launch to the stall on it; back
    from joins to stalls; from joins to those of brackets.

    Attributes:
        source, target: nodes.
        first_piece, end_piece: of the first so many edges, the pieces of work that weigh on them.
        work_ns: what these last, as measured.
        transfer: of the last so many edges, the transfer that weighs on them; −1 for none.
        fixed_ns: what weighs on each edge besides.
    """

    source: Int64
    target: Int64
    first_piece: Int64
    end_piece: Int64
    work_ns: Int64
    transfer: Int64
    fixed_ns: Int64

    def __len__(self) -> int:
        return len(self.source)

    def weights(self, work_ns: Int64, transfer_ns: Int64) -> Int64:
        """Return the weight of each edge, ns.

        Args:
            work_ns: of those edges that have pieces.
            transfer_ns: of each transfer.
        """
        weights = self.fixed_ns.copy()
        weights[: len(work_ns)] += work_ns
        # Numbered −1, no transfer is the one behind the last.
        weights[len(weights) - len(self.transfer) :] += np.append(transfer_ns, 0)[self.transfer]
        return weights


@dataclass(frozen=True, slots=True)
class StallNodes:
    """The stalls of all lanes: what is needed to say, after a replay, how long each one lasted and why.

    Attributes:
        rank, row, step: which stall it is.
        node: instant at which the lane goes on.
        lane_edge: the edge into it along the lane: when the stall began, but for the edge's ``fixed_ns``.
        join_node: instant at which the last participant had started; −1 where the stall did not depend on others.
    """

    rank: Int32
    row: Int32
    step: Int32
    node: Int64
    lane_edge: Int64
    join_node: Int64

    def __len__(self) -> int:
        return len(self.rank)


def connect(lanes: Lanes, joins: Joins) -> tuple[Edges, StallNodes]:
    """Edges along the lanes, from them to the joins, and back from them to the stalls.

    Joins are numbered behind the nodes of the lanes.
    """
    starts, waits = lanes.starts, lanes.waits
    nodes = len(lanes.node_piece)
    ends_piece = np.ones(nodes, np.bool_)
    ends_piece[lanes.first_node.reshape(-1)] = False
    into = np.flatnonzero(ends_piece)
    known = waits.launch >= 0
    which = np.maximum(waits.launch, 0)
    duration = waits.end - waits.start
    really, after = _after_communication(lanes, known, which, duration)

    # After a stall that really waited the lane goes on when the communication has ended (and what little the recorder
    # saw between the two); one that found it ended only has a length of its own, which it keeps.
    along = np.zeros(nodes, np.int64)
    along[waits.node] = np.where(really, 0, duration)
    helps = np.flatnonzero(joins.helps >= 0)
    eager = np.zeros(len(waits), np.bool_)
    alone = np.zeros(len(waits), np.bool_)
    if len(starts):
        eager = known & joins.transfers.eager[which]
        alone = known & (eager | (joins.helps[which] < 0))
    on_join, on_own = np.flatnonzero(known & ~eager), np.flatnonzero(alone)
    own = which[on_own]
    member, bracket = joins.members
    join_of_wait = joins.waits_for[which[on_join]] + nodes

    first_piece = np.concatenate(
        [lanes.node_piece[into - 1], lanes.node_piece[starts.node[helps]], lanes.node_piece[starts.node[own]]]
    )
    end_piece = np.concatenate([lanes.node_piece[into], starts.piece[helps], starts.piece[own]])
    edges = Edges(
        source=np.concatenate([into - 1, starts.node[helps], starts.node[own], join_of_wait, member + nodes]),
        target=np.concatenate(
            [into, joins.helps[helps] + nodes, waits.node[on_own], waits.node[on_join], bracket + nodes]
        ),
        first_piece=first_piece,
        end_piece=end_piece,
        work_ns=work_between(worked_before(lanes.piece_ns), first_piece, end_piece),
        transfer=np.concatenate([own, which[on_join], np.full(len(member), -1)]),
        fixed_ns=np.concatenate(
            [
                along[into],
                starts.extra_ns[helps],
                starts.extra_ns[own] + after[on_own],
                after[on_join],
                np.zeros(len(member), np.int64),
            ]
        ),
    )
    join_node = np.full(len(waits), -1)
    join_node[on_join] = join_of_wait
    edge_of_node = np.cumsum(ends_piece) - 1
    stalls = StallNodes(waits.rank, waits.row, waits.step, waits.node, edge_of_node[waits.node], join_node)
    return edges, stalls


def worked_before(piece_ns: Int64) -> Int64:
    """Working time in all pieces before each piece, and in all of them."""
    before = np.zeros(len(piece_ns) + 1, np.int64)
    np.cumsum(piece_ns, out=before[1:])
    return before


def work_between(before: Int64, first_piece: Int64, end_piece: Int64) -> Int64:
    """Working time in the pieces from one to another; ``before`` as :func:`worked_before` gives it."""
    work = before.take(end_piece)
    work -= before.take(first_piece)
    return work


def _after_communication(lanes: Lanes, known: Bool, which: Int64, duration: Int64) -> tuple[Bool, Int64]:
    """Return which stalls waited for their communication, and how long each lasted after its end (or, if it did not
    wait, after its own begin).
    """
    if not len(lanes.starts):
        return known, duration
    end = lanes.starts.end[which]
    really = known & (end > lanes.waits.start)
    return really, np.where(really, lanes.waits.end - end, duration)
