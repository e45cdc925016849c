"""How long a plan's communication takes on a network that `commtrace bench collectives` measured, latencies included.

>>> baseline_times(plan, read_baseline(Path("baseline.json"))).seconds[0, "tp"]  # doctest: +SKIP
0.21
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from commtrace.analysis.communication.baseline import MESSAGES, GroupKind, NetworkBaseline
from commtrace.planning.communication import Traffic
from commtrace.planning.plan import Plan


class BaselineTimes(NamedTuple):
    """Times of the roles of each stage, of one rank in one iteration."""

    seconds: Mapping[tuple[int, str], float]  # by stage and role; without roles of which something was not measured
    not_measured: tuple[str, ...]  # what the baseline lacks, in words


def baseline_times(plan: Plan, baseline: NetworkBaseline) -> BaselineTimes:
    """Return the time of every role, on the first rank of every stage: each call at its size, between measured ones.

    A group takes as long as it was measured to; one that was not, as long as the median of measured groups of the same
    operation and number of members that are, as it is, within a node or on several. Nodes have as many ranks, in order,
    as the fullest node of a measured group. Calls that are smaller than all measured ones take as long as the smallest.
    """
    per_node = max(
        (ceil(len(measurement.ranks) / len(measurement.nodes)) for measurement in baseline.measurements), default=1
    )
    groups = plan.groups()
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    lacking: dict[tuple[int, str], None] = {}
    not_measured: dict[str, None] = {}
    for stage in plan.stages:
        for row in stage.traffic:
            if not row.wire_bytes:  # a receive is the time of its send
                continue
            group = next(group for group in groups[row.role] if stage.ranks[0] in group)
            members = _members(group, stage.ranks[0], row)
            is_on_several = len({rank // per_node for rank in members}) > 1
            kind = GroupKind(row.operation, len(members), is_on_several)
            time_ns = baseline.call_ns(kind, row.bytes_per_call, members)
            if time_ns is None:
                lacking[stage.stage, row.role] = None
                where = "on several nodes" if is_on_several else "within a node"
                not_measured[f"{row.operation} of {row.bytes_per_call:,} bytes by {len(members)} ranks {where}"] = None
            else:
                seconds[stage.stage, row.role] += row.count * time_ns / 1e9
    whole = {stage_and_role: time for stage_and_role, time in seconds.items() if stage_and_role not in lacking}
    return BaselineTimes(whole, tuple(not_measured))


def _members(group: Sequence[int], rank: int, row: Traffic) -> tuple[int, ...]:
    """Return the members of a call: of a message the rank and the one to which it goes."""
    if row.operation not in MESSAGES:
        return tuple(group)
    # Gradients of the pipeline go back; all else goes on. With model chunks both pass the end of the pipeline.
    towards = -1 if row.role == "pp" and row.when == "backward" else 1
    receiver = group[(group.index(rank) + towards) % len(group)]
    return (min(rank, receiver), max(rank, receiver))
