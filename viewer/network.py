"""What passes between nodes, ranks and groups: resources ``groups.json``, ``links.json`` and ``messages``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.groups import Arrivals, GroupOperation, GroupTotals, measure_groups
from commtrace.analysis.communication.links import LinkSpeeds, find_slow_links, measure_links, usual_gbps
from commtrace.analysis.communication.table import Communication, CommunicationKey
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.viewer.data import Resources, encode_json, encode_table

QUANTILES: Final = (1, 25, 50, 75, 99)
"""Percent; of the busbw of large calls."""

MOST_LAST: Final = 3
"""Ranks of a group that came last most often, and are named."""


@dataclass(frozen=True, slots=True)
class NetworkSums:
    """All that the panels on the network need of some steps; those of several windows of a run add up."""

    groups: GroupTotals
    links: LinkSpeeds

    def __add__(self, later: NetworkSums) -> NetworkSums:
        return NetworkSums(self.groups + later.groups, self.links + later.links)


def measure_network(analysis: Analysis) -> NetworkSums:
    """Measure the steps that count."""
    context = analysis.context
    return NetworkSums(measure_groups(analysis), measure_links(context.run, context.matches, context.steps))


def network_resources(run: Run, sums: NetworkSums) -> Resources:
    """Return the resources; only the process groups of the run are used."""
    return {
        "groups.json": encode_json(_groups(run, sums.groups)),
        "links.json": encode_json(_links(sums.links)),
        "messages": _messages(sums.groups),
    }


def _groups(run: Run, totals: GroupTotals) -> JsonObject:
    rows = [(key, row) for key, row in totals.calls.rows(run) if row.group_size != 1 and row.ranks]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(key.detail for key, _ in rows))}
    members = {key.detail: row for key, row in rows}
    arrivals = defaultdict[int, list[tuple[int, Arrivals]]](list)
    for (group, rank), own in totals.arrivals.items():
        arrivals[group].append((rank, own))
    return {
        "groups": [
            {
                "role": members[group].role,
                "ranks": members[group].ranks,
                "inter_node": members[group].inter_node,
                "compared": totals.compared.get(group, 0),
                "last": _last(arrivals[group]),
            }
            for group in numbers
        ],
        "calls": [{"group": numbers[key.detail], **_call(totals, key, row)} for key, row in rows],
    }


def _last(arrivals: Sequence[tuple[int, Arrivals]]) -> list[JsonObject]:
    """Return the ranks of a group that came last most often."""
    most_often = sorted(arrivals, key=lambda one: (-one[1].times, one[0]))[:MOST_LAST]
    return [{"rank": rank, "times": own.times, "wait_ns": own.wait_ns} for rank, own in most_often]


def _call(totals: GroupTotals, key: CommunicationKey, row: Communication) -> JsonObject:
    speeds = totals.speeds.get(GroupOperation(key.detail, key.operation))
    return {
        "operation": row.operation,
        "count": row.count,
        "bytes": row.num_bytes,
        "bus_bytes": round(totals.calls.bus_bytes(key)),
        "busbw_gbps": row.busbw_gbps,
        "bandwidth_time": row.bandwidth_time,
        "bandwidth_is_bound": row.bandwidth_is_bound,
        "large_calls": len(speeds) if speeds else 0,
        "quantiles_gbps": [speeds.nearest_rank(percent) for percent in QUANTILES] if speeds else None,
        "exposed_ns": row.exposed_ns,
        "wait_ns": row.wait_ns,
    }


def _links(speeds: LinkSpeeds) -> JsonObject:
    links = speeds.links()
    slow = find_slow_links(links)
    slow_ones = frozenset(slow.links) if slow is not None else frozenset()
    return {
        "links": [
            {
                **link.to_json(),
                "usual_gbps": usual,
                "is_slow": link in slow_ones,
            }
            for link, usual in zip(links, usual_gbps(links), strict=True)
        ],
        "slow_links": slow.to_json() if slow else None,
    }


def _messages(totals: GroupTotals) -> bytes:
    rows = sorted((*pair, *own) for pair, own in totals.messages.items())
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    names = ("sender", "receiver", "calls", "bytes", "large_bytes", "large_ns")
    return encode_table(dict(zip(names, columns, strict=True)))
