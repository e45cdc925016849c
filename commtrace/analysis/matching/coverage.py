"""Find the recorded, lost and invisible communication of a recording, also per group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.keys import grouped, pack
from commtrace.analysis.matching.arrivals import GroupLabel, RankArrivals, describe_group, known_groups
from commtrace.analysis.matching.operations import communication_rows, unfinished_rows
from commtrace.analysis.matching.replays import ReplayKey, Replays, ReplaySums, add_replays, find_replays
from commtrace.analysis.matching.roles import Roles
from commtrace.findings.formatting import format_ranks
from commtrace.trace import schema
from commtrace.trace.blocks import Block, bounds_of
from commtrace.trace.quiet import unrecorded
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans

_USUAL_BYPASS: Final = {
    "tp": "user buffers of Transformer Engine or symmetric memory",
    "ep": "DeepEP or NVSHMEM",
    "cp": "a kernel of its own",
    "dp": "a reducer in C++",
    "pp": "NVSHMEM or NCCL called from C++",
}
"""By parallel dimension, paths of communication that bypass torch.distributed in Python."""

_MOST_RANGES: Final = 16


@dataclass(frozen=True, slots=True)
class Coverage:
    """Rows recorded (of the steps that count) and dropped, by kind; ``not_visible`` has sentences on unseen paths.

    Rows of communication in replays of CUDA graphs are counted as those of others; ``replays`` has the time of these.
    """

    captured: dict[str, int]
    dropped: dict[str, int]
    not_visible: tuple[str, ...]
    replays: tuple[Replays, ...] = ()  # longest first


@dataclass(frozen=True, slots=True)
class Captured:
    """Rows by kind, and the roles that communicated. Those of several windows add up."""

    rows: Mapping[str, int]
    roles: frozenset[str]
    replays: Mapping[ReplayKey, ReplaySums]

    def __add__(self, other: Captured) -> Captured:
        rows = Counter(self.rows) + Counter(other.rows)
        return Captured(
            {kind: rows[kind] for kind in schema.KINDS if rows[kind]},
            self.roles | other.roles,
            add_replays(self.replays, other.replays),
        )

    def coverage(self, run: Run) -> Coverage:
        """Return the coverage of a run; integrations name unseen paths in ``topology["not_visible"]``."""
        dropped = Counter[str]()
        for trace in run.ranks.values():
            dropped.update(trace.dropped)
        skipped = {str(role) for trace in run.ranks.values() for role in trace.recording.get("skip_roles", ())}
        reported = {str(path) for trace in run.ranks.values() for path in trace.topology.get("not_visible", ())}
        silent = _silent_dimensions(run, self.roles, skipped) if self.rows else ()
        paths = (*sorted(reported), *_invisible_paths(run), *_skipped(skipped), *silent)
        replays = sorted((Replays.of(*item) for item in self.replays.items()), key=lambda item: -item.time_ns)
        return Coverage(dict(self.rows), dict(dropped), paths, tuple(replays))


def find_captured(run: Run, roles: Roles, steps: Sequence[int] | None = None) -> Captured:
    """Add up the rows of all ranks, in all or some steps."""
    counts = np.zeros(len(schema.KINDS), np.int64)
    for block in run.blocks:
        kind = block.spans.kind if steps is None else block.spans.kind[np.isin(block.spans.step, steps)]
        counts += np.bincount(kind, minlength=len(schema.KINDS))
    rows = {kind: count for kind, count in zip(schema.KINDS, counts.tolist(), strict=True) if count}
    return Captured(rows, frozenset(_roles_that_communicated(run, roles)), find_replays(run, steps))


def find_coverage(run: Run, roles: Roles) -> Coverage:
    return find_captured(run, roles).coverage(run)


def _invisible_paths(run: Run) -> Iterable[str]:
    """Yield the paths that recorders found in their processes (capture/collectives/untraced_paths.py)."""
    ranks_of_path: dict[tuple[str, str], list[int]] = {}
    for rank, trace in run.ranks.items():
        for path, state in trace.topology.get("invisible_paths", {}).items():
            ranks_of_path.setdefault((path, state), []).append(rank)
    for (path, state), ranks in ranks_of_path.items():
        where = "every rank" if len(ranks) == len(run.ranks) else format_ranks(ranks)
        if state == "active":
            yield f"{path}: in use on {where}. Its communication was not seen: unknown, not zero."
        else:
            yield f"{path}: loaded on {where}; whether it is used is unknown. Communication through it is not seen."


def _skipped(roles: Iterable[str]) -> Iterable[str]:
    for role in sorted(roles):
        yield f"{role}: not recorded (skipped by COMMTRACE_SKIP_ROLES); its time is not zero, it is unknown."


def _silent_dimensions(run: Run, heard: Collection[str], skipped: Collection[str]) -> Iterable[str]:
    sizes: dict[str, int] = {}
    for trace in run.ranks.values():
        sizes.update(trace.parallel)
    for dimension, bypass in _USUAL_BYPASS.items():
        if sizes.get(dimension, 1) > 1 and not any(dimension in role.split("-") for role in (*heard, *skipped)):
            yield (
                f"{dimension} communication: {dimension} = {sizes[dimension]}, and none was seen. It may have gone "
                f"through {bypass}; its time is not zero, it is unknown."
            )


def _roles_that_communicated(run: Run, roles: Roles) -> set[str]:
    heard = np.zeros(len(roles.words), np.bool_)
    for rank, trace in run.ranks.items():
        heard[roles.ranks[rank].role[communication_rows(trace.spans)]] = True
    return {word for word, is_heard in zip(roles.words, heard, strict=True) if is_heard}


class Seen(NamedTuple):
    """The numbers of one group that one rank recorded, and counts of them."""

    rank: int
    first: int | None  # lowest; None without any
    last: int | None  # highest; None without any
    recorded: int  # the members of a bracket share one number
    in_flight: int  # launched, without a seen end at its last write
    missing: int  # launched, but neither recorded nor in flight
    ranges: tuple[tuple[int, int], ...]  # first missing, as (first, last); empty for messages
    unwritten: int | None = None  # completed by others only; None if it ended cleanly or stalled before


class GroupCoverage(NamedTuple):
    """The coverage of a group, of each rank that recorded or launched any collectives or messages."""

    group: GroupLabel
    collectives: tuple[Seen, ...]
    messages: tuple[Seen, ...]

    @property
    def missing(self) -> int:
        return sum(seen.missing for seen in (*self.collectives, *self.messages))


def cover_groups(run: Run, arrivals: Mapping[int, RankArrivals]) -> list[GroupCoverage]:
    """Return the coverage of all known groups, largest first."""
    groups = known_groups(run)
    collectives: dict[int, list[Seen]] = {}
    messages: dict[int, list[Seen]] = {}
    for rank, trace in run.ranks.items():
        for group, seen in _collectives(trace, arrivals[rank]).items():
            collectives.setdefault(group, []).append(seen)
        for group, seen in _messages(trace, arrivals[rank]).items():
            messages.setdefault(group, []).append(seen)
    numbers = {*groups, *collectives, *messages}
    ordered = sorted(numbers, key=lambda number: (-(groups[number].size if number in groups else 0), number))
    return [
        GroupCoverage(
            describe_group(groups.get(number), number),
            tuple(collectives.get(number, ())),
            tuple(messages.get(number, ())),
        )
        for number in ordered
    ]


class CollectiveNumbers(NamedTuple):
    """Lowest, highest and count of the collective numbers that a rank recorded of a group."""

    first: int
    last: int
    recorded: int

    def plus(self, other: CollectiveNumbers | None) -> CollectiveNumbers:
        """Return those of both parts of a recording."""
        if other is None:
            return self
        return CollectiveNumbers(
            min(self.first, other.first), max(self.last, other.last), self.recorded + other.recorded
        )


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of all rows of a rank; those of the parts of its recording add up."""

    numbers: Mapping[int, CollectiveNumbers]  # by group
    backwards: int  # rows that end before they start

    @classmethod
    def of(cls, spans: Spans) -> RowCounts:
        """Count the rows of one rank."""
        return cls.of_block(Block((0,), bounds_of([len(spans)]), spans))[0]

    @classmethod
    def of_block(cls, block: Block) -> dict[int, RowCounts]:
        """Count the rows of each rank."""
        spans = block.spans
        # The members of a bracket share a number, and one of them is the first.
        rows = np.flatnonzero(
            (spans.kind == schema.COLLECTIVE) & (spans.group >= 0) & (spans.seq >= 0) & (spans.op_in_seq == 0)
        )
        rank, group, seq = block.rank()[rows], spans.group[rows], spans.seq[rows]
        example, which = grouped(pack((rank, group)))
        first, last = seq[example], seq[example]
        np.minimum.at(first, which, seq)
        np.maximum.at(last, which, seq)
        numbers: dict[int, dict[int, CollectiveNumbers]] = {member: {} for member in block.ranks}
        columns = (rank[example], group[example], first, last, np.bincount(which, minlength=len(example)))
        for member, number, *counted in zip(*(column.tolist() for column in columns), strict=True):
            numbers[member][number] = CollectiveNumbers(*counted)
        backwards = np.bincount(block.rank()[spans.end < spans.start], minlength=max(block.ranks) + 1)
        return {member: cls(numbers[member], int(backwards[member])) for member in block.ranks}

    def __add__(self, other: RowCounts) -> RowCounts:
        numbers = {
            **other.numbers,
            **{
                group: numbers_of_group.plus(other.numbers.get(group))
                for group, numbers_of_group in self.numbers.items()
            },
        }
        return RowCounts(numbers, self.backwards + other.backwards)


def missing_numbers(run: Run, counts: Mapping[int, RowCounts]) -> int | None:
    """Return the number of missing collectives between the first and the last of each rank and group.

    None if gaps are no loss: steps were left out on purpose, or the run was imported.
    """
    if any(trace.recording or trace.discarded or trace.metadata.is_imported for trace in run.ranks.values()):
        return None
    return sum(
        numbers.last - numbers.first + 1 - numbers.recorded - _on_purpose(run.ranks[rank], group, numbers)
        for rank, counts_of_rank in counts.items()
        for group, numbers in counts_of_rank.numbers.items()
    )


def _on_purpose(trace: RankTrace, group: int, numbers: CollectiveNumbers) -> int:
    end = numbers.last + 1
    return unrecorded(trace.quiet, group, end).among(numbers.first, end) if trace.quiet else 0


def _collectives(trace: RankTrace, arrivals: RankArrivals) -> dict[int, Seen]:
    group, seq = _numbers(trace, schema.COLLECTIVE)
    launched = {number: count for number, count in arrivals.launched.items() if count}
    in_flight: dict[int, set[int]] = {}
    for call in arrivals.in_flight:
        if not call.is_p2p:
            in_flight.setdefault(call.group, set()).add(call.seq)
    seen = {}
    for number in {
        *np.unique(group).tolist(),
        *launched,
        *(group_number for group_number, count in arrivals.arrived.items() if count),
    }:
        recorded = np.sort(seq[group == number])
        under_way = np.array(sorted(in_flight.get(number, ())), np.int64)
        end = max(launched.get(number, 0), int(recorded[-1]) + 1 if len(recorded) else 0)
        known = np.union1d(recorded, under_way)
        has_the_first = not (trace.metadata.is_dump or trace.metadata.is_window)
        begin = 0 if has_the_first or not len(known) else int(known[0])
        on_purpose = [np.arange(*numbers) for numbers in unrecorded(trace.quiet, number, end).collectives]
        accounted_for = np.unique(np.concatenate([known, *on_purpose])).astype(np.int64)
        gaps = _gaps(accounted_for, end, begin)
        seen[number] = Seen(
            rank=trace.rank,
            first=int(recorded[0]) if len(recorded) else None,
            last=int(recorded[-1]) if len(recorded) else None,
            recorded=len(recorded),
            in_flight=len(known) - len(recorded),
            missing=int(end - begin - np.count_nonzero(accounted_for >= begin)),
            ranges=tuple(gaps),
            unwritten=_unwritten(trace, arrivals, arrivals.arrived.get(number, 0) - end),
        )
    return seen


def _unwritten(trace: RankTrace, arrivals: RankArrivals, by_others: int) -> int | None:
    is_complete = trace.closed or arrivals.stalled_ns > 0
    return None if is_complete and by_others <= 0 else max(0, by_others)


def _gaps(known: Int64, end: int, begin: int = 0) -> list[tuple[int, int]]:
    edges = np.concatenate([[begin - 1], known, [end]])
    holes = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[at]) + 1, int(edges[at + 1]) - 1) for at in holes[:_MOST_RANGES]]


def _messages(trace: RankTrace, arrivals: RankArrivals) -> dict[int, Seen]:
    spans = trace.spans
    is_message = (spans.kind == schema.P2P) & (spans.group >= 0)
    if trace.metadata.is_dump:  # which has rows of those in flight, too
        is_message &= ~unfinished_rows(trace)
    rows = np.flatnonzero(is_message)
    launched: dict[int, int] = {}
    under_way: dict[int, int] = {}
    unwritten: dict[int, int] = {}
    for message, count in arrivals.messages.items():
        launched[message.group] = launched.get(message.group, 0) + count
    for message, count in arrivals.sent.items():
        more = max(0, count - arrivals.messages.get(message, 0))
        unwritten[message.group] = unwritten.get(message.group, 0) + more
    for call in arrivals.in_flight:
        if call.is_p2p and call.seq >= 0:
            under_way[call.group] = under_way.get(call.group, 0) + 1
    groups, counts = np.unique(spans.group[rows], return_counts=True)
    recorded = dict(zip(groups.tolist(), counts.tolist(), strict=True))
    # Two messages of a rank to itself, or one from any rank that never ended, have no number of their own.
    return {
        number: Seen(
            rank=trace.rank,
            first=None,
            last=None,
            recorded=recorded.get(number, 0),
            in_flight=under_way.get(number, 0),
            missing=max(
                0,
                launched.get(number, 0)
                - recorded.get(number, 0)
                - under_way.get(number, 0)
                - unrecorded(trace.quiet, number, 0, launched.get(number, 0)).messages,
            ),
            ranges=(),
            unwritten=_unwritten(trace, arrivals, unwritten.get(number, 0)),
        )
        for number in {*recorded, *launched, *unwritten}
    }


def _numbers(trace: RankTrace, kind: int) -> tuple[Int64, Int64]:
    spans = trace.spans
    rows = np.flatnonzero((spans.kind == kind) & (spans.group >= 0) & (spans.seq >= 0))
    if trace.metadata.is_dump:  # which has rows of those in flight, too
        rows = rows[~unfinished_rows(trace)[rows]]
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    _, first = np.unique(pack((spans.group[rows], spans.seq[rows])), return_index=True)
    return spans.group[rows[first]], spans.seq[rows[first]]
