"""The table of communication: one row per role, operation, group size and reach, or finer.

Where members were not recorded, wait and transfer of a role or a rank cannot be separated: :class:`UnmatchedSums`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import COMPUTE
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factor
from commtrace.analysis.communication.calls import (
    CallSums,
    CallTable,
    Moved,
    calls_and_stalls,
    rows_of_block,
    sum_calls,
    sum_stalls,
)
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.operations import of_one_sort
from commtrace.analysis.matching.roles import Roles
from commtrace.analysis.statistics import MOST_EXACT
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.json_values import JsonObject
from commtrace.trace.run import Run
from commtrace.trace.spans import Int32, Int64

_FEW_UNMATCHED: Final = 0.05
"""Unmatched share of a role's stalls that does not change the findings on the rest."""

_MOST_RANKS_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class Communication:
    """The calls of all ranks of one role and operation, in groups of one size, within nodes or between them.

    None means unknown, or no call to take the value from. Bandwidths are 10⁹ bytes per second.
    """

    role: str
    operation: str
    group_size: int | None
    inter_node: bool | None  # members are on several nodes
    size: tuple[int, int] | None  # bytes of one call, [from, to); None for all sizes, or unknown ones
    ranks: tuple[int, ...] | None  # members of the group, if the row is of one group
    count: int  # calls on every rank that made them; of a coalesced bracket once per operation
    num_bytes: int | None  # full tensors
    unsized: int  # calls of unknown bytes
    duration_p50_ns: int | None  # by nearest rank
    duration_p99_ns: int | None
    duration_max_ns: int | None
    duration_sum_ns: int
    durations_are_bounds: bool  # calls of exact duration hold less than half of the bytes: the above are upper bounds
    algbw_gbps: float | None
    busbw_gbps: float | None
    bandwidth_time: str | None  # divisor: transfer (of calls matched on all members) or duration (with waits)
    bandwidth_is_bound: bool  # calls of exact time hold less than half of the bytes: both rates are lower bounds
    needed_busbw_gbps: float | None  # busbw at which these bytes take as long as compute; below, no schedule hides them
    exposed_ns: int  # stalls of the lane
    hidden_ns: int  # in flight without a stall
    wait_ns: int | None  # in flight before the last participant arrived
    unfinished: int  # calls without an end
    unmatched: int  # calls not matched on all members
    mismatched: int  # members disagree on operation, bytes or dtype
    replayed: int  # calls in replays of CUDA graphs: counted and sized, without times of their own
    upper_bounds: int  # calls whose start or end is a bound: their durations and hidden times are upper bounds

    @property
    def exposed_ratio(self) -> float | None:
        """Return the exposed share of the time in flight; None if nothing was in flight."""
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
            "durations_are_bounds": self.durations_are_bounds,
            "algbw_gbps": self.algbw_gbps,
            "busbw_gbps": self.busbw_gbps,
            "bandwidth_time": self.bandwidth_time,
            "bandwidth_is_bound": self.bandwidth_is_bound,
            "needed_busbw_gbps": self.needed_busbw_gbps,
            "exposed_ns": self.exposed_ns,
            "exposed_ratio": self.exposed_ratio,
            "hidden_ns": self.hidden_ns,
            "wait_ns": self.wait_ns,
            "unfinished": self.unfinished,
            "unmatched": self.unmatched,
            "mismatched": self.mismatched,
            "replayed": self.replayed,
            "upper_bounds": self.upper_bounds,
        }


def with_exact_rates(rows: Iterable[Communication]) -> list[Communication]:
    """Return the rows whose rates are exact, where they hold half of the bytes of their role and reach; else all."""
    rows = [*rows]
    exact_surplus = Counter[tuple[str, bool | None]]()  # exact bytes minus those of bounds
    for row in rows:
        if row.busbw_gbps:
            exact_surplus[row.role, row.inter_node] += (row.num_bytes or 0) * (-1 if row.bandwidth_is_bound else 1)
    return [row for row in rows if not (row.bandwidth_is_bound and exact_surplus[row.role, row.inter_node] >= 0)]


class Detail(Enum):
    """The further division of the rows."""

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
    """Return one row per (role, operation, group size, reach) of an aligned run, the most exposed first.

    Only calls launched in ``steps`` count; ``detail`` divides further by size or process group.
    """
    return communication_sums(run, matches, partition, roles, steps, detail).table(run)


class CommunicationKey(NamedTuple):
    """The key of a row of the table."""

    role: str
    operation: str
    group_size: int  # −1 if unknown
    reach: int  # 1 within a node, 2 between nodes, −1 if unknown
    detail: int  # the power of two of the bytes, the id of the group, or 0


@dataclass(frozen=True, slots=True)
class CommunicationSums:
    """Sums over the calls of some steps; those of parts of a run add up. ``compute_ns`` is of all ranks."""

    calls: Mapping[CommunicationKey, CallSums]
    compute_ns: int
    detail: Detail = Detail.NONE

    def __add__(self, other: CommunicationSums) -> CommunicationSums:
        calls = _added((self.calls, other.calls))
        return CommunicationSums(calls, self.compute_ns + other.compute_ns, self.detail)

    def table(self, run: Run) -> list[Communication]:
        """Return the table; only the process groups of the run are used."""
        table = [row for _, row in self.rows(run)]
        return sorted(table, key=lambda row: (-row.exposed_ns, -row.duration_sum_ns, row.role, row.operation))

    def rows(self, run: Run) -> list[tuple[CommunicationKey, Communication]]:
        """Return the rows of the table with their keys, ascending."""
        return [(key, _row(run, key, self.calls[key], self.compute_ns, self.detail)) for key in sorted(self.calls)]

    def bus_bytes(self, key: CommunicationKey) -> float:
        """Return the bytes on the bus of the calls of known size, on every rank that made them."""
        return _on_the_bus(key.operation, key.group_size, self.calls[key].all)


def communication_sums(
    run: Run,
    matches: Matches,
    partition: Partition,
    roles: Roles,
    steps: Sequence[int] | None = None,
    detail: Detail = Detail.NONE,
) -> CommunicationSums:
    """Sum up the calls of each row of the table; arguments as of :func:`communication_table`."""
    blocks = of_one_sort(run.blocks)
    parts = [_sums_of_block(run, block, matches, partition, roles, steps, detail) for block in blocks]
    calls = _added(
        {
            CommunicationKey(
                roles.words[key.role], run.names[key.name] if key.name >= 0 else "unknown", *key[2:]
            ): sums_of_key
            for key, sums_of_key in part.items()
        }
        for part in parts
    )
    return CommunicationSums(calls, int(partition.total(COMPUTE).sum()), detail)


def _added(parts: Iterable[Mapping[CommunicationKey, CallSums]]) -> dict[CommunicationKey, CallSums]:
    sums: dict[CommunicationKey, CallSums] = {}
    for part in parts:
        for key, sums_of_key in part.items():
            sums[key] = sums[key] + sums_of_key if key in sums else sums_of_key
    if sum(len(call_sums.exact_durations) + len(call_sums.bound_durations) for call_sums in sums.values()) > MOST_EXACT:
        return {
            key: replace(
                call_sums,
                exact_durations=call_sums.exact_durations.round(),
                bound_durations=call_sums.bound_durations.round(),
            )
            for key, call_sums in sums.items()
        }
    return sums


class _RowKey(NamedTuple):
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
) -> dict[_RowKey, CallSums]:
    known = rows_of_block(run, block, matches, roles, partition)
    calls, stalls = calls_and_stalls(known, steps, sizes_of_stalls=detail is Detail.SIZE)
    sums: dict[_RowKey, CallSums] = {}
    if len(calls):
        keys, order, begins = _grouped(calls, detail)
        sums.update(zip(keys, sum_calls(calls, run.name_code("all_to_all"), order, begins), strict=True))
    if len(stalls):
        keys, order, begins = _grouped(stalls, detail)
        for key, sums_of_key in zip(keys, sum_stalls(stalls, order, begins), strict=True):
            sums[key] = sums[key] + sums_of_key if key in sums else sums_of_key
    return sums


def _grouped(calls: CallTable, detail: Detail) -> tuple[list[_RowKey], Int64, Int64]:
    """Return the keys of calls, the order that sorts calls by key, and the position of each key in it."""
    columns = _key_columns(calls, detail)
    order, begins = sort_groups(pack(columns))
    keys = zip(*(column[order[begins]].tolist() for column in columns), strict=True)
    return [_RowKey(*key) for key in keys], order, begins


def _key_columns(calls: CallTable, detail: Detail) -> list[Int32 | Int64]:
    divided_by = np.zeros(len(calls), np.int64)
    if detail is Detail.SIZE:
        divided_by = _power_of_two(calls.num_bytes)
    elif detail is Detail.GROUP:
        divided_by = calls.group
    return [calls.role, calls.name, calls.group_size, np.clip(calls.nodes, -1, 2), divided_by]


def _power_of_two(num_bytes: Int64) -> Int64:
    """Return the exponent of the largest power of two up to each number; −1 for 0, −2 if it is unknown."""
    exponent = np.frexp(np.maximum(num_bytes, 1))[1] - 1
    return np.where(num_bytes > 0, exponent, np.sign(num_bytes) - 1).astype(np.int64)


def _row(run: Run, key: CommunicationKey, sums: CallSums, compute_ns: int, detail: Detail) -> Communication:
    operation = key.operation
    algbw, busbw, bandwidth_time, is_bound = _bandwidth(operation, key.group_size, sums)
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
        durations_are_bounds=sums.durations_are_bounds,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        bandwidth_time=bandwidth_time,
        bandwidth_is_bound=is_bound,
        needed_busbw_gbps=_needed(operation, key.group_size, sums, compute_ns) if sums.exposed_ns else None,
        exposed_ns=sums.exposed_ns,
        hidden_ns=sums.hidden_ns,
        wait_ns=sums.wait_ns if sums.complete else None,
        unfinished=sums.unfinished,
        unmatched=sums.count - sums.complete,
        mismatched=sums.mismatched,
        replayed=sums.replayed,
        upper_bounds=sums.upper_bounds,
    )


def _size(exponent: int) -> tuple[int, int] | None:
    if exponent < -1:
        return None
    return (0, 1) if exponent < 0 else (1 << exponent, 2 << exponent)


def _members(run: Run, group: int) -> tuple[int, ...]:
    return next((trace.groups[group].ranks for trace in run.ranks.values() if group in trace.groups), ())


def _bandwidth(operation: str, group_size: int, sums: CallSums) -> tuple[float | None, float | None, str | None, bool]:
    """Return algbw and busbw, GB/s, their divisor (transfer times if any call was matched), and if they are bounds."""
    moved, includes_waits, is_bound = sums.timed()
    if not _has_bandwidth(operation, group_size) or moved.time_ns == 0 or not moved.num_bytes:
        return None, None, None, False
    algbw = (moved.even + moved.uneven) / moved.time_ns
    busbw = _on_the_bus(operation, group_size, moved) / moved.time_ns
    return algbw, busbw, "duration" if includes_waits else "transfer", is_bound


def _needed(operation: str, group_size: int, sums: CallSums, compute_ns: int) -> float | None:
    """Return the bytes on the bus over the compute of all ranks, GB/s."""
    if not compute_ns or sums.unsized or not _has_bandwidth(operation, group_size):
        return None
    return _on_the_bus(operation, group_size, sums.all) / compute_ns or None


def _on_the_bus(operation: str, group_size: int, moved: Moved) -> float:
    even, uneven = (bus_factor(operation, group_size, uneven=uneven) for uneven in (False, True))
    return moved.even * even + moved.uneven * uneven


def _has_bandwidth(operation: str, group_size: int) -> bool:
    return operation not in WITHOUT_BANDWIDTH and group_size > 1


class Unmatched(NamedTuple):
    """Stalls whose wait and transfer cannot be separated."""

    roles: dict[str, str]  # a sentence with the reason, by role
    ranks: dict[int, int]  # ns over all steps


_BOUND: Final = (
    "How much of it is waiting is unknown, because it began behind earlier communication of its groups that ended at "
    "an unknown time: waits are lower bounds and transfers upper bounds."
)


class RoleStalls(NamedTuple):
    """Stalls on communication of a role, ns."""

    total: int
    unmatched: int
    bound: int  # matched, but on communication that began at an unknown time

    def plus(self, other: RoleStalls) -> RoleStalls:
        return RoleStalls(*(one + another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class UnmatchedSums:
    """Stalls of lanes, ns: of each role, and by rank the unmatched ones. Sums of several windows add up."""

    roles: Mapping[str, RoleStalls]
    ranks: Mapping[int, int]

    def __add__(self, other: UnmatchedSums) -> UnmatchedSums:
        roles = {role: stalls.plus(other.roles[role]) for role, stalls in self.roles.items()}
        return UnmatchedSums(roles, {rank: time + other.ranks[rank] for rank, time in self.ranks.items()})

    def find(self, recorded: Run) -> Unmatched:
        """Return the significant part; ``recorded`` shows which ranks are missing."""
        sentence = f"How much of it is waiting is unknown, because {_reason(recorded)}."
        bounds = {role: _BOUND for role, stalls in self.roles.items() if stalls.bound > _FEW_UNMATCHED * stalls.total}
        unmatched = {
            role: sentence for role, stalls in self.roles.items() if stalls.unmatched > _FEW_UNMATCHED * stalls.total
        }
        return Unmatched({**bounds, **unmatched}, {rank: time for rank, time in self.ranks.items() if time})


def sum_unmatched(context: Context, partition: Partition) -> UnmatchedSums:
    """Add up the stalls of a run that was analysed."""
    parts = [_stalled_time(context, partition, block) for block in context.run.blocks]
    words = context.roles.words
    roles = sum((part.roles for part in parts), np.zeros((3, len(words)))).astype(np.int64).T.tolist()
    return UnmatchedSums(
        {word: RoleStalls(*of_role) for word, of_role in zip(words, roles, strict=True)},
        {rank: time for part in parts for rank, time in part.ranks.items()},
    )


def roles_of_one_rank(communication: Iterable[Communication]) -> dict[str, str]:
    """Return a sentence for each role without a group of several recorded ranks."""
    sizes: dict[str, set[int | None]] = {}
    for row in communication:
        sizes.setdefault(row.role, set()).add(row.group_size)
    sentence = "Its groups have one rank and send nothing: it is the calls that take this time, so leave them out."
    return {role: sentence for role, sizes_of_role in sizes.items() if sizes_of_role == {1}}


class _StalledTime(NamedTuple):
    roles: npt.NDArray[np.float64]
    ranks: dict[int, int]


def _stalled_time(context: Context, partition: Partition, block: Block) -> _StalledTime:
    stalled_ns = block.together({rank: partition.stalled_ns[rank] for rank in block.ranks})
    complete, stall_complete, exact, stall_exact = (
        block.together({rank: getattr(context.matches.ranks[rank], column) for rank in block.ranks})
        for column in ("complete", "stall_complete", "ready_exact", "stall_ready_exact")
    )
    role = block.together({rank: context.roles.ranks[rank].role for rank in block.ranks})
    stall_ns = stalled_ns[:, 0] + stalled_ns[:, 1]
    stalled = np.flatnonzero(stall_ns)
    is_stall = block.spans.kind[stalled] == schema.STALL
    lacking = ~np.where(is_stall, stall_complete[stalled], complete[stalled])
    bound = ~lacking & ~np.where(is_stall, stall_exact[stalled], exact[stalled])
    role, time, count = role[stalled], stall_ns[stalled], len(context.roles.words)
    roles = np.stack(
        [
            np.bincount(role, time, count),
            np.bincount(role[lacking], time[lacking], count),
            np.bincount(role[bound], time[bound], count),
        ]
    )
    of_rank = np.searchsorted(block.bounds, stalled[lacking], side="right") - 1
    ranks = np.bincount(of_rank, time[lacking], len(block.ranks)).astype(np.int64)
    return _StalledTime(roles.astype(np.float64), dict(zip(block.ranks, ranks.tolist(), strict=True)))


def _reason(recorded: Run) -> str:
    ranks = (rank for rank in range(recorded.world_size) if rank not in recorded.ranks)
    missing = [*islice(ranks, _MOST_RANKS_NAMED + 1)]
    if not missing:
        return "not every member of it was matched"
    if len(missing) == 1:
        return f"rank {missing[0]} is missing"
    named = ", ".join(map(str, missing[:_MOST_RANKS_NAMED])) + (" …" if len(missing) > _MOST_RANKS_NAMED else "")
    return f"ranks {named} are missing"
