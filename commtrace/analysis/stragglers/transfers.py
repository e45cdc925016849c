"""Transfers over the links of a job: what a communication took after all of its participants had arrived.

A link is what one communication passes over: from the sender of messages to the receiver, or between the members of a
group. Transfers of the same operation, size and number of members, within hosts or between them, can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.edges import Transfers
from commtrace.analysis.statistics import Float64, grouped_median
from commtrace.analysis.stragglers.limits import FEWEST_TRANSFERS
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

_SEND, _RECEIVE = "send", "recv"


class Link(NamedTuple):
    """The path of communications: of messages the sender and the receiver, of collectives the members, ascending."""

    ranks: tuple[int, ...]
    is_directed: bool


class Traffic(NamedTuple):
    """Similar transfers over a link: of messages, the operation is ``send`` on either side."""

    operation: str
    num_bytes: int
    participants: int
    link: Link


@dataclass(frozen=True, slots=True)
class TransferTable:
    """The transfers of some steps, one row per participant.

    Attributes:
        row: index of the traffic of each transfer.
        join: number that the participants of one communication share.
        step: index of the step.
    """

    traffic: tuple[Traffic, ...]
    row: Int64
    join: Int64
    rank: Int32
    step: Int32
    ns: Int64

    @classmethod
    def of(cls, run: Run, transfers: Transfers) -> TransferTable:
        """Return the transfers of a program with more than one participant."""
        traffic, row = traffic_of(run, transfers)
        own = np.flatnonzero(row >= 0)
        return cls(traffic, row[own], transfers.join[own], transfers.rank[own], transfers.step[own], transfers.ns[own])

    def followed_by(self, other: TransferTable, num_steps: int) -> TransferTable:
        number = {one: at for at, one in enumerate(self.traffic)}
        for one in other.traffic:
            number.setdefault(one, len(number))
        row = np.array([number[one] for one in other.traffic], np.int64)[other.row]
        return TransferTable(
            tuple(number),
            np.concatenate([self.row, row]),
            np.concatenate([self.join, other.join + self.join.max(initial=-1) + 1]),
            np.concatenate([self.rank, other.rank]),
            np.concatenate([self.step, other.step + np.int32(num_steps)]),
            np.concatenate([self.ns, other.ns]),
        )


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The transfers of the steps that count, one row for all similar transfers over a link.

    Attributes:
        like: of each row, a number that those share which can be compared.
        row, step, ns: of each communication.
        each: of every participant.
    """

    traffic: tuple[Traffic, ...]
    like: Int64
    is_between_hosts: Bool
    row: Int64
    step: Int64
    ns: Float64
    each: TransferTable

    @classmethod
    def of(cls, table: TransferTable, counted: Bool, node: Mapping[int, str]) -> LinkTransfers | None:
        """Return the transfers of the steps that count; None where these are too few. ``node`` is by rank."""
        rows = np.flatnonzero(counted[table.step])
        if len(rows) < FEWEST_TRANSFERS:
            return None
        first, join = grouped(table.join[rows])
        ns = np.zeros(len(first))
        np.maximum.at(ns, join, table.ns[rows].astype(np.float64))  # a sender may not see the end of what it sent
        crosses = [len({node.get(rank) for rank in one.link.ranks}) > 1 for one in table.traffic]
        number: dict[tuple[str, int, int, bool], int] = {}
        like = [
            number.setdefault((one.operation, one.num_bytes, one.participants, between), len(number))
            for one, between in zip(table.traffic, crosses, strict=True)
        ]
        return cls(
            traffic=table.traffic,
            like=np.array(like, np.int64),
            is_between_hosts=np.array(crosses),
            row=table.row[rows][first],
            step=table.step[rows][first].astype(np.int64),
            ns=ns,
            each=table,
        )

    def __len__(self) -> int:
        return len(self.traffic)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(one.link for one in self.traffic)

    def typical_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in these steps; NaN where there are too few transfers."""
        chosen = steps[self.step]
        enough = np.bincount(self.row[chosen], minlength=len(self)) >= FEWEST_TRANSFERS
        return np.where(enough, grouped_median(self.row[chosen], self.ns[chosen], len(self)), np.nan)

    def per_step_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in each of these steps, shape (rows, steps); NaN where there is none."""
        count = len(steps)
        medians = grouped_median(self.row * count + self.step, self.ns, len(self) * count)
        return np.asarray(medians.reshape(-1, count)[:, steps])


def traffic_of(run: Run, transfers: Transfers) -> tuple[tuple[Traffic, ...], Int64]:
    """Return what passes over the links, and which of it each transfer is; −1 of those without other participants."""
    rows = np.flatnonzero(transfers.participants > 1)
    number = np.full(len(transfers), -1, np.int64)
    if not len(rows):
        return (), number
    links, link_of_row = _links_of(run, transfers, rows)
    node = {rank: trace.metadata.node for rank, trace in run.ranks.items()}
    crosses = np.array([len({node.get(rank) for rank in link.ranks}) > 1 for link in links])
    first, join = grouped(transfers.join[rows])
    link, name = link_of_row[first], _operation(run, transfers.name[rows][first])
    num_bytes, participants = (column[rows][first] for column in (transfers.bytes, transfers.participants))
    one, row = grouped(pack([name, num_bytes, participants, crosses[link].astype(np.int64), link]))
    # Groups with the same members are one link.
    traffic: dict[Traffic, int] = {}
    same = [
        traffic.setdefault(
            Traffic(run.names[int(name[at])], int(num_bytes[at]), int(participants[at]), links[int(link[at])]),
            len(traffic),
        )
        for at in one.tolist()
    ]
    number[rows] = np.array(same, np.int64)[row[join]]
    return tuple(traffic), number


def _links_of(run: Run, transfers: Transfers, rows: Int64) -> tuple[list[Link], Int64]:
    rank = transfers.rank[rows].astype(np.int64)
    order = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[order], [*run.ranks, np.iinfo(np.int64).max])
    group, peer = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for one, begin, end in zip(run.ranks.values(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = order[begin:end]
        group[own], peer[own] = (column[transfers.row[rows][own]] for column in (one.spans.group, one.spans.peer))
    code = {word: number for number, word in enumerate(run.names)}
    sends, receives = (transfers.name[rows] == code.get(word, -1) for word in (_SEND, _RECEIVE))
    is_message = (sends | receives) & (peer >= 0)
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    key = pack([np.where(is_message, -1, group), np.where(is_message, source, 0), np.where(is_message, target, 0)])
    first, link = grouped(key)
    join = transfers.join[rows]
    links = []
    for row in first.tolist():
        if is_message[row]:
            links.append(Link((int(source[row]), int(target[row])), is_directed=True))
            continue
        told = run.ranks[int(rank[row])].groups.get(int(group[row]))
        # Without a word of the group's members: those that were found in one of its communications.
        members = np.unique(rank[join == join[row]]).tolist() if told is None else told.ranks
        links.append(Link(tuple(one for one in members if one in run.ranks), is_directed=False))
    return links, link


def _operation(run: Run, name: Int32) -> Int64:
    """Return the name's code, of messages that of ``send`` on either side."""
    code = {word: number for number, word in enumerate(run.names)}
    return np.where(name == code.get(_RECEIVE, -1), code.get(_SEND, -1), name).astype(np.int64)
