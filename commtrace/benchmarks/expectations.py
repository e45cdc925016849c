"""The busbw that links allow by their specification, and the share of it that was measured.

A rate is what one rank can send in one direction: within a node over its NVLink or PCIe, between nodes over its NIC,
or over its part of the node's NICs.

>>> expected_busbw("all_reduce", [0, 1, 2, 3], ["a", "a", "b", "b"], 50.0)
100.0
>>> expected_busbw("send", [0, 3], ["a", "a", "b", "b"], 50.0)
50.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from commtrace.analysis.communication.baseline import Measurement, NetworkBaseline
from commtrace.trace.json_values import JsonObject

ENOUGH: Final = 0.75
"""Smallest share of a healthy network. NVIDIA expects 80 % of NVLink (https://github.com/NVIDIA/nccl/issues/412) and 92
to 96 % of a NIC (https://github.com/NVIDIA/nccl-tests/issues/290)."""

USUAL: Final = "75 to 95%"

ALL_GROUPS: Final = ""

_LARGEST_SIZES: Final = 3
_RING: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
_OF_ROOT: Final = ("gather", "scatter")


class Rate(NamedTuple):
    """What one rank can send in one direction."""

    text: str  # as the user wrote it
    gbps: float  # 10⁹ bytes per second


@dataclass(frozen=True, slots=True)
class ExpectedShare:
    """What one operation reaches on one group at its best of the largest sizes, beside what it should."""

    best: Measurement
    rate: Rate
    expected_gbps: float

    @property
    def busbw_gbps(self) -> float:
        return self.best.busbw_gbps.mean

    @property
    def ratio(self) -> float:
        return self.busbw_gbps / self.expected_gbps

    @property
    def is_enough(self) -> bool:
        return round(self.ratio, 2) >= ENOUGH  # as it is printed

    def to_json(self) -> JsonObject:
        return {
            "group": self.best.group,
            "operation": self.best.operation,
            "ranks": list(self.best.ranks),
            "bytes": self.best.num_bytes,
            "busbw_gbps": self.busbw_gbps,
            "expected_busbw_gbps": self.expected_gbps,
            "ratio": self.ratio,
        }


def expected_busbw(operation: str, ranks: Sequence[int], nodes: Sequence[str], rate: float) -> float:
    """Return the busbw of an operation whose slowest links are full, in the unit of the rate.

    Args:
        ranks: that take part, the root first.
        nodes: of each rank of the job.
        rate: of one rank, in one direction.
    """
    size, on_node = len(ranks), Counter(nodes[rank] for rank in ranks)
    # On one node each rank has its own link; between nodes those on the same node need no NIC.
    near = on_node if len(on_node) > 1 else Counter(dict.fromkeys(on_node, 1))
    fewest = min(near.values())
    if operation == "all_to_all":
        # Each rank sends to all others through its own NIC: https://github.com/NVIDIA/nccl-tests/issues/267
        return rate * (size - 1) / (size - fewest)
    if operation in _OF_ROOT:
        return rate / (size - near[nodes[ranks[0]]])
    # There are as many rings as NICs, each through another one: https://github.com/NVIDIA/nccl-tests/issues/119
    return rate * fewest


def shares(baseline: NetworkBaseline, rates: Mapping[str, Rate], nodes: Sequence[str]) -> tuple[ExpectedShare, ...]:
    """Return the share of each operation and group for which there is a rate.

    Args:
        rates: by the word of a group, or :data:`ALL_GROUPS`.
        nodes: of each rank of the job.
    """
    shares_of_role = []
    for rows in baseline.by_group():
        rate = rates.get(rows[0].group, rates.get(ALL_GROUPS))
        if rate is not None:
            largest = sorted(rows, key=lambda row: row.num_bytes)[-_LARGEST_SIZES:]
            best = max(largest, key=lambda row: row.busbw_gbps.mean)
            shares_of_role.append(
                ExpectedShare(best, rate, expected_busbw(best.operation, best.ranks, nodes, rate.gbps))
            )
    return tuple(shares_of_role)


def decisive(shares: Sequence[ExpectedShare]) -> ExpectedShare | None:
    """Return the lowest share of the operations that fill every link of a ring; of the others if there are none such.

    How much of a link all_to_all, gather, scatter and a single message fill depends on more than the link.
    """
    of_rings = [share for share in shares if share.best.operation in _RING]
    return min(of_rings or shares, key=lambda share: share.ratio, default=None)
