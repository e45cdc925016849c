"""What a network was measured to carry, as a file, and recorded communication as a share of it.

``commtrace bench collectives -o FILE`` writes the file. A share compares times: the calls of one kind and size would
have taken so long at the measured bandwidth, and took so long in the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.analysis.communication.links import SMALLEST_BYTES, NodeLink, NodeTraffic
from commtrace.errors import ConfigurationError
from commtrace.trace.inputs import printable_json, read_file
from commtrace.trace.json_values import JsonObject, fields_to_json

FORMAT: Final = "commtrace baseline 1"

MESSAGES: Final = ("send", "recv")
"""Their members are two, whatever the group in which they are sent."""

_MOST_BYTES: Final = 256 << 20
_FARTHEST: Final = 2.0
"""Sizes up to so much below the smallest measured one, or above the largest, are compared with it."""


class MeasuredSpread(Struct, frozen=True):
    """A quantity over the iterations of a measurement."""

    mean: float
    min: float
    max: float


class Measurement(Struct, frozen=True, rename={"num_bytes": "bytes"}):
    """One operation of one size on one group. Times are those of its slowest member, in each iteration."""

    operation: str
    ranks: Annotated[tuple[int, ...], Meta(min_length=1)]
    nodes: Annotated[tuple[str, ...], Meta(min_length=1)]  # of the members, each once
    num_bytes: Annotated[int, Meta(gt=0, le=2**63 - 1)]  # S of commtrace.analysis.communication.bandwidth
    dtype: str
    iterations: int
    duration_ns: MeasuredSpread
    group: str = ""  # as --group names it: world, node, across, pairs or ranks; missing in older files

    @property
    def inter_node(self) -> bool:
        return len(self.nodes) > 1

    @property
    def algbw_gbps(self) -> MeasuredSpread:
        """Return bytes over time: the mean is that of the mean time, the smallest that of the longest."""
        time = self.duration_ns
        return MeasuredSpread(self.num_bytes / time.mean, self.num_bytes / time.max, self.num_bytes / time.min)

    @property
    def busbw_gbps(self) -> MeasuredSpread:
        factor = bus_factor(self.operation, len(self.ranks))
        algbw = self.algbw_gbps
        return MeasuredSpread(factor * algbw.mean, factor * algbw.min, factor * algbw.max)

    def to_json(self) -> JsonObject:
        return {
            "group": self.group,
            "operation": self.operation,
            "ranks": list(self.ranks),
            "group_size": len(self.ranks),
            "nodes": list(self.nodes),
            "inter_node": self.inter_node,
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "iterations": self.iterations,
            "duration_ns": fields_to_json(self.duration_ns),
            "algbw_gbps": fields_to_json(self.algbw_gbps),
            "busbw_gbps": fields_to_json(self.busbw_gbps),
        }


class GroupKind(NamedTuple):
    """Groups that are alike."""

    operation: str
    group_size: int
    inter_node: bool


@dataclass(frozen=True, slots=True)
class NetworkBaseline:
    """What was measured, and where."""

    made: Mapping[str, str]  # backend, device, date, versions
    measurements: tuple[Measurement, ...]
    _by_kind: dict[GroupKind, dict[tuple[int, ...], list[Measurement]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for measurement in sorted(self.measurements, key=lambda each: each.num_bytes):
            kind = GroupKind(measurement.operation, len(measurement.ranks), measurement.inter_node)
            self._by_kind.setdefault(kind, {}).setdefault(measurement.ranks, []).append(measurement)

    def duration_ns(self, kind: GroupKind, num_bytes: float, ranks: Sequence[int] | None = None) -> float | None:
        """Return how long such a call took; None if nothing of the kind was measured near this size.

        Args:
            kind: the group size of messages plays no part.
            ranks: the members; if they were not measured, or are not given, the median of all groups alike.
        """
        groups = self._groups(kind)
        of_these_ranks = groups.get(tuple(ranks)) if ranks is not None else None
        times = [_interpolated(each, num_bytes) for each in ([of_these_ranks] if of_these_ranks else groups.values())]
        known = [time for time in times if time is not None]
        return median(known) if known else None

    def call_ns(self, kind: GroupKind, num_bytes: float, ranks: Sequence[int] | None = None) -> float | None:
        """Return how long a call takes, like ``duration_ns``; one below all sizes takes as long as the smallest."""
        smallest = min((measured[0].num_bytes for measured in self._groups(kind).values()), default=0)
        return self.duration_ns(kind, max(num_bytes, smallest), ranks)

    def _groups(self, kind: GroupKind) -> Mapping[tuple[int, ...], Sequence[Measurement]]:
        if kind.operation in MESSAGES:
            kind = GroupKind("send", 2, kind.inter_node)
        return self._by_kind.get(kind, {})

    def by_group(self) -> list[tuple[Measurement, ...]]:
        """Return the measurements of each operation on each group, in the order in which they were made."""
        by_group: dict[tuple[str, str, tuple[int, ...]], list[Measurement]] = {}
        for measurement in self.measurements:  # groups of one round take turns
            by_group.setdefault((measurement.group, measurement.operation, measurement.ranks), []).append(measurement)
        return [tuple(rows) for rows in by_group.values()]

    def links(self) -> list[NodeLink]:
        """Return the bandwidth between nodes and within them, of groups on two nodes at most and large messages."""
        return [
            NodeLink(
                NodeTraffic(measurement.operation, len(measurement.ranks), measurement.num_bytes.bit_length() - 1),
                min(measurement.nodes),
                max(measurement.nodes),
                measurement.iterations,
                measurement.busbw_gbps.mean,
            )
            for measurement in self.measurements
            if len(measurement.nodes) <= 2 and len(measurement.ranks) > 1 and measurement.num_bytes >= SMALLEST_BYTES
        ]

    def to_json(self) -> JsonObject:
        """Return the content of a baseline file (docs/json/bench-collectives.schema.json)."""
        return {
            "format": FORMAT,
            "made": dict(self.made),
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), allow_nan=False, indent=1) + "\n")


def _interpolated(measured: Sequence[Measurement], num_bytes: float) -> float | None:
    """Return the time at a size: between two sizes on a line in logarithms, beyond all at the bandwidth of the last."""
    smallest, largest = measured[0], measured[-1]
    if not smallest.num_bytes / _FARTHEST <= num_bytes <= largest.num_bytes * _FARTHEST:
        return None
    if num_bytes > largest.num_bytes:
        return largest.duration_ns.mean * num_bytes / largest.num_bytes
    sizes = np.log([measurement.num_bytes for measurement in measured])
    times = np.log([measurement.duration_ns.mean for measurement in measured])
    return float(np.exp(np.interp(np.log(num_bytes), sizes, times)))


class _File(Struct):
    format: str
    made: dict[str, str]
    measurements: tuple[Measurement, ...]


def read_baseline(path: Path) -> NetworkBaseline:
    """Read a baseline file.

    Raises:
        ConfigurationError: it is none, or damaged.
        OSError: it cannot be read.
    """
    try:
        stored = printable_json(read_file(path, _MOST_BYTES), _File)
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is no baseline ({error}): `commtrace bench collectives -o FILE` writes one"
        ) from error
    if stored.format != FORMAT:
        raise ConfigurationError(f"{path}: expected the format {FORMAT!r}, not {stored.format!r}: measure it again")
    for measurement in stored.measurements:
        time = measurement.duration_ns
        if not 0 < time.min <= time.mean <= time.max < np.inf:
            raise ConfigurationError(
                f"{path}: a measurement of {measurement.operation} has impossible numbers: measure again"
            )
    return NetworkBaseline(stored.made, stored.measurements)
