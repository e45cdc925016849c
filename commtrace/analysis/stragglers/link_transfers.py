"""Transfers over the links of a job in each step, after all participants had arrived.

A link is what one communication passes over: from the sender of messages to the receiver, or between the members of a
group. Transfers of the same operation, size and number of members, within hosts or between them, can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.replay.peers import Float64, grouped_median
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.limits import FEWEST_TRANSFERS
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

_SEND, _RECEIVE = "send", "recv"


class Link(NamedTuple):
    """The path of communications.

    Attributes:
        ranks: of messages the sender and the receiver, of collectives the members, ascending.
        is_directed: of messages.
    """

    ranks: tuple[int, ...]
    is_directed: bool


class Traffic(NamedTuple):
    """Similar transfers over a link.

    Attributes:
        operation: its name; of messages, ``send`` on either side.
        num_bytes: of each transfer.
        participants: of each.
        link: over which.
    """

    operation: str
    num_bytes: int
    participants: int
    link: Link


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The transfers of the steps that count.

    Attributes:
        traffic: one row for all alike transfers over a link.
        like: of each row, a number that those share which can be compared.
        is_between_hosts: of each row.
        row_of_transfer: of each transfer of the program, its row; −1 where it has none.
        row, step, ns: of each communication: its row, the index of its step, and how long it took.
    """

    traffic: tuple[Traffic, ...]
    like: Int64
    is_between_hosts: Bool
    row_of_transfer: Int64
    row: Int64
    step: Int64
    ns: Float64

    @classmethod
    def of(cls, bench: Bench) -> LinkTransfers | None:
        """Return what passed over which link; None where too little did."""
        transfers, run = bench.program.transfers, bench.run
        rows = np.flatnonzero(bench.steady[transfers.step] & (transfers.participants > 1))
        if len(rows) < FEWEST_TRANSFERS:
            return None
        links, link_of_row = _links_of(bench, rows)
        node = {rank: trace.metadata.node for rank, trace in run.ranks.items()}
        crosses = np.array([len({node.get(rank) for rank in link.ranks}) > 1 for link in links])
        first, join = grouped(transfers.join[rows])
        ns = np.zeros(len(first))
        np.maximum.at(ns, join, transfers.ns[rows].astype(np.float64))  # a sender may not see the end of what it sent
        link, name = link_of_row[first], _operation(run, transfers.name[rows][first])
        num_bytes, participants = (column[rows][first] for column in (transfers.bytes, transfers.participants))
        like = pack([name, num_bytes, participants, crosses[link].astype(np.int64)])
        one, row = grouped(pack([grouped(like)[1], link]))
        row_of_transfer = np.full(len(transfers), -1, np.int64)
        row_of_transfer[rows] = row[join]
        return cls(
            traffic=tuple(
                Traffic(run.names[int(name[at])], int(num_bytes[at]), int(participants[at]), links[int(link[at])])
                for at in one.tolist()
            ),
            like=grouped(like[one])[1],
            is_between_hosts=crosses[link[one]],
            row_of_transfer=row_of_transfer,
            row=row,
            step=transfers.step[rows][first].astype(np.int64),
            ns=ns,
        )

    def __len__(self) -> int:
        return len(self.traffic)

    @property
    def links(self) -> tuple[Link, ...]:
        """Of each row."""
        return tuple(one.link for one in self.traffic)

    def typical_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in these steps of the program; NaN where there are too few transfers."""
        chosen = steps[self.step]
        enough = np.bincount(self.row[chosen], minlength=len(self)) >= FEWEST_TRANSFERS
        return np.where(enough, grouped_median(self.row[chosen], self.ns[chosen], len(self)), np.nan)

    def per_step_ns(self, steps: Bool) -> Float64:
        """Return the median of each row in each of these steps, shape (rows, steps); NaN where there is none."""
        count = len(steps)
        medians = grouped_median(self.row * count + self.step, self.ns, len(self) * count)
        return np.asarray(medians.reshape(-1, count)[:, steps])


def _links_of(bench: Bench, rows: Int64) -> tuple[list[Link], Int64]:
    """Return the links that these transfers passed over, and which one each of them did."""
    transfers, run = bench.program.transfers, bench.run
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
