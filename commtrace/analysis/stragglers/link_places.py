"""Finds what slow links have in common: the network of hosts, a rank, all that a rank sends, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.stragglers.limits import SHARE_OF_HOST
from commtrace.analysis.stragglers.link_transfers import Link
from commtrace.analysis.stragglers.verdict import LINK, NETWORK, RANKS
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool

_MOST_HOSTS = 3


class Suspicion(NamedTuple):
    """Slow links that have something in common.

    Attributes:
        place: a link, a rank whose links are all slow, or the network of hosts.
        who: in words.
        ranks: the guilty, or the ends of the links.
        rows: of the links.
    """

    place: str
    who: str
    ranks: tuple[int, ...]
    rows: frozenset[int]


class _Place(NamedTuple):
    """A place of slow links, with the rows of all links there."""

    place: str
    who: str
    ranks: tuple[int, ...]
    rows: list[int]


def suspicions_of(run: Run, links: Sequence[Link], is_known: Bool, is_slow: Bool) -> Iterator[Suspicion]:
    """Tell slow links by what they share: first what explains many of them, at last each by itself.

    Args:
        run: their job.
        links: one row each.
        is_known: of which rows it is known what is normal.
        is_slow: which rows take far longer.
    """
    left = {row for row in range(len(links)) if is_slow[row]}
    for place in _places(run, links, frozenset(left)):
        known = [row for row in place.rows if is_known[row]]
        slow = left.intersection(known)
        all_slow = sum(bool(is_slow[row]) for row in known)
        partners = {frozenset(links[row].ranks) for row in slow}
        if len(partners) > 1 and all_slow >= SHARE_OF_HOST * len(known):
            left -= slow
            yield Suspicion(place.place, place.who, place.ranks, frozenset(slow))
    pairs: dict[frozenset[int], list[int]] = {}
    for row in sorted(left):
        pairs.setdefault(frozenset(links[row].ranks), []).append(row)
    for rows in pairs.values():
        own = [links[row] for row in rows]
        yield Suspicion(LINK, _link_in_words(run, own), own[0].ranks, frozenset(rows))


def _places(run: Run, links: Sequence[Link], slow: frozenset[int]) -> Iterator[_Place]:
    """Yield what links may have in common: the network, a host, a rank, all that it sends."""
    hosts: dict[str, list[int]] = {}
    for rank, trace in run.ranks.items():
        hosts.setdefault(trace.metadata.node, []).append(rank)
    of_hosts = {host: _of_host(links, host, own) for host, own in hosts.items()}
    network = sorted({row for one in of_hosts.values() for row in one.rows})
    # With all of the network slow, one host is to blame only if it is at an end of all slow links, and no other is.
    if sum(slow.intersection(network) <= set(one.rows) for one in of_hosts.values()) != 1:
        used = sorted({rank for row in network for rank in links[row].ranks})
        yield _Place(NETWORK, f"network between {_hosts_in_words(run, used)}", tuple(used), network)
    yield from (one for one in of_hosts.values() if len(one.ranks) > 1)
    for rank, trace in run.ranks.items():
        where = f"rank {rank} on {trace.metadata.node}"
        yield _Place(RANKS, where, (rank,), [row for row, link in enumerate(links) if rank in link.ranks])
        sent = [row for row, link in enumerate(links) if link.is_directed and link.ranks[0] == rank]
        yield _Place(RANKS, f"what {where} sends", (rank,), sent)


def _of_host(links: Sequence[Link], host: str, own: Sequence[int]) -> _Place:
    """Return all links between the ranks of a host and others."""
    crossing = [row for row, link in enumerate(links) if 0 < len(set(own).intersection(link.ranks)) < len(link.ranks)]
    used = {rank for row in crossing for rank in links[row].ranks}.intersection(own)
    return _Place(NETWORK, f"network of host {host} ({ranks_in_words(own)})", tuple(sorted(used)), crossing)


def _hosts_in_words(run: Run, ranks: Sequence[int]) -> str:
    """``hosts a, b (ranks 0–7)``; of many hosts, how many."""
    hosts = sorted({run.ranks[rank].metadata.node for rank in ranks})
    words = f"hosts {', '.join(hosts)}" if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} hosts"
    return f"{words} ({ranks_in_words(ranks)})"


def _link_in_words(run: Run, links: Sequence[Link]) -> str:
    """``link from rank 2 on a to rank 4 on b``; ``between`` in both directions, and of the members of a group."""
    first = links[0].ranks
    ends = [f"rank {rank} on {run.ranks[rank].metadata.node}" for rank in first]
    if len(first) > 2:
        return f"group of {ranks_in_words(first)}"
    one_way = all(link.is_directed and link.ranks == first for link in links)
    return f"link from {ends[0]} to {ends[1]}" if one_way else f"link between {' and '.join(ends)}"
