"""The edges of a program, and what weighs on each: pieces of work, a transfer, a fixed time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.operations import codes_named
from commtrace.analysis.replay.lanes import Lanes, Launches, Waits
from commtrace.analysis.replay.segments import narrow
from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges in order: along lanes, lanes to joins, launches to own stalls, joins to stalls, joins to their brackets."""

    source: Int32
    target: Int32
    first_piece: Int32  # of the work on the first so many edges
    end_piece: Int32
    work_ns: Int64  # in these pieces
    transfer: Int32  # on the last so many edges; −1 for none
    fixed_ns: Int64  # on each edge besides

    def __len__(self) -> int:
        return len(self.source)

    def weights(self, work_ns: Int64, transfer_ns: Int64) -> Int64:
        """Return the weight of each edge, ns, with this work on the first edges and these transfers."""
        weights = self.fixed_ns.copy()
        weights[: len(work_ns)] += work_ns
        # Index −1, for no transfer, reads the appended 0.
        weights[len(weights) - len(self.transfer) :] += np.append(transfer_ns, 0)[self.transfer]
        return weights


@dataclass(frozen=True, slots=True)
class StallNodes:
    """Stalls of all lanes, by the nodes that bound them in a replay."""

    rank: Int32
    row: Int32
    step: Int32
    node: Int32  # end of the stall
    lane_edge: Int32  # edge into ``node`` along the lane: begin of the stall, but for the edge's ``fixed_ns``
    join_node: Int32  # start of the last participant; −1 if the stall did not depend on others

    def __len__(self) -> int:
        return len(self.rank)


def connect(lanes: Lanes, joins: Joins) -> tuple[Edges, StallNodes]:
    """Connect the nodes of the lanes and the joins, which are numbered last."""
    starts, waits = lanes.starts, lanes.waits
    nodes = len(lanes.node_piece)
    ends_piece = np.ones(nodes, np.bool_)
    ends_piece[lanes.first_node.reshape(-1)] = False
    into = narrow(np.flatnonzero(ends_piece))
    known = waits.launch >= 0
    which = np.maximum(waits.launch, 0)
    duration = waits.end - waits.start
    really, after = _after_communication(lanes, joins, known, which, duration)

    # A stall that really waited ends with its communication, plus the short time that was measured between the two. A
    # stall on a communication that had ended keeps its length.
    along = np.zeros(nodes, np.int64)
    along[waits.node] = np.where(really, 0, duration)
    helps = np.flatnonzero(joins.helps >= 0)
    eager = np.zeros(len(waits), np.bool_)
    alone = np.zeros(len(waits), np.bool_)
    if len(starts):
        eager = known & joins.transfers.eager[which]
        alone = known & (eager | (joins.helps[which] < 0))
    on_join, behind_wait = np.flatnonzero(known & ~eager), np.flatnonzero(alone)
    ending_alone = which[behind_wait]
    member, bracket = joins.members
    join_of_wait = joins.waits_for[which[on_join]] + nodes

    first_piece = np.concatenate(
        [lanes.node_piece[into - 1], lanes.node_piece[starts.node[helps]], lanes.node_piece[starts.node[ending_alone]]]
    )
    end_piece = np.concatenate([lanes.node_piece[into], starts.piece[helps], starts.piece[ending_alone]])
    source = np.concatenate([into - 1, starts.node[helps], starts.node[ending_alone], join_of_wait, member + nodes])
    target = np.concatenate(
        [into, joins.helps[helps] + nodes, waits.node[behind_wait], waits.node[on_join], bracket + nodes]
    )
    edges = Edges(
        source=source,
        target=target,
        first_piece=first_piece,
        end_piece=end_piece,
        work_ns=work_between(worked_before(lanes.piece_ns), first_piece, end_piece),
        transfer=np.concatenate([ending_alone, which[on_join], np.full(len(member), -1, np.int32)]),
        fixed_ns=np.concatenate(
            [
                along[into],
                starts.extra_ns[helps],
                starts.extra_ns[ending_alone] + after[behind_wait],
                after[on_join],
                np.zeros(len(member), np.int64),
            ]
        ),
    )
    join_node = np.full(len(waits), -1, np.int32)
    join_node[on_join] = join_of_wait
    edge_of_node = np.cumsum(ends_piece) - 1
    lane_edge = narrow(edge_of_node[waits.node])
    stalls = StallNodes(waits.rank, waits.row, waits.step, waits.node, lane_edge, join_node)
    return edges, stalls


def worked_before(piece_ns: Int64) -> Int64:
    """Return the working time before each piece, and in all pieces."""
    before = np.zeros(len(piece_ns) + 1, np.int64)
    np.cumsum(piece_ns, out=before[1:])
    return before


def work_between(before: Int64, first_piece: Int32 | Int64, end_piece: Int32 | Int64) -> Int64:
    """Return the working time from one piece to another; ``before`` is from :func:`worked_before`."""
    work = before.take(end_piece)
    work -= before.take(first_piece)
    return work


def _after_communication(lanes: Lanes, joins: Joins, known: Bool, which: Int32, duration: Int64) -> tuple[Bool, Int64]:
    """Return which stalls waited for their communication, and their time after its end, or else all of their time."""
    if not len(lanes.starts):
        return known, duration
    end, end_exact = lanes.starts.end[which], joins.transfers.end_exact[which]
    # An end that is a bound is that of the wait: the communication had ended before, at an unknown time.
    really = known & end_exact & (end > lanes.waits.start)
    after = np.where(really, lanes.waits.end - end, duration)
    return really, np.where(known & ~end_exact, 0, after)


def no_longer_than_their_stalls(joins: Joins, waits: Waits) -> Joins:
    """Return joins whose transfers with an unknown end are no longer than a stall on them.

    Such an end is that of the wait for the communication, which may have been over for long: torch's pipelines wait for
    their sends at the end of a step.
    """
    transfers = joins.transfers
    longest_stall = np.zeros(len(transfers), np.int64)
    known = waits.launch >= 0
    np.maximum.at(longest_stall, waits.launch[known], (waits.end - waits.start)[known])
    bounded = np.where(transfers.end_exact, transfers.ns, np.minimum(transfers.ns, longest_stall))
    return replace(joins, transfers=replace(transfers, ns=bounded))


_ROOT_FIRST: Final = ("broadcast", "scatter")
"""Collectives whose members need only the root."""

_NEVER: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class ReplayTransfers:
    """Communications after the last start, per participant. Columns of equal length."""

    rank: Int32
    row: Int32
    step: Int32  # index into the steps of the program
    join: Int32  # equal for the participants of one communication
    participants: Int32  # that were found
    name: Int32
    bytes: Int64
    eager: Bool  # ended before the last participant started
    ns: Int64  # measured end minus latest start; minus own start where ``eager``
    exact: Bool  # False: ``ns`` is an upper bound
    end_exact: Bool

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Joins:
    """All communications. ``helps``, ``waits_for`` and ``transfers`` are aligned with the launches."""

    count: int
    step: Int32  # index of the step of each join, brackets included
    helps: Int32  # join that the launch helps to start; −1 if others do not wait for it
    waits_for: Int32  # join that the launch ends after
    members: tuple[Int32, Int32]  # joins of communications, and of the brackets that these are part of
    transfers: ReplayTransfers


def join_launches(run: Run, launches: Launches, *, clocks_agree: bool) -> Joins:
    """Find the launches of different ranks that are one communication, and the transfer of each."""
    join = narrow(grouped(_communication_keys(launches, clocks_agree=clocks_agree))[1])
    count = int(join.max()) + 1 if len(join) else 0
    latest, helps = _latest_start(run, launches, join, count)
    if not clocks_agree:
        latest = launches.last_start

    bracket, sources = _brackets(launches)
    waits_for = join
    if len(sources):
        waits_for = np.where(bracket >= 0, narrow(count + bracket), join)
        shared = np.full(int(bracket.max()) + 1, _NEVER)
        np.maximum.at(shared, bracket[sources], latest[sources])
        latest = np.where(bracket >= 0, shared[bracket], latest)
    eager = launches.end < latest
    transfers = ReplayTransfers(
        rank=launches.rank,
        row=launches.row,
        step=launches.step,
        join=join,
        participants=narrow(np.bincount(join, minlength=count))[join],
        name=launches.name,
        bytes=launches.bytes,
        eager=eager,
        ns=launches.end - np.where(eager, launches.start, latest),
        exact=launches.ready_exact & launches.end_exact,
        end_exact=launches.end_exact,
    )
    step = np.empty(count + int(bracket.max(initial=-1)) + 1, np.int32)
    step[join] = step[waits_for] = launches.step
    return Joins(len(step), step, helps, waits_for, (join[sources], waits_for[sources]), transfers)


def _latest_start(run: Run, launches: Launches, join: Int32, count: int) -> tuple[Int64, Int32]:
    """Return the last start that each launch needs, and the join that it helps to start; −1 for none."""
    last_start = np.full(count, _NEVER)
    needs_root = codes_named(run, launches.name, _ROOT_FIRST) & (launches.kind == schema.COLLECTIVE)
    supplies = ~needs_root | (launches.peer == launches.rank) | (launches.peer < 0)
    np.maximum.at(last_start, join[supplies], launches.start[supplies])
    latest = np.where(needs_root, np.maximum(last_start[join], launches.start), last_start[join])
    return latest, np.where(supplies, join, np.int32(-1))


def _communication_keys(launches: Launches, *, clocks_agree: bool) -> Int64:
    """Return numbers that are equal for the participants of one communication in one step."""
    bucket = launches.bucket
    alone = (bucket < 0) | (~launches.complete & (not clocks_agree))
    return pack([np.where(alone, -1, bucket), launches.step, np.where(alone, np.arange(len(bucket)), -1)])


def _brackets(launches: Launches) -> tuple[Int64, Int64]:
    """Return the bracket of each point-to-point row that shares its times with others, else −1; and those rows."""
    # Members of a bracket have consecutive ids on their rank, and op_in_seq counts them from 0.
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
