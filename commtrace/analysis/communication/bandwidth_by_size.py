"""The bandwidth of calls by the size of their messages, within and between nodes, in bins that add up over a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.communication.calls import CallTable, calls_of_rows, rows_of_block
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.operations import of_one_sort
from commtrace.analysis.statistics import Distribution, join_distributions
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64


class SizeBin(NamedTuple):
    """Similar calls of one size."""

    role: str
    operation: str
    group_size: int
    reach: int  # 1 within a node, 2 between nodes, −1 if unknown
    exponent: int  # of the largest power of two up to the bytes of a call
    is_matched: bool  # on all members: the time is that of the transfer; else it includes waits
    is_bound: bool  # the time is an upper bound, the bandwidth a lower one


@dataclass(frozen=True, slots=True)
class SizeBandwidth:
    """The calls of one bin."""

    num_bytes: int  # of all calls
    busbw_gbps: Distribution[float]


@dataclass(frozen=True, slots=True)
class BandwidthBySize:
    """Calls with an end and known bytes. Those of parts of a run add up.

    Left out are calls between nodes that were quicker than the clocks' error, which would look arbitrarily fast.
    """

    bins: Mapping[SizeBin, SizeBandwidth]
    uncertain: int  # calls that were left out

    def __add__(self, other: BandwidthBySize) -> BandwidthBySize:
        both = [*self.bins.items(), *other.bins.items()]
        return BandwidthBySize(_summed(both), self.uncertain + other.uncertain)


def _summed(parts: Sequence[tuple[SizeBin, SizeBandwidth]]) -> dict[SizeBin, SizeBandwidth]:
    num_bytes = Counter[SizeBin]()
    for key, bandwidth in parts:
        num_bytes[key] += bandwidth.num_bytes
    busbw = join_distributions((key, bandwidth.busbw_gbps) for key, bandwidth in parts)
    return {key: SizeBandwidth(num_bytes[key], distribution) for key, distribution in busbw.items()}


def bandwidth_by_size(context: Context, partition: Partition, residual_ns: int = 0) -> BandwidthBySize:
    """Return the bandwidth of the calls in the steps that count; ``residual_ns`` is the error between hosts' clocks."""
    parts, uncertain = [], 0
    for block in of_one_sort(context.run.blocks):
        known = rows_of_block(context.run, block, context.matches, context.roles, partition)
        calls = calls_of_rows(known)
        timed = calls.finished & np.isin(calls.step, context.steps) & (calls.num_bytes > 0) & (calls.group_size > 1)
        is_unsure = timed & calls.complete & (calls.nodes > 1) & (calls.transfer < residual_ns)
        uncertain += int(is_unsure.sum())
        parts += _bins(context.run, calls, timed & ~is_unsure & (_time(calls) > 0), context.roles.words)
    return BandwidthBySize(_summed(parts), uncertain)


def _time(calls: CallTable) -> Int64:
    return np.where(calls.complete, calls.transfer, calls.duration)


def _is_bound(calls: CallTable) -> Bool:
    return ~np.where(calls.complete, calls.transfer_exact, calls.duration_exact)


def _bins(run: Run, calls: CallTable, chosen: Bool, roles: tuple[str, ...]) -> list[tuple[SizeBin, SizeBandwidth]]:
    calls = calls.take(np.flatnonzero(chosen))
    if not len(calls):
        return []
    exponent = np.frexp(calls.num_bytes.astype(np.float64))[1] - 1
    nodes = np.clip(calls.nodes, -1, 2)
    columns = [calls.role, calls.name, calls.group_size, nodes, exponent, calls.complete, _is_bound(calls)]
    order, begins = sort_groups(pack(columns))
    bins = []
    for rows in np.split(order, begins[1:]):
        role, name, group_size, reach, size, is_matched, is_bound = (int(column[rows[0]]) for column in columns)
        operation = run.names[name] if name >= 0 else "unknown"
        if operation in WITHOUT_BANDWIDTH:
            continue
        calls_of_bin = calls.take(rows)
        moved = moved_bytes(operation, calls_of_bin.num_bytes, calls_of_bin.self_bytes)
        factors = bus_factors(operation, group_size, calls_of_bin.self_bytes)
        busbw: Distribution[float] = Distribution.of(moved * factors / _time(calls_of_bin))
        key = SizeBin(
            roles[role], operation, group_size, reach if reach > 0 else -1, size, bool(is_matched), bool(is_bound)
        )
        bins.append((key, SizeBandwidth(int(calls_of_bin.num_bytes.sum()), busbw)))
    return bins
