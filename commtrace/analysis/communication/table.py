"""The table of communication: one row per role, operation, group size and reach, and finer where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import COMPUTE
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factor
from commtrace.analysis.communication.call_sums import CallSums, Moved, sum_calls, sum_stalls
from commtrace.analysis.communication.calls import CallRows, Calls, calls_and_stalls
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.matching.match import Matches, RankMatches
from commtrace.analysis.matching.operations import of_one_sort, unfinished_rows_of
from commtrace.analysis.matching.roles import RankRoles, Roles
from commtrace.trace.blocks import Block
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Communication:
    """All calls of one operation, for one role, in groups of one size, within nodes or between them, on all ranks.

    Attributes:
        role, operation: in the field's words.
        group_size: members of the group; None where no rank told.
        inter_node: whether the members are on several nodes; None where some were not recorded.
        size: bytes of one call, from (inclusive) and to (exclusive); None where calls of all sizes are in the row, or
            such as nobody told the size of.
        ranks: members of the group, where the row is of one group.
        count: calls, counted on every rank that made them; of a coalesced bracket once per operation.
        num_bytes: of the calls whose bytes are known, full tensors; None if those of none are.
        unsized: calls whose bytes are not known.
        duration_p50_ns, duration_p99_ns, duration_max_ns, duration_sum_ns: of the calls whose end was seen (nearest
            rank); None if none was.
        algbw_gbps, busbw_gbps: 10⁹ bytes per second over the calls whose bytes are known; None where there is none.
        bandwidth_time: ``transfer`` or ``duration``: what the bandwidths were divided by. Transfer is after the last
            participant arrived, and needs calls matched on all members; duration includes waiting for them.
        needed_busbw_gbps: the busbw at which all of these bytes would take as long as the ranks compute: below it, they
            cannot be hidden however they are scheduled. None where nothing was computed, nothing is exposed, or the
            bytes of some calls are not known.
        exposed_ns: time the ranks' lanes stood still for these calls.
        hidden_ns: time in flight while the rank's lane stood still for no communication at all.
        wait_ns: time in flight before the last participant arrived; None if no call was matched on all members.
        unfinished: calls whose end was never seen.
        unmatched: calls that were not matched on all members.
        mismatched: calls whose members disagree on operation, bytes or dtype.
        upper_bounds: calls that ended at the time recorded or before, as nothing measured the end: their durations, and
            what is hidden of them, are upper bounds.
    """

    role: str
    operation: str
    group_size: int | None
    inter_node: bool | None
    size: tuple[int, int] | None
    ranks: tuple[int, ...] | None
    count: int
    num_bytes: int | None
    unsized: int
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
    upper_bounds: int

    @property
    def exposed_ratio(self) -> float | None:
        """Share of the time in flight that the lanes stood still for; None where nothing was in flight."""
        in_flight = self.exposed_ns + self.hidden_ns
        return self.exposed_ns / in_flight if in_flight else None

    def to_json(self) -> JsonObject:
        return {
            "role": self.role,
            "operation": self.operation,
            "group_size": self.group_size,
            "inter_node": self.inter_node,
            **({} if self.size is None else {"bytes_from": self.size[0], "bytes_to": self.size[1]}),
            **({} if self.ranks is None else {"ranks": list(self.ranks)}),
            "count": self.count,
            "bytes": self.num_bytes,
            "unsized": self.unsized,
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
            "upper_bounds": self.upper_bounds,
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
    return communication_sums(run, matches, partition, roles, steps, detail).table(run)


class CommunicationKey(NamedTuple):
    """What the calls of one row of the table have in common.

    Attributes:
        role, operation: in the field's words.
        group_size: members of the group; −1 where it is not known.
        reach: 1 within a node, 2 between nodes, −1 where that is not known.
        detail: the power of two of the bytes, the id of the group, or 0.
    """

    role: str
    operation: str
    group_size: int
    reach: int
    detail: int


MOST_DURATIONS: Final = 1_000_000
"""Of a table, up to which its quantiles are exact: 8 MB."""


@dataclass(frozen=True, slots=True)
class CommunicationSums:
    """Sums over the calls of some steps. Sums of parts of a run add up to those of the run.

    Attributes:
        calls: by row of the table.
        compute_ns: how long the ranks computed in the same steps, all together.
        detail: by what rows are divided further.
    """

    calls: Mapping[CommunicationKey, CallSums]
    compute_ns: int
    detail: Detail = Detail.NONE

    def __add__(self, other: CommunicationSums) -> CommunicationSums:
        calls = _added((self.calls, other.calls))
        return CommunicationSums(calls, self.compute_ns + other.compute_ns, self.detail)

    def table(self, run: Run) -> list[Communication]:
        """Return the table; of the run its process groups matter, not its rows."""
        table = [_row(run, key, self.calls[key], self.compute_ns, self.detail) for key in sorted(self.calls)]
        return sorted(table, key=lambda row: (-row.exposed_ns, -row.duration_sum_ns, row.role, row.operation))


def communication_sums(
    run: Run,
    matches: Matches,
    partition: Partition,
    roles: Roles,
    steps: Sequence[int] | None = None,
    detail: Detail = Detail.NONE,
) -> CommunicationSums:
    """Sum up the calls of each row of the table. The arguments are those of :func:`communication_table`."""
    blocks = of_one_sort(run.blocks)
    parts = [_sums_of_block(run, block, matches, partition, roles, steps, detail) for block in blocks]
    calls = _added(
        {
            CommunicationKey(roles.words[key.role], run.names[key.name] if key.name >= 0 else "unknown", *key[2:]): own
            for key, own in part.items()
        }
        for part in parts
    )
    return CommunicationSums(calls, int(partition.total(COMPUTE).sum()), detail)


def _added(parts: Iterable[Mapping[CommunicationKey, CallSums]]) -> dict[CommunicationKey, CallSums]:
    sums: dict[CommunicationKey, CallSums] = {}
    for part in parts:
        for key, own in part.items():
            sums[key] = sums[key] + own if key in sums else own
    if sum(len(own.durations) for own in sums.values()) > MOST_DURATIONS:
        return {key: replace(own, durations=own.durations.round()) for key, own in sums.items()}
    return sums


class _Key(NamedTuple):
    """The same with the codes of a run."""

    role: int
    name: int
    group_size: int
    reach: int
    detail: int


def _sums_of_block(
    run: Run,
    block: Block,
    matches: Matches,
    partition: Partition,
    roles: Roles,
    steps: Sequence[int] | None,
    detail: Detail,
) -> dict[_Key, CallSums]:
    known = CallRows(
        block,
        RankMatches(*_of_block(block, matches.ranks, RankMatches)),
        RankRoles(*_of_block(block, roles.ranks, RankRoles)),
        block.together({rank: partition.stalled_ns[rank] for rank in block.ranks}),
        unfinished_rows_of(run, block),
    )
    calls, stalls = calls_and_stalls(known, steps, sizes_of_stalls=detail is Detail.SIZE)
    sums: dict[_Key, CallSums] = {}
    if len(calls):
        keys, order, begins = _grouped(calls, detail)
        sums.update(zip(keys, sum_calls(calls, run.name_code("all_to_all"), order, begins), strict=True))
    if len(stalls):
        keys, order, begins = _grouped(stalls, detail)
        for key, own in zip(keys, sum_stalls(stalls, order, begins), strict=True):
            sums[key] = sums[key] + own if key in sums else own
    return sums


def _grouped(calls: Calls, detail: Detail) -> tuple[list[_Key], Int64, Int64]:
    """The keys of calls, the order that brings those of each key together, and where in it each key begins."""
    columns = _key_columns(calls, detail)
    order, begins = sort_groups(pack(columns))
    keys = zip(*(column[order[begins]].tolist() for column in columns), strict=True)
    return [_Key(*key) for key in keys], order, begins


def _of_block(block: Block, parts: Mapping[int, Any], kind: Any) -> Iterator[npt.NDArray[Any]]:
    """The columns of these parts, one per rank, as columns of the block."""
    for column in fields(kind):
        yield block.together({rank: getattr(parts[rank], column.name) for rank in block.ranks})


def _key_columns(calls: Calls, detail: Detail) -> list[npt.NDArray[Any]]:
    divided_by = np.zeros(len(calls), np.int64)
    if detail is Detail.SIZE:
        divided_by = _power_of_two(calls.num_bytes)
    elif detail is Detail.GROUP:
        divided_by = calls.group
    return [calls.role, calls.name, calls.group_size, np.clip(calls.nodes, -1, 2), divided_by]


def _power_of_two(num_bytes: Int64) -> Int64:
    """Exponent of the largest power of two that is not above each number; −1 for nothing, −2 where it is unknown."""
    exponent = np.frexp(np.maximum(num_bytes, 1))[1] - 1
    return np.where(num_bytes > 0, exponent, np.sign(num_bytes) - 1).astype(np.int64)


def _row(run: Run, key: CommunicationKey, sums: CallSums, compute_ns: int, detail: Detail) -> Communication:
    operation = key.operation
    algbw, busbw, bandwidth_time = _bandwidth(operation, key.group_size, sums)
    return Communication(
        role=key.role,
        operation=operation,
        group_size=key.group_size if key.group_size > 0 else None,
        inter_node=key.reach > 1 if key.reach > 0 else None,
        size=_size(key.detail) if detail is Detail.SIZE else None,
        ranks=_members(run, key.detail) if detail is Detail.GROUP else None,
        count=sums.count,
        num_bytes=sums.num_bytes,
        unsized=sums.unsized,
        duration_p50_ns=sums.durations.nearest_rank(50),
        duration_p99_ns=sums.durations.nearest_rank(99),
        duration_max_ns=sums.durations.nearest_rank(100),
        duration_sum_ns=sums.duration_ns,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        bandwidth_time=bandwidth_time,
        needed_busbw_gbps=_needed(operation, key.group_size, sums, compute_ns) if sums.exposed_ns else None,
        exposed_ns=sums.exposed_ns,
        hidden_ns=sums.hidden_ns,
        wait_ns=sums.wait_ns if sums.complete else None,
        unfinished=sums.unfinished,
        unmatched=sums.count - sums.complete,
        mismatched=sums.mismatched,
        upper_bounds=sums.upper_bounds,
    )


def _size(exponent: int) -> tuple[int, int] | None:
    if exponent < -1:
        return None
    return (0, 1) if exponent < 0 else (1 << exponent, 2 << exponent)


def _members(run: Run, group: int) -> tuple[int, ...]:
    return next((trace.groups[group].ranks for trace in run.ranks.values() if group in trace.groups), ())


def _bandwidth(operation: str, group_size: int, sums: CallSums) -> tuple[float | None, float | None, str | None]:
    """algbw and busbw, GB/s, and what they were divided by: transfer times if any call was matched."""
    timed, label = (sums.matched, "transfer") if sums.matched.calls else (sums.finished, "duration")
    if not _has_bandwidth(operation, group_size) or timed.time_ns == 0 or not timed.num_bytes:
        return None, None, None
    return (timed.even + timed.uneven) / timed.time_ns, _on_the_bus(operation, group_size, timed) / timed.time_ns, label


def _needed(operation: str, group_size: int, sums: CallSums, compute_ns: int) -> float | None:
    """Bytes on the bus over the time that all ranks compute in, GB/s."""
    if not compute_ns or sums.unsized or not _has_bandwidth(operation, group_size):
        return None
    return _on_the_bus(operation, group_size, sums.all) / compute_ns or None


def _on_the_bus(operation: str, group_size: int, moved: Moved) -> float:
    even, uneven = (bus_factor(operation, group_size, uneven=uneven) for uneven in (False, True))
    return moved.even * even + moved.uneven * uneven


def _has_bandwidth(operation: str, group_size: int) -> bool:
    return operation not in WITHOUT_BANDWIDTH and group_size > 1
