"""The table of communication: one row per role, operation, group size and reach, and finer where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from commtrace.analysis.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.calls import Calls, calls_of_rank
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.match import Matches
from commtrace.analysis.partition import Partition
from commtrace.analysis.roles import Roles
from commtrace.analysis.states import COMPUTE
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Communication:
    """All calls of one operation, for one role, in groups of one size, within nodes or between them, on all ranks.

    Attributes:
        role, operation: in the field's words.
        group_size: members of the group; None where no rank told.
        inter_node: whether the members are on several nodes; None where some were not recorded.
        size: bytes of one call, from (inclusive) and to (exclusive); None where calls of all sizes are in the row.
        ranks: members of the group, where the row is of one group.
        count: calls, counted on every rank that made them; of a coalesced bracket once per operation.
        num_bytes: of all calls, full tensors.
        duration_p50_ns, duration_p99_ns, duration_max_ns, duration_sum_ns: of the calls whose end was seen (nearest
            rank); None if none was.
        algbw_gbps, busbw_gbps: 10⁹ bytes per second over all calls; None where there is none to tell.
        bandwidth_time: ``transfer`` or ``duration``: what the bandwidths were divided by. Transfer is after the last
            participant arrived, and needs calls matched on all members; duration includes waiting for them.
        needed_busbw_gbps: the busbw at which all of these bytes would take as long as the ranks compute: below it, they
            cannot be hidden however they are scheduled. None where nothing was computed or nothing is exposed.
        exposed_ns: time the ranks' lanes stood still for these calls.
        hidden_ns: time in flight while the rank's lane stood still for no communication at all.
        wait_ns: time in flight before the last participant arrived; None if no call was matched on all members.
        unfinished: calls whose end was never seen.
        unmatched: calls that were not matched on all members.
        mismatched: calls whose members disagree on operation, bytes or dtype.
    """

    role: str
    operation: str
    group_size: int | None
    inter_node: bool | None
    size: tuple[int, int] | None
    ranks: tuple[int, ...] | None
    count: int
    num_bytes: int
    duration_p50_ns: int | None
    duration_p99_ns: int | None
    duration_max_ns: int | None
    duration_sum_ns: int
    algbw_gbps: float | None
    busbw_gbps: float | None
    bandwidth_time: str | None
    needed_busbw_gbps: float | None
    exposed_ns: int
    hidden_ns: int
    wait_ns: int | None
    unfinished: int
    unmatched: int
    mismatched: int

    @property
    def exposed_ratio(self) -> float | None:
        """Share of the time in flight that the lanes stood still for; None where nothing was in flight."""
        in_flight = self.exposed_ns + self.hidden_ns
        return self.exposed_ns / in_flight if in_flight else None

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "operation": self.operation,
            "group_size": self.group_size,
            "inter_node": self.inter_node,
            **({} if self.size is None else {"bytes_from": self.size[0], "bytes_to": self.size[1]}),
            **({} if self.ranks is None else {"ranks": list(self.ranks)}),
            "count": self.count,
            "bytes": self.num_bytes,
            "duration_ns": {
                "p50": self.duration_p50_ns,
                "p99": self.duration_p99_ns,
                "max": self.duration_max_ns,
                "sum": self.duration_sum_ns,
            },
            "algbw_gbps": self.algbw_gbps,
            "busbw_gbps": self.busbw_gbps,
            "bandwidth_time": self.bandwidth_time,
            "needed_busbw_gbps": self.needed_busbw_gbps,
            "exposed_ns": self.exposed_ns,
            "exposed_ratio": self.exposed_ratio,
            "hidden_ns": self.hidden_ns,
            "wait_ns": self.wait_ns,
            "unfinished": self.unfinished,
            "unmatched": self.unmatched,
            "mismatched": self.mismatched,
        }


class Detail(Enum):
    """What the rows of the table are divided by, beside role, operation, group size and reach."""

    NONE = "none"
    SIZE = "size"
    GROUP = "group"


def communication_table(
    run: Run,
    matches: Matches,
    partition: Partition,
    roles: Roles,
    steps: Sequence[int] | None = None,
    detail: Detail = Detail.NONE,
) -> list[Communication]:
    """One row per (role, operation, group size, within or between nodes), the most exposed first.

    Args:
        run: on one clock.
        matches, partition, roles: of this run.
        steps: those that count, where the run holds others as well: what was launched in them.
        detail: by what to divide them further: bytes of the call (powers of two), or process group.
    """
    parts = [
        part
        for rank, trace in run.ranks.items()
        for part in calls_of_rank(trace, matches.ranks[rank], partition.stalled_ns[rank], roles.ranks[rank], steps)
    ]
    calls = Calls.concatenate(parts)
    if not len(calls):
        return []
    reach = np.clip(calls.nodes, -1, 2)
    columns: list[npt.NDArray[Any]] = [calls.role, calls.name, calls.group_size, reach]
    if detail is Detail.SIZE:
        columns.append(_power_of_two(calls.num_bytes))
    elif detail is Detail.GROUP:
        columns.append(calls.group)
    order, begins = sort_groups(pack(columns))
    compute_ns = int(partition.total(COMPUTE).sum())
    table = [_summarise(run, roles, calls.take(rows), compute_ns, detail) for rows in np.split(order, begins[1:])]
    return sorted(table, key=lambda row: (-row.exposed_ns, -row.duration_sum_ns, row.role, row.operation))


def _power_of_two(num_bytes: Int64) -> Int64:
    """Exponent of the largest power of two that is not above each number; −1 for nothing."""
    return np.where(num_bytes > 0, np.frexp(np.maximum(num_bytes, 1))[1] - 1, -1).astype(np.int64)


def _summarise(run: Run, roles: Roles, calls: Calls, compute_ns: int, detail: Detail) -> Communication:
    operation = run.names[calls.name[0]] if calls.name[0] >= 0 else "unknown"
    group_size, nodes = int(calls.group_size[0]), int(calls.nodes[0])
    made = calls.calls > 0
    durations = np.sort(calls.duration[made & calls.finished])
    algbw, busbw, bandwidth_time = _bandwidth(operation, group_size, calls)
    exposed = int(calls.exposed.sum())
    return Communication(
        role=roles.words[calls.role[0]],
        operation=operation,
        group_size=group_size if group_size > 0 else None,
        inter_node=nodes > 1 if nodes > 0 else None,
        size=_size(calls) if detail is Detail.SIZE else None,
        ranks=_members(run, int(calls.group[0])) if detail is Detail.GROUP else None,
        count=int(calls.calls.sum()),
        num_bytes=int(calls.num_bytes.sum()),
        duration_p50_ns=_nearest_rank(durations, 50),
        duration_p99_ns=_nearest_rank(durations, 99),
        duration_max_ns=_nearest_rank(durations, 100),
        duration_sum_ns=int(durations.sum()),
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        bandwidth_time=bandwidth_time,
        needed_busbw_gbps=_needed(operation, group_size, calls, compute_ns) if exposed else None,
        exposed_ns=exposed,
        hidden_ns=int(calls.hidden.sum()),
        wait_ns=int(calls.wait.sum()) if calls.complete.any() else None,
        unfinished=int((made & ~calls.finished).sum()),
        unmatched=int((made & ~calls.complete).sum()),
        mismatched=int(calls.mismatched.sum()),
    )


def _size(calls: Calls) -> tuple[int, int]:
    exponent = int(_power_of_two(calls.num_bytes[:1])[0])
    return (0, 1) if exponent < 0 else (1 << exponent, 2 << exponent)


def _members(run: Run, group: int) -> tuple[int, ...]:
    return next((trace.groups[group].ranks for trace in run.ranks.values() if group in trace.groups), ())


def _bandwidth(operation: str, group_size: int, calls: Calls) -> tuple[float | None, float | None, str | None]:
    """algbw and busbw, GB/s, and what they were divided by: transfer times if any call was matched."""
    usable = (calls.calls > 0) & calls.finished
    matched = usable & calls.complete
    rows, times, label = (
        (matched, calls.transfer, "transfer") if matched.any() else (usable, calls.duration, "duration")
    )
    time = int(times[rows].sum())
    if not _has_bandwidth(operation, group_size) or time == 0 or not calls.num_bytes[rows].any():
        return None, None, None
    moved = moved_bytes(operation, calls.num_bytes[rows], calls.self_bytes[rows])
    on_the_bus = moved * bus_factors(operation, group_size, calls.self_bytes[rows])
    return float(moved.sum() / time), float(on_the_bus.sum() / time), label


def _needed(operation: str, group_size: int, calls: Calls, compute_ns: int) -> float | None:
    """Bytes on the bus over the time that all ranks compute in, GB/s."""
    if not compute_ns or not _has_bandwidth(operation, group_size):
        return None
    moved = moved_bytes(operation, calls.num_bytes, calls.self_bytes)
    return float((moved * bus_factors(operation, group_size, calls.self_bytes)).sum() / compute_ns) or None


def _has_bandwidth(operation: str, group_size: int) -> bool:
    return operation not in WITHOUT_BANDWIDTH and group_size > 1


def _nearest_rank(ordered: Int64, percent: int) -> int | None:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    if not len(ordered):
        return None
    return int(ordered[-(-percent * len(ordered) // 100) - 1])
