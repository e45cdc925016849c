"""Find slow links between nodes by the bandwidth of large messages.

A message shows one link. A collective shows one only if its group is on two nodes at most: with more nodes, nothing
says which link the others waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.match import Matches, RankMatches
from commtrace.analysis.statistics import Distribution, join_distributions
from commtrace.trace import schema
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int64

SMALLEST_BYTES: Final = 1 << 20
"""The time of smaller messages is latency."""

FEWEST_CALLS: Final = 3

SLOW: Final = 0.5
"""Largest share of a similar link's bandwidth at which a link is slow."""

_USUAL_PERCENTILE: Final = 75
"""One bad node of three has four of their six links: the median of the others would be slow itself."""


class NodeTraffic(NamedTuple):
    """A kind of calls that can be compared."""

    operation: str  # send for messages
    group_size: int  # 2 for messages
    size: int  # power of two that the bytes reach


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Traffic from one node to another, or within one."""

    traffic: NodeTraffic
    source: str  # of a collective, the alphabetically first node
    target: str
    calls: int
    gbps: float  # median of transfers, 10⁹ bytes per second: algbw of messages, busbw of collectives

    @property
    def is_between_nodes(self) -> bool:
        return self.source != self.target

    def to_json(self) -> JsonObject:
        return {
            "operation": self.traffic.operation,
            "group_size": self.traffic.group_size,
            "bytes_from": 1 << self.traffic.size,
            "bytes_to": 2 << self.traffic.size,
            "source": self.source,
            "target": self.target,
            "count": self.calls,
            "gbps": self.gbps,
        }


@dataclass(frozen=True, slots=True)
class SlowTraffic:
    """Links of one traffic that carry much less than similar ones."""

    links: tuple[NodeLink, ...]  # the slowest first
    usual_gbps: float  # of similar links
    within_nodes: bool  # these similar links are within nodes, for want of others between nodes

    @property
    def common_node(self) -> str | None:
        """Return the only node that all of several slow links have in common."""
        common = set.intersection(*({link.source, link.target} for link in self.links))
        return next(iter(common)) if len(common) == 1 and len(self.links) > 1 else None

    def to_json(self) -> JsonObject:
        return {
            "links": [link.to_json() for link in self.links],
            "usual_gbps": self.usual_gbps,
            "compared_with": "within nodes" if self.within_nodes else "between nodes",
            "common_node": self.common_node,
        }


class Route(NamedTuple):
    """Nodes between which traffic passed."""

    traffic: NodeTraffic
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """The distribution of bandwidths of every route, GB/s. Those of parts of a run add up."""

    routes: Mapping[Route, Distribution[float]]

    def __add__(self, other: LinkSpeeds) -> LinkSpeeds:
        return LinkSpeeds(join_distributions([*self.routes.items(), *other.routes.items()]))

    def links(self) -> list[NodeLink]:
        """Return the links with enough calls to judge."""
        return [
            NodeLink(*route, len(self.routes[route]), gbps)
            for route in sorted(self.routes)
            if len(self.routes[route]) >= FEWEST_CALLS and (gbps := self.routes[route].median()) is not None
        ]


def measure_links(run: Run, matches: Matches, steps: Sequence[int] | None = None) -> LinkSpeeds:
    """Return the bandwidths of every route, of calls of at least :data:`SMALLEST_BYTES`.

    Calls that were not matched on all members do not count: they may have waited. Neither do those whose transfer is
    only an upper bound: their link may be faster.
    """
    speeds: Iterator[tuple[Route, Distribution[float]]] = (
        (route, Distribution.of(speeds))
        for trace in run.ranks.values()
        for route, speeds in _speeds_of_rank(run, trace, matches.ranks[trace.rank], steps)
    )
    return LinkSpeeds(join_distributions(speeds))


def find_slow_links(links: Sequence[NodeLink]) -> SlowTraffic | None:
    """Return the slow links between nodes, of the traffic with the slowest; None without any."""
    by_traffic: dict[NodeTraffic, list[NodeLink]] = defaultdict(list)
    for link in links:
        by_traffic[link.traffic].append(link)
    slow_traffic = [
        slow for links_of_traffic in by_traffic.values() if (slow := _slow_of(links_of_traffic)) is not None
    ]
    return min(slow_traffic, key=lambda slow: (slow.within_nodes, slow.links[0].gbps / slow.usual_gbps), default=None)


def _slow_of(links: Sequence[NodeLink]) -> SlowTraffic | None:
    """Return the slow ones of links of one traffic."""
    between = [link for link in links if link.is_between_nodes]
    within = [link.gbps for link in links if not link.is_between_nodes]
    is_slow = [link.gbps <= SLOW * (usual or 0) for link, usual in zip(between, usual_gbps(between), strict=True)]
    if any(is_slow):
        slow = [link for link, link_is_slow in zip(between, is_slow, strict=True) if link_is_slow]
        usual = _usual([link.gbps for link, link_is_slow in zip(between, is_slow, strict=True) if not link_is_slow])
        return _slowest_first(slow, usual, within_nodes=False)
    one_pair = len({frozenset((link.source, link.target)) for link in between}) == 1
    slow = [link for link in between if link.gbps <= SLOW * _usual(within)] if one_pair and within else []
    return _slowest_first(slow, _usual(within), within_nodes=True) if slow else None


def usual_gbps(links: Sequence[NodeLink]) -> list[float | None]:
    """Return for each link the usual bandwidth of the others like it, of the same traffic; None if there is none."""
    alike: dict[tuple[NodeTraffic, bool], list[int]] = defaultdict(list)
    for number, link in enumerate(links):
        alike[link.traffic, link.is_between_nodes].append(number)
    usual: list[float | None] = [None] * len(links)
    for numbers in alike.values():
        if len(numbers) > 1:
            speeds = np.array([links[number].gbps for number in numbers])
            for number, gbps in zip(numbers, _usual_of_others(speeds).tolist(), strict=True):
                usual[number] = gbps
    return usual


def _usual_of_others(gbps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return :func:`_usual` of all values but each one in turn; sorted once, the others are so too."""
    order = gbps.argsort()
    position = np.ceil(_USUAL_PERCENTILE / 100 * (len(gbps) - 2)).astype(np.int64)  # among the others
    ascending = gbps[order]
    usual = np.empty_like(gbps)
    usual[order] = np.where(np.arange(len(gbps)) <= position, ascending[position + 1], ascending[position])
    return usual


def _slowest_first(slow: Sequence[NodeLink], usual_gbps: float, *, within_nodes: bool) -> SlowTraffic:
    return SlowTraffic(tuple(sorted(slow, key=lambda link: link.gbps)), usual_gbps, within_nodes)


def _usual(gbps: Sequence[float]) -> float:
    return float(np.percentile(gbps, _USUAL_PERCENTILE, method="higher"))


def _speeds_of_rank(
    run: Run, trace: RankTrace, matches: RankMatches, steps: Sequence[int] | None
) -> Iterator[tuple[Route, npt.NDArray[np.float64]]]:
    """Yield bandwidths of messages that this rank received, and of collectives of groups whose first member it is."""
    spans = trace.spans
    large = matches.complete & ~matches.mismatched & (spans.bytes >= SMALLEST_BYTES) & (matches.transfer_ns(spans) > 0)
    large &= matches.transfer_exact(spans)
    if steps is not None:
        large &= np.isin(spans.step, steps)
    received = large & (spans.kind == schema.P2P) & (spans.name == run.name_code("recv"))
    rows = np.flatnonzero(received | (large & (spans.kind == schema.COLLECTIVE) & _leads(trace)))
    if not len(rows):
        return
    size = np.frexp(spans.bytes[rows].astype(np.float64))[1] - 1
    first, which = grouped(pack((spans.kind[rows], spans.name[rows], spans.group[rows], spans.peer[rows], size)))
    for number, example in enumerate(first.tolist()):
        rows_of_operation = rows[which == number]
        route = _route(run, trace, int(rows[example]))
        if route is not None:
            operation, group_size, source, target = route
            speeds = _bandwidths(trace, matches, rows_of_operation, operation, group_size)
            yield Route(NodeTraffic(operation, group_size, int(size[example])), source, target), speeds


def _leads(trace: RankTrace) -> Bool:
    led = [number for number, group in trace.groups.items() if group.ranks and min(group.ranks) == trace.rank]
    return np.isin(trace.spans.group, led)


def _route(run: Run, trace: RankTrace, row: int) -> tuple[str, int, str, str] | None:
    """Return operation, members, source and target of a call; None where no single link is known."""
    if trace.spans.kind[row] == schema.P2P:
        sender = run.ranks.get(int(trace.spans.peer[row]))
        return None if sender is None else ("send", 2, sender.metadata.node, trace.metadata.node)
    operation = run.names[int(trace.spans.name[row])]
    members = trace.groups[int(trace.spans.group[row])].ranks
    if operation in WITHOUT_BANDWIDTH or len(members) < 2 or not set(members) <= set(run.ranks):
        return None
    nodes = sorted({run.ranks[member].metadata.node for member in members})
    return (operation, len(members), nodes[0], nodes[-1]) if len(nodes) <= 2 else None


def _bandwidths(
    trace: RankTrace, matches: RankMatches, rows: Int64, operation: str, group_size: int
) -> npt.NDArray[np.float64]:
    num_bytes, self_bytes = trace.spans.bytes[rows], trace.spans.self_bytes[rows]
    sent = moved_bytes(operation, num_bytes, self_bytes) * bus_factors(operation, group_size, self_bytes)
    return np.asarray(sent / matches.transfer_ns(trace.spans)[rows])
