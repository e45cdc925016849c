"""Recorded bandwidth as a share of a baseline, at the same operation, group and size.

The share is a ratio of times: how long the calls would have taken as they were measured, over how long they took. 1 is
the baseline; above 1 the run was quicker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.analysis.communication.baseline import GroupKind, NetworkBaseline
from commtrace.analysis.communication.table import CommunicationKey, CommunicationSums, Detail, communication_sums
from commtrace.trace.json_values import JsonObject


@dataclass(frozen=True, slots=True)
class BaselineShare:
    """The calls of one role, operation, kind of group and power of two of bytes; None: not measured there."""

    role: str
    operation: str
    group_size: int
    inter_node: bool
    size: tuple[int, int]  # bytes of one call, [from, to)
    calls: int
    time_ns: int  # of all of them, on all ranks
    includes_waits: bool  # not matched on all members
    is_bound: bool  # most bytes are in calls without exact times: busbw and share are lower bounds
    busbw_gbps: float
    expected_ns: float | None  # the time at the baseline
    baseline_busbw_gbps: float | None

    @property
    def share(self) -> float | None:
        return None if self.expected_ns is None else self.expected_ns / self.time_ns

    def to_json(self) -> JsonObject:
        return {
            "role": self.role,
            "operation": self.operation,
            "group_size": self.group_size,
            "inter_node": self.inter_node,
            "bytes_from": self.size[0],
            "bytes_to": self.size[1],
            "count": self.calls,
            "bandwidth_time": "duration" if self.includes_waits else "transfer",
            "bandwidth_is_bound": self.is_bound,
            "busbw_gbps": self.busbw_gbps,
            "baseline_busbw_gbps": self.baseline_busbw_gbps,
            "share": self.share,
        }


def measure_sizes(analysis: Analysis) -> CommunicationSums:
    """Sum up the calls by size, of the steps that count."""
    context, times = analysis.context, analysis.partition
    return communication_sums(context.run, context.matches, times, context.roles, context.steps, Detail.SIZE)


def baseline_shares(sums: CommunicationSums, baseline: NetworkBaseline) -> tuple[BaselineShare, ...]:
    """Return the kinds of calls that have a bandwidth, those that took longest first.

    Args:
        sums: divided by size (``Detail.SIZE``).
    """
    shares = (_share(key, sums, baseline) for key in sums.calls)
    return tuple(
        sorted((share for share in shares if share is not None), key=lambda share: (-share.time_ns, share.size))
    )


def _share(key: CommunicationKey, sums: CommunicationSums, baseline: NetworkBaseline) -> BaselineShare | None:
    moved, includes_waits, is_bound = sums.calls[key].timed()
    num_bytes = moved.even + moved.uneven
    if key.group_size < 2 or key.reach < 0 or key.detail < 0 or not num_bytes or not moved.time_ns:
        return None
    kind = GroupKind(key.operation, key.group_size, key.reach > 1)
    each = num_bytes / moved.calls
    time_ns = baseline.duration_ns(kind, each)
    even, uneven = (bus_factor(key.operation, key.group_size, uneven=uneven) for uneven in (False, True))
    factor = (moved.even * even + moved.uneven * uneven) / num_bytes
    if factor == 0 or key.operation == "barrier":
        return None
    return BaselineShare(
        role=key.role,
        operation=key.operation,
        group_size=key.group_size,
        inter_node=key.reach > 1,
        size=(1 << key.detail, 2 << key.detail),
        calls=moved.calls,
        time_ns=moved.time_ns,
        includes_waits=includes_waits,
        is_bound=is_bound,
        busbw_gbps=num_bytes * factor / moved.time_ns,
        expected_ns=None if time_ns is None else time_ns * moved.calls,
        baseline_busbw_gbps=None if time_ns is None else each * factor / time_ns,
    )


def whole_share(shares: Iterable[BaselineShare]) -> float | None:
    """Return the share of all calls with a baseline together; None without any."""
    known = list(_known(shares))
    time_ns = sum(time for _, time in known)
    return sum(expected for expected, _ in known) / time_ns if time_ns else None


def _known(shares: Iterable[BaselineShare]) -> Iterator[tuple[float, int]]:
    for share in shares:
        if share.expected_ns is not None:
            yield share.expected_ns, share.time_ns
