"""Communications of ranks as calls, and exact integer sums over them, which add up over parts of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.intervals import union
from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.keys import pack
from commtrace.analysis.matching.match import Matches, RankMatches, communications_of
from commtrace.analysis.matching.operations import (
    communication_rows,
    is_kernel_trace,
    replayed_rows,
    unfinished_rows,
    unfinished_rows_of,
)
from commtrace.analysis.matching.roles import RankRoles, Roles
from commtrace.analysis.statistics import Distribution
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Int64

_Columns = TypeVar("_Columns", RankMatches, RankRoles)


@dataclass(frozen=True, slots=True)
class CallTable:
    """Calls as columns; a stall is a row with only ``exposed``, and on request its call's bytes."""

    step: Int32  # of the launch
    role: Int32
    name: Int32
    group_size: Int32
    nodes: Int32
    group: Int64
    calls: Int64  # 1 for a call, 0 for a stall
    num_bytes: Int64  # −1 if unknown
    self_bytes: Int64  # −1 if unknown
    duration: Int64  # ns in flight
    transfer: Int64  # ns after the last participant arrived
    wait: Int64  # ns before it
    exposed: Int64  # ns of the lane's stalls
    hidden: Int64  # ns in flight without a stall
    finished: Bool
    complete: Bool  # matched on all members
    mismatched: Bool
    duration_exact: Bool  # False: ``duration`` and ``hidden`` are upper bounds
    transfer_exact: Bool  # False: ``transfer`` is an upper bound
    replayed: Bool  # in a replay of a CUDA graph: no time of it is known

    def __len__(self) -> int:
        return len(self.role)

    def take(self, rows: Int64) -> CallTable:
        return CallTable(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[CallTable]) -> CallTable:
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))

    @classmethod
    def empty(cls, count: int, **columns: npt.NDArray[Any]) -> CallTable:
        """Return rows with these columns and zeros."""
        zeros = np.zeros(count, np.int64)
        flags = ("finished", "complete", "mismatched", "duration_exact", "transfer_exact", "replayed")
        names = [column.name for column in fields(cls)]
        return cls(*(columns.get(name, zeros.astype(np.bool_) if name in flags else zeros) for name in names))


class CallRows(NamedTuple):
    """The rows of a block, in which all kernels were traced or none; ``stalled_ns`` is of the partition."""

    block: Block
    matches: RankMatches
    roles: RankRoles
    stalled_ns: Int64
    unfinished: Bool


def rows_of_block(run: Run, block: Block, matches: Matches, roles: Roles, partition: Partition) -> CallRows:
    """Return the rows of some ranks of a run, with what is known of them."""
    return CallRows(
        block,
        _of_block(block, matches.ranks, RankMatches),
        _of_block(block, roles.ranks, RankRoles),
        block.together({rank: partition.stalled_ns[rank] for rank in block.ranks}),
        unfinished_rows_of(run, block),
    )


def _of_block(block: Block, parts: Mapping[int, _Columns], kind: type[_Columns]) -> _Columns:
    return kind(
        *(block.together({rank: getattr(parts[rank], column.name) for rank in block.ranks}) for column in fields(kind))
    )


def calls_of_rank(
    trace: RankTrace,
    matches: RankMatches,
    stalled_ns: Int64,
    roles: RankRoles,
    steps: Sequence[int] | None = None,
) -> tuple[CallTable, CallTable]:
    """Return the calls of one rank, in all or some steps, and its stalls on other communication."""
    block = Block.of_ranks({trace.rank: trace.spans})
    rows = CallRows(block, matches, roles, stalled_ns, unfinished_rows(trace))
    return calls_and_stalls(rows, steps)


def calls_and_stalls(
    known: CallRows, steps: Sequence[int] | None = None, *, sizes_of_stalls: bool = False
) -> tuple[CallTable, CallTable]:
    """Return the calls of ranks and their stalls on other communication, with its bytes on request."""
    made = communication_rows(known.block.spans)
    if steps is not None:
        made &= np.isin(known.block.spans.step, steps)
    return _calls(known, np.flatnonzero(made)), _stalls(known, ~made, sizes_of_stalls)


def calls_of_rows(known: CallRows) -> CallTable:
    return _calls(known, np.flatnonzero(communication_rows(known.block.spans)))


def _stalls(known: CallRows, among: Bool, with_sizes: bool) -> CallTable:
    spans, roles, stalled_ns = known.block.spans, known.roles, known.stalled_ns
    stalled = (stalled_ns[:, 0] | stalled_ns[:, 1]).astype(np.bool_)
    stalls = np.flatnonzero(stalled & among)
    return CallTable.empty(
        len(stalls),
        step=spans.step[stalls],
        role=roles.role[stalls],
        name=spans.name[stalls],
        group_size=roles.group_size[stalls],
        nodes=roles.nodes[stalls],
        group=spans.group[stalls],
        exposed=stalled_ns[stalls, 0] + stalled_ns[stalls, 1],
        **({"num_bytes": _bytes_stalled_on(known.block, stalls)} if with_sizes else {}),
    )


def _bytes_stalled_on(block: Block, stalls: Int64) -> Int64:
    """Return the bytes of each row's call, or of its whole bracket; −1 if it was not recorded."""
    spans = block.spans
    communicates = communication_rows(spans)
    calls = np.where(communicates[stalls], stalls, communications_of(block, stalls))
    num_bytes = np.where(calls >= 0, spans.bytes[calls], -1)
    brackets = np.flatnonzero(communicates & (spans.kind == schema.COLLECTIVE))
    if not spans.op_in_seq[brackets].any():
        return num_bytes
    rows = np.concatenate([brackets, np.maximum(calls, 0)])
    key = pack((block.rank()[rows], spans.step[rows], spans.group[rows], spans.seq[rows], spans.name[rows]))
    _, which = np.unique(key, return_inverse=True)
    of_bracket, of_stall = np.split(which.reshape(-1), [len(brackets)])
    sums, unknown = np.zeros((2, int(which.max()) + 1), np.int64)
    np.add.at(sums, of_bracket, spans.bytes[brackets])
    np.add.at(unknown, of_bracket, spans.bytes[brackets] < 0)
    whole = np.where(unknown > 0, -1, sums)[of_stall]
    in_bracket = (calls >= 0) & (spans.kind[calls] == schema.COLLECTIVE)
    return np.where(in_bracket, whole, num_bytes)


def _calls(known: CallRows, rows: Int64) -> CallTable:
    spans, matches, roles = known.block.spans, known.matches, known.roles
    start, end, ready = spans.start[rows], spans.end[rows], matches.ready[rows]
    duration = np.maximum(end - start, 0)
    replayed = replayed_rows(spans)[rows]
    calls = CallTable(
        step=spans.step[rows],
        role=roles.role[rows],
        name=spans.name[rows],
        group_size=roles.group_size[rows],
        nodes=roles.nodes[rows],
        group=spans.group[rows],
        calls=np.ones(len(rows), np.int64),
        num_bytes=spans.bytes[rows],
        self_bytes=spans.self_bytes[rows],
        duration=duration,
        transfer=np.maximum(end - ready, 0),
        wait=np.where(spans.start_exact[rows], ready - start, 0),
        exposed=known.stalled_ns[rows, 0] + known.stalled_ns[rows, 1],
        hidden=np.where(replayed, 0, _hidden(known.block, rows, duration)),
        finished=~known.unfinished[rows] & ~replayed,
        complete=matches.complete[rows],
        mismatched=matches.mismatched[rows],
        duration_exact=spans.start_exact[rows] & spans.end_exact[rows],
        transfer_exact=matches.ready_exact[rows] & spans.end_exact[rows],
        replayed=replayed,
    )
    collective = spans.kind[rows] == schema.COLLECTIVE
    if not spans.op_in_seq[rows[collective]].any():
        return calls
    members = np.flatnonzero(collective)
    rank = known.block.rank()[rows[members]]
    merged = _merged_brackets(calls.take(members), rank, spans.group[rows[members]], spans.seq[rows[members]])
    return CallTable.concatenate([calls.take(np.flatnonzero(~collective)), merged])


def _hidden(block: Block, rows: Int64, duration: Int64) -> Int64:
    """Return the time in flight of each row without a stall of its lane."""
    spans = block.spans
    traced = is_kernel_trace(spans)
    known = np.flatnonzero(spans.kind == (schema.KERNEL if traced else schema.STALL))
    axis = block.per_row(block.end_to_end())
    covered = union(spans.start[known] + axis[known], spans.end[known] + axis[known])
    start = spans.start[rows] + axis[rows]
    inside = covered.before(start + duration) - covered.before(start)
    return inside if traced else duration - inside


def _merged_brackets(calls: CallTable, rank: Int32, group: Int64, seq: Int64) -> CallTable:
    """Merge each bracket into one call per operation: members share group, seq and times, and their bytes add up."""
    _, first, which = np.unique(
        pack((rank, calls.step, group, seq, calls.name)), return_index=True, return_inverse=True
    )
    merged = calls.take(first)
    num_bytes, self_bytes, exposed = np.zeros((3, len(first)), np.int64)
    np.add.at(num_bytes, which.reshape(-1), calls.num_bytes)
    unknown = np.bincount(which.reshape(-1), calls.num_bytes < 0, len(first)) > 0
    num_bytes = np.where(unknown, -1, num_bytes)
    np.add.at(self_bytes, which.reshape(-1), calls.self_bytes)
    np.add.at(exposed, which.reshape(-1), calls.exposed)
    self_bytes = np.where(merged.self_bytes < 0, -1, self_bytes)
    return replace(merged, num_bytes=num_bytes, self_bytes=self_bytes, exposed=exposed)


class Moved(NamedTuple):
    """Bytes and time of some calls."""

    calls: int
    num_bytes: int
    even: int  # S of commtrace.analysis.communication.bandwidth
    uneven: int  # S of uneven all_to_alls
    time_ns: int

    def plus(self, other: Moved) -> Moved:
        return Moved(*(one + another for one, another in zip(self, other, strict=True)))


_NOTHING: Final = Moved(0, 0, 0, 0, 0)


class Timed(NamedTuple):
    """The calls whose bytes and times give a bandwidth."""

    moved: Moved
    includes_waits: bool  # the time is in flight, not that of the transfer
    is_bound: bool  # the time is an upper bound


@dataclass(frozen=True, slots=True)
class CallSums:
    """Sums over calls, and over stalls, which add to ``exposed_ns`` alone."""

    count: int
    exposed_ns: int
    hidden_ns: int
    wait_ns: int
    complete: int  # calls matched on all members
    mismatched: int
    upper_bounds: int
    seen: int  # calls with an end of their own
    replayed: int  # calls in replays of CUDA graphs
    all: Moved  # calls of known bytes; without a time
    finished: Moved  # those of them of exact duration, which is the time
    finished_bounds: Moved  # those of them whose duration is an upper bound
    matched: Moved  # the complete ones of exact transfer, which is the time
    matched_bounds: Moved  # the complete ones whose transfer is an upper bound
    duration_ns: int
    exact_durations: Distribution[int]
    bound_durations: Distribution[int]

    @property
    def num_bytes(self) -> int | None:
        """Return the bytes of the calls of known bytes; None if there is none."""
        return self.all.num_bytes if self.all.calls else None

    @property
    def unsized(self) -> int:
        return self.count - self.all.calls

    @property
    def durations_are_bounds(self) -> bool:
        """Return whether ``durations`` are upper bounds."""
        return not _stand_for_all(self.finished, self.finished_bounds) and len(self.bound_durations) > 0

    @property
    def durations(self) -> Distribution[int]:
        """Return the exact durations, where they stand for all; else all of them, the upper bounds too."""
        return self.exact_durations + self.bound_durations if self.durations_are_bounds else self.exact_durations

    def timed(self) -> Timed:
        """Return the calls for a bandwidth: if possible matched ones, and those with exact times."""
        includes_waits = not (self.matched.calls or self.matched_bounds.calls)
        exact = self.finished if includes_waits else self.matched
        bounds = self.finished_bounds if includes_waits else self.matched_bounds
        if _stand_for_all(exact, bounds):
            return Timed(exact, includes_waits, False)
        return Timed(exact.plus(bounds), includes_waits, True)

    @property
    def unfinished(self) -> int:
        return self.count - self.seen - self.replayed

    def __add__(self, other: CallSums) -> CallSums:
        return CallSums(
            self.count + other.count,
            self.exposed_ns + other.exposed_ns,
            self.hidden_ns + other.hidden_ns,
            self.wait_ns + other.wait_ns,
            self.complete + other.complete,
            self.mismatched + other.mismatched,
            self.upper_bounds + other.upper_bounds,
            self.seen + other.seen,
            self.replayed + other.replayed,
            self.all.plus(other.all),
            self.finished.plus(other.finished),
            self.finished_bounds.plus(other.finished_bounds),
            self.matched.plus(other.matched),
            self.matched_bounds.plus(other.matched_bounds),
            self.duration_ns + other.duration_ns,
            self.exact_durations + other.exact_durations,
            self.bound_durations + other.bound_durations,
        )


def _stand_for_all(exact: Moved, bounds: Moved) -> bool:
    """Return whether calls with exact times hold at least half of the bytes: few bytes show the latency of a call."""
    return exact.calls > 0 and exact.num_bytes >= bounds.num_bytes


def sum_calls(calls: CallTable, all_to_all: int, order: Int64, begins: Int64) -> list[CallSums]:
    """Sum each group of at least one call.

    ``order`` sorts the calls by group; ``begins`` has the position of each group in it. ``all_to_all`` is a name code.
    """
    made = (calls.calls > 0)[order]
    finished = made & calls.finished[order]
    complete = made & calls.complete[order]
    duration_exact, transfer_exact = calls.duration_exact[order], calls.transfer_exact[order]
    transfer = calls.transfer[order]
    recorded, duration = calls.num_bytes[order], calls.duration[order]
    sized, num_bytes = made & (recorded >= 0), np.maximum(recorded, 0)
    uneven = ((calls.self_bytes >= 0) & (calls.name == all_to_all))[order]
    to_others = num_bytes - calls.self_bytes[order] if uneven.any() else num_bytes

    def total(column: npt.NDArray[np.generic]) -> list[int]:
        sums: list[int] = np.add.reduceat(column, begins, dtype=np.int64).tolist()
        return sums

    def sent(chosen: Bool, time_ns: Int64 | None) -> Iterator[Moved]:
        whole = total(num_bytes * chosen)
        even, sent_to_others = whole, [0] * len(begins)
        if to_others is not num_bytes:
            even, sent_to_others = total(num_bytes * (chosen & ~uneven)), total(to_others * (chosen & uneven))
        times = [0] * len(begins) if time_ns is None else total(time_ns * chosen)
        return map(Moved, total(chosen), whole, even, sent_to_others, times)

    def distributions(chosen: Bool) -> Iterator[Distribution[int]]:
        parts = zip(np.split(duration, begins[1:]), np.split(chosen, begins[1:]), strict=True)
        return (Distribution.of(part[group_of_calls]) for part, group_of_calls in parts)

    return [
        CallSums(*of_group)
        for of_group in zip(
            total(made),
            total(calls.exposed[order]),
            total(calls.hidden[order]),
            total(calls.wait[order]),
            total(complete),
            total(calls.mismatched[order]),
            total(finished & ~duration_exact),
            total(finished),
            total(calls.replayed[order]),
            sent(sized, None),
            sent(sized & finished & duration_exact, duration),
            sent(sized & finished & ~duration_exact, duration),
            sent(sized & finished & complete & transfer_exact, transfer),
            sent(sized & finished & complete & ~transfer_exact, transfer),
            total(duration * finished),
            distributions(finished & duration_exact),
            distributions(finished & ~duration_exact),
            strict=True,
        )
    ]


def sum_stalls(stalls: CallTable, order: Int64, begins: Int64) -> list[CallSums]:
    exposed = np.add.reduceat(stalls.exposed[order], begins, dtype=np.int64)
    none: Distribution[int] = Distribution.of(np.zeros(0, np.int64))
    nothing = (_NOTHING,) * 5
    return [CallSums(0, exposed_ns, 0, 0, 0, 0, 0, 0, 0, *nothing, 0, none, none) for exposed_ns in exposed.tolist()]
