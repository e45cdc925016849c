"""Which communication is slow: a link between ranks, all that a rank sends, all of a rank, or a host's network.

A link is what one communication passes over: from the sender of messages to the receiver, or between the members of a
group. Transfers of the same operation, size and number of members, within hosts or between them, are compared link by
link, by the rule for the work of ranks. The slow links are then told by what they have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.replay.peers import Float64, grouped_median
from commtrace.analysis.statistics import MEDIAN_DISTANCE
from commtrace.analysis.stragglers.costs import Bench
from commtrace.analysis.stragglers.limits import FEWEST_TRANSFERS, LINKS, SHARE_OF_HOST
from commtrace.analysis.stragglers.normal import Judged, Work, judge
from commtrace.analysis.stragglers.verdict import LINK, NETWORK, RANKS, Member, Verdict, next_step
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64

_CAUSE: Final = "communication"
_SEND, _RECEIVE = "send", "recv"

_FAST_PERCENTILE: Final = 25
"""Shares are taken of what the fast links of a class take: most of them may be slow."""


class Link(NamedTuple):
    """What communications pass over.

    Attributes:
        ranks: of messages the sender and the receiver, of collectives the members, ascending.
        is_directed: of messages.
    """

    ranks: tuple[int, ...]
    is_directed: bool


@dataclass(frozen=True, slots=True)
class _Links:
    """What passed over each link, one row for each class of comparable transfers on it.

    Attributes:
        link: of each row.
        entry: of each transfer of the program, its row; −1 where it is in none.
        ns: median of the transfers.
        normal_ns: of the comparable links; NaN where that is not known.
        is_slow: takes far longer than normal.
    """

    link: tuple[Link, ...]
    entry: Int64
    ns: Float64
    normal_ns: Float64
    is_slow: Bool


class _Suspicion(NamedTuple):
    """Slow links that have something in common.

    Attributes:
        place: a link, a rank whose links are all slow, or the network of a host.
        who: in words.
        ranks: the guilty, or the ends of the link.
        rows: of the links.
    """

    place: str
    who: str
    ranks: tuple[int, ...]
    rows: frozenset[int]


class SlowLinks(NamedTuple):
    """Slow communication.

    Attributes:
        verdicts: dearest first.
        mended_ns: durations of all transfers without it; None where there is none.
    """

    verdicts: list[Verdict]
    mended_ns: Int64 | None


def slow_links(bench: Bench, mended_ns: Int64, slow_ranks: Collection[int]) -> SlowLinks:
    """Find slow communication, and what the job would save without it.

    Args:
        bench: the run.
        mended_ns: durations of its segments without what was found so far.
        slow_ranks: those; they may serve their communications late, so links that touch them are not judged.
    """
    links = _compare(bench, slow_ranks)
    if links is None or not links.is_slow.any():
        return SlowLinks([], None)
    suspicions = list(_explanations(bench.run, links))
    everything = frozenset().union(*(one.rows for one in suspicions))
    others_saved = bench.saved_ns(mended_ns)
    all_saved = bench.saved_ns(mended_ns, _mended(bench, links, everything)) - others_saved
    verdicts = []
    named: frozenset[int] = frozenset()
    for one in suspicions:
        left = everything - one.rows
        saved = all_saved
        if left:
            saved = all_saved + others_saved - bench.saved_ns(mended_ns, _mended(bench, links, left))
        cost = bench.cost_of(saved)
        if not bench.passes(cost):
            continue
        named |= one.rows
        verdicts.append(
            Verdict(
                rank=one.ranks[0],
                host=bench.run.ranks[one.ranks[0]].metadata.node,
                place=one.place,
                cause=_CAUSE,
                who=one.who,
                cost_ms_per_step=cost.ms,
                gpu_hours_per_day=bench.gpu_hours_per_day(cost),
                persistence=cost.persistence,
                evidence=_evidence(one, links),
                next_step=next_step(_CAUSE, len(one.ranks)),
                members=tuple(_member(bench, links, one, rank) for rank in one.ranks),
            )
        )
    ordered = sorted(verdicts, key=lambda verdict: -verdict.cost_ms_per_step)
    return SlowLinks(ordered, _mended(bench, links, named) if named else None)


def _compare(bench: Bench, slow_ranks: Collection[int]) -> _Links | None:
    """What passed over which link and how fast, without the links of these ranks; None where too little did."""
    transfers, run = bench.program.transfers, bench.run
    rows = np.flatnonzero(bench.steady[transfers.step] & (transfers.participants > 1))
    if len(rows) < FEWEST_TRANSFERS:
        return None
    words, link_of_row = _links_of(bench, rows)
    node = {rank: trace.metadata.node for rank, trace in run.ranks.items()}
    crosses = np.array([len({node.get(rank) for rank in link.ranks}) > 1 for link in words])
    first, join = grouped(transfers.join[rows])
    ns = np.zeros(len(first))
    np.maximum.at(ns, join, transfers.ns[rows].astype(np.float64))  # a sender may not see the end of what it sent
    link = link_of_row[first]
    like = pack(
        [
            _operation(run, transfers.name[rows][first]),
            transfers.bytes[rows][first],
            transfers.participants[rows][first],
            crosses[link].astype(np.int64),
        ]
    )
    one, entry = grouped(pack([grouped(like)[1], link]))
    typical = grouped_median(entry, ns, len(one))
    _, peers = grouped(like[one])
    is_judged = np.bincount(entry, minlength=len(one)) >= FEWEST_TRANSFERS
    is_judged &= np.array([not set(slow_ranks).intersection(words[index].ranks) for index in link[one].tolist()])
    number = np.arange(len(one), dtype=np.int64)
    work = Work(
        rank=number,
        peers=np.where(is_judged, peers, -1 - number),
        host=np.zeros(len(one), np.int64),
        total_ns=typical,
        error_ns=_typical_scatter(peers, entry, ns, typical),
        scale_ns=_level_of_fast_ones(peers, typical),
    )
    judged = judge(work, LINKS)
    if not judged.is_slow.any():
        judged = _judge_by_host(work, [words[index] for index in link[one].tolist()], node)
    entry_of_row = np.full(len(transfers), -1, np.int64)
    entry_of_row[rows] = entry[join]
    return _Links(
        link=tuple(words[index] for index in link[one].tolist()),
        entry=entry_of_row,
        ns=typical,
        normal_ns=judged.normal_ns,
        is_slow=judged.is_slow,
    )


def _judge_by_host(work: Work, links: Sequence[Link], node: Mapping[int, str]) -> Judged:
    """Judge links of which most may be slow: the others are normal where one host tells them apart.

    All links of that host are then slow, and no others.
    """
    for host in sorted(set(node.values())):
        touches = [any(node.get(rank) == host for rank in link.ranks) for link in links]
        judged = judge(replace(work, host=np.array(touches, np.int64)), LINKS)
        if judged.is_slow.any():
            return judged
    return judge(work, LINKS)


def _links_of(bench: Bench, rows: Int64) -> tuple[list[Link], Int64]:
    """The links that these transfers passed over, and which one each of them did."""
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
    """The name's code, of messages that of ``send`` on either side."""
    code = {word: number for number, word in enumerate(run.names)}
    return np.where(name == code.get(_RECEIVE, -1), code.get(_SEND, -1), name).astype(np.int64)


def _typical_scatter(peers: Int64, entry: Int64, values: Float64, median: Float64) -> Float64:
    """Of each entry: how far single transfers of its class are from the median of their link, on the typical link.

    The upper half counts, as a standard deviation: transfers on a busy host are short, with a long tail.
    """
    above = values - median[entry]
    upper = above >= 0
    spread = grouped_median(entry[upper], above[upper], len(median)) / MEDIAN_DISTANCE
    return np.asarray(grouped_median(peers, spread, int(peers.max()) + 1)[peers])


def _level_of_fast_ones(peers: Int64, typical: Float64) -> Float64:
    level = np.zeros(len(typical))
    for one in np.unique(peers):
        own = peers == one
        level[own] = np.percentile(typical[own], _FAST_PERCENTILE, method="lower")
    return level


def _explanations(run: Run, links: _Links) -> Iterator[_Suspicion]:
    """The slow links by what they share: first what explains many of them, at last each by itself."""
    left = {int(row) for row in np.flatnonzero(links.is_slow)}
    for place, who, ranks, rows in _places(run, links):
        known = [row for row in rows if np.isfinite(links.normal_ns[row])]
        slow = left.intersection(known)
        all_slow = sum(bool(links.is_slow[row]) for row in known)
        partners = {links.link[row].ranks for row in slow}
        if len({frozenset(one) for one in partners}) > 1 and all_slow >= SHARE_OF_HOST * len(known):
            left -= slow
            yield _Suspicion(place, who, ranks, frozenset(slow))
    pairs: dict[frozenset[int], list[int]] = {}
    for row in sorted(left):
        pairs.setdefault(frozenset(links.link[row].ranks), []).append(row)
    for rows in pairs.values():
        yield _Suspicion(
            LINK, _link_in_words(run, [links.link[row] for row in rows]), links.link[rows[0]].ranks, frozenset(rows)
        )


def _places(run: Run, links: _Links) -> Iterator[tuple[str, str, tuple[int, ...], list[int]]]:
    """What links may have in common, as place, words, ranks and rows: a host, a rank, all that it sends."""
    hosts: dict[str, list[int]] = {}
    for rank, trace in run.ranks.items():
        hosts.setdefault(trace.metadata.node, []).append(rank)
    for host, own in hosts.items():
        crossing = [
            row for row, link in enumerate(links.link) if 0 < len(set(own).intersection(link.ranks)) < len(link.ranks)
        ]
        used = {rank for row in crossing for rank in links.link[row].ranks}.intersection(own)
        if len(used) > 1:
            yield NETWORK, f"network of host {host} ({ranks_in_words(sorted(own))})", tuple(sorted(used)), crossing
    for rank, trace in run.ranks.items():
        where = f"rank {rank} on {trace.metadata.node}"
        yield RANKS, where, (rank,), [row for row, link in enumerate(links.link) if rank in link.ranks]
        sent = [row for row, link in enumerate(links.link) if link.is_directed and link.ranks[0] == rank]
        yield RANKS, f"what {where} sends", (rank,), sent


def _link_in_words(run: Run, links: Sequence[Link]) -> str:
    """``link from rank 2 on a to rank 4 on b``; ``between`` in both directions, and of the members of a group."""
    first = links[0].ranks
    ends = [f"rank {rank} on {run.ranks[rank].metadata.node}" for rank in first]
    if len(first) > 2:
        return f"group of {ranks_in_words(first)}"
    one_way = all(link.is_directed and link.ranks == first for link in links)
    return f"link from {ends[0]} to {ends[1]}" if one_way else f"link between {' and '.join(ends)}"


def _evidence(one: _Suspicion, links: _Links) -> str:
    rows = sorted(one.rows)
    slowest = max(rows, key=lambda row: links.ns[row] / links.normal_ns[row])
    return (
        f"Its communications take up to {links.ns[slowest] / links.normal_ns[slowest]:.1f} times as long, after all "
        f"participants have arrived, as the same ones elsewhere ({links.ns[slowest] / 1e6:.2f} against "
        f"{links.normal_ns[slowest] / 1e6:.2f} ms, medians); none of its ranks works for longer than is normal."
    )


def _member(bench: Bench, links: _Links, one: _Suspicion, rank: int) -> Member:
    """An end of slow links, with what its transfers take beyond normal."""
    transfers = bench.program.transfers
    own = np.isin(links.entry, list(one.rows)) & (transfers.rank == rank)
    beyond = transfers.ns[own] - links.normal_ns[links.entry[own]]
    return Member(
        rank=rank,
        host=bench.run.ranks[rank].metadata.node,
        excess_ms_per_step=float(beyond.sum()) / 1e6 / max(bench.num_steps, 1),
    )


def _mended(bench: Bench, links: _Links, rows: frozenset[int]) -> Int64:
    """Durations of all transfers with those of these links as fast as is normal; those that are stay as they are."""
    ns = bench.program.transfers.ns
    ratio, normal = np.ones(len(links.ns) + 1), np.zeros(len(links.ns) + 1)  # the last one: those in no entry
    chosen = sorted(rows)
    ratio[chosen] = links.normal_ns[chosen] / links.ns[chosen]
    normal[chosen] = links.normal_ns[chosen]
    mended = np.maximum(ns * ratio[links.entry], np.minimum(ns, normal[links.entry]))
    return np.asarray(np.rint(mended), np.int64)
