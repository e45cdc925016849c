"""The edges of a program, and what weighs on each: pieces of work, a transfer, a fixed time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.operations import codes_named
from commtrace.analysis.replay.lanes import Lanes, Launches
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges in this order: along the lanes; from them to the joins; back from an own launch to the stall on it; back
    from joins to stalls; from joins to those of brackets.

    Attributes:
        first_piece, end_piece: of the first so many edges, the pieces of work that weigh on them; ``work_ns`` in all.
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
        """Return the weight of each edge, ns, with these durations of the edges with pieces and of transfers."""
        weights = self.fixed_ns.copy()
        weights[: len(work_ns)] += work_ns
        # Numbered −1, no transfer is the one behind the last.
        weights[len(weights) - len(self.transfer) :] += np.append(transfer_ns, 0)[self.transfer]
        return weights


@dataclass(frozen=True, slots=True)
class StallNodes:
    """The stalls of all lanes: how long each one lasted after a replay, and why.

    Attributes:
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
    """Return edges along the lanes, from them to the joins, and back to the stalls; joins are numbered last."""
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
    """Return the working time in all pieces before each piece, and in all of them."""
    before = np.zeros(len(piece_ns) + 1, np.int64)
    np.cumsum(piece_ns, out=before[1:])
    return before


def work_between(before: Int64, first_piece: Int64, end_piece: Int64) -> Int64:
    """Return the working time in the pieces from one to another; see :func:`worked_before`."""
    work = before.take(end_piece)
    work -= before.take(first_piece)
    return work


def _after_communication(lanes: Lanes, known: Bool, which: Int64, duration: Int64) -> tuple[Bool, Int64]:
    """Return which stalls waited for their communication, and how long each lasted after its end or, else, in all."""
    if not len(lanes.starts):
        return known, duration
    end = lanes.starts.end[which]
    really = known & (end > lanes.waits.start)
    return really, np.where(really, lanes.waits.end - end, duration)


_ROOT_FIRST: Final = ("broadcast", "scatter")
"""Collectives whose members need the root only, not one another."""

_NEVER: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Transfers:
    """The part of every communication, per participant, that is not waiting. Columns of equal length.

    Attributes:
        step: index into the steps of the program.
        join: number shared by the participants of one communication.
        participants: how many of them were found.
        ns: measured end minus latest start; its own duration where ``eager``.
    """

    rank: Int32
    row: Int32
    step: Int32
    join: Int64
    participants: Int64
    name: Int32
    bytes: Int64
    eager: Bool
    ns: Int64

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Joins:
    """All communications. Columns are aligned with the launches.

    Attributes:
        step: of each of ``count`` joins, brackets included, the index of its step.
        helps: the join that the launch helps to start; −1 where others do not wait for it.
        waits_for: the join that it ends after.
        members: from the join of one communication to that of a bracket that it is part of.
    """

    count: int
    step: Int64
    helps: Int64
    waits_for: Int64
    members: tuple[Int64, Int64]
    transfers: Transfers


def join_launches(run: Run, launches: Launches, *, clocks_agree: bool) -> Joins:
    """Return which launches of different ranks are one communication, and how long each took after its last start."""
    _, join = grouped(_communication_keys(launches, clocks_agree=clocks_agree))
    count = int(join.max()) + 1 if len(join) else 0
    latest, helps = _latest_start(run, launches, join, count)
    if not clocks_agree:
        latest = launches.last_start

    bracket, sources = _brackets(launches)
    waits_for = join
    if len(sources):
        waits_for = np.where(bracket >= 0, count + bracket, join)
        shared = np.full(int(bracket.max()) + 1, _NEVER)
        np.maximum.at(shared, bracket[sources], latest[sources])
        latest = np.where(bracket >= 0, shared[bracket], latest)
    eager = launches.end < latest
    transfers = Transfers(
        rank=launches.rank,
        row=launches.row,
        step=launches.step,
        join=join,
        participants=np.bincount(join, minlength=count)[join],
        name=launches.name,
        bytes=launches.bytes,
        eager=eager,
        ns=launches.end - np.where(eager, launches.start, latest),
    )
    step = np.empty(count + int(bracket.max(initial=-1)) + 1, np.int64)
    step[join] = step[waits_for] = launches.step
    return Joins(len(step), step, helps, waits_for, (join[sources], waits_for[sources]), transfers)


def _latest_start(run: Run, launches: Launches, join: Int64, count: int) -> tuple[Int64, Int64]:
    """Return when the last one had started that each launch needs, and the join that it itself helps to start."""
    last_start = np.full(count, _NEVER)
    needs_root = codes_named(run, launches.name, _ROOT_FIRST) & (launches.kind == schema.COLLECTIVE)
    supplies = ~needs_root | (launches.peer == launches.rank) | (launches.peer < 0)
    np.maximum.at(last_start, join[supplies], launches.start[supplies])
    latest = np.where(needs_root, np.maximum(last_start[join], launches.start), last_start[join])
    return latest, np.where(supplies, join, -1)


def _communication_keys(launches: Launches, *, clocks_agree: bool) -> Int64:
    """Return numbers that are equal for the participants, in one step, of one communication."""
    bucket = launches.bucket
    alone = (bucket < 0) | (~launches.complete & (not clocks_agree))
    return pack([np.where(alone, -1, bucket), launches.step, np.where(alone, np.arange(len(bucket)), -1)])


def _brackets(launches: Launches) -> tuple[Int64, Int64]:
    """Return the bracket of each point-to-point row that shares its times with others, else −1; and those rows.

    Members of a bracket have consecutive ids on their rank, and ``op_in_seq`` counts them from 0.
    """
    p2p = np.flatnonzero(launches.kind == schema.P2P)
    bracket = np.full(len(launches), -1, np.int64)
    rank, step = launches.rank, launches.step
    ordered = p2p[np.lexsort((launches.id[p2p], step[p2p], rank[p2p]))]
    begins = (launches.op_in_seq[ordered] == 0) | (np.diff(pack([rank[ordered], step[ordered]]), prepend=-1) != 0)
    number = np.cumsum(begins) - 1
    several = np.bincount(number)[number] > 1
    members = ordered[several]
    _, bracket[members] = np.unique(number[several], return_inverse=True)
    return bracket, members
