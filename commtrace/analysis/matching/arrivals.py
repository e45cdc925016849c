"""The arrivals of each rank in each of its groups, from its rows, calls in flight and reports, and from other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from commtrace.analysis.keys import pack
from commtrace.analysis.matching.operations import SYNCHRONISING, named, unfinished_rows
from commtrace.findings.formatting import format_ranks
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.hang_report import TAG_SHIFT, InFlight
from commtrace.trace.metadata import UNKNOWN_ROLE, Group
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool

SCHEDULED: Final = "scheduled"

SOME_COLLECTIVE: Final = "a collective"
"""The operation of a call of a step of which nothing is recorded."""


class MessageDirection(NamedTuple):
    """A direction of point-to-point communication as one of its sides counts it."""

    group: int
    is_send: bool
    peer: int
    tag: int


@dataclass(frozen=True, slots=True)
class RankArrivals:
    """The arrivals of one rank, by group or message direction.

    The longest exclude the first, which waits for all to have started, unless there is no other.
    """

    launched: Mapping[int, int] = field(default_factory=dict)  # number of collectives
    arrived: Mapping[int, int] = field(default_factory=dict)  # begun by the device, or completed by others
    ended: Mapping[int, int] = field(default_factory=dict)  # one more than the highest number known to have ended
    longest_ns: Mapping[int, int] = field(default_factory=dict)  # ended collectives
    longest_message_ns: Mapping[int, int] = field(default_factory=dict)  # ended messages
    messages: Mapping[MessageDirection, int] = field(default_factory=dict)  # number launched, by its own report
    sent: Mapping[MessageDirection, int] = field(default_factory=dict)  # number received; empty if it ended cleanly
    in_flight: tuple[InFlight, ...] = ()  # at its last write; the one that blocks training first
    last_written_ns: int | None = None
    stalled_ns: int = 0  # time without a record or launch before its last write; 0 if unknown

    def age_ns(self, call: InFlight) -> int:
        """Return how long a communication had been in flight at the rank's last write; 0 if unknown."""
        if self.last_written_ns is None or not call.start:
            return 0
        return max(0, self.last_written_ns - call.start)


def find_arrivals(run: Run) -> dict[int, RankArrivals]:
    """Return the arrivals of each rank."""
    send = run.name_code("send")
    reports = {rank: _of_rank(trace, send) for rank, trace in run.ranks.items()}
    least: dict[int, int] = {}
    for rank, arrivals in reports.items():
        for group, count in _joined_by_all(run, run.ranks[rank], arrivals).items():
            least[group] = max(least.get(group, 0), count)
    groups = known_groups(run)
    for rank, calls in _unrecorded_waits(run, reports, groups).items():
        reports[rank] = replace(reports[rank], in_flight=(*reports[rank].in_flight, *calls))
    sent = _sent_by(run, send)
    # A rank that ended cleanly has reported everything.
    return {
        rank: arrivals
        if run.ranks[rank].closed
        else replace(
            arrivals,
            arrived=_at_least(arrivals.arrived, rank, least, groups),
            sent=sent.get(rank, {}),
        )
        for rank, arrivals in reports.items()
    }


def _unrecorded_waits(
    run: Run, reports: Mapping[int, RankArrivals], groups: Mapping[int, Group]
) -> dict[int, list[InFlight]]:
    """Return what ranks must be waiting for that stopped in a step of which nothing is recorded.

    Their counts go on: who has launched a collective, or asked for a message, waits for those who have not.
    """
    waits: dict[int, list[InFlight]] = {}
    for rank, arrivals in reports.items():
        if not arrivals.stalled_ns or arrivals.last_written_ns is None or not run.ranks[rank].leaves_out_steps:
            continue
        start = arrivals.last_written_ns - arrivals.stalled_ns
        known = {call.group for call in arrivals.in_flight}
        calls = []
        for group, count in arrivals.launched.items():
            members = [member for member in (groups[group].ranks if group in groups else ()) if member in reports]
            least = min((reports[member].launched.get(group, 0) for member in members), default=count)
            if least < count and group not in known:
                calls.append(InFlight(SOME_COLLECTIVE, group, least, start=start))
        for message, count in arrivals.messages.items():
            sender = reports.get(message.peer)
            if message.is_send or sender is None or message.group in known:
                continue
            sent = sender.messages.get(MessageDirection(message.group, True, rank, message.tag), 0)
            if sent < count:
                seq = (message.tag << TAG_SHIFT) + sent
                calls.append(InFlight("recv", message.group, seq, message.peer, start=start))
        if calls:
            waits[rank] = calls
    return waits


def _collectives(trace: RankTrace) -> Bool:
    """Mark the collectives that are known to have ended."""
    spans = trace.spans
    rows = (spans.kind == schema.COLLECTIVE) & (spans.group >= 0)
    return np.asarray(rows & ~unfinished_rows(trace) if trace.metadata.is_dump else rows)


def _sent_by(run: Run, send: int) -> dict[int, dict[MessageDirection, int]]:
    sent: dict[int, dict[MessageDirection, int]] = {}
    for rank, trace in run.ranks.items():
        for message, count in _messages(trace, send).items():
            if not message.is_send and message.peer >= 0:
                sent.setdefault(message.peer, {})[message._replace(is_send=True, peer=rank)] = count
    return sent


def _joined_by_all(run: Run, trace: RankTrace, arrivals: RankArrivals) -> dict[int, int]:
    """Return, by group, the number of collectives that every member has joined, as this rank left a later one."""
    spans = trace.spans
    rows = np.flatnonzero(_collectives(trace) & named(run, spans, SYNCHRONISING))
    joined: dict[int, int] = {}
    for group in np.unique(spans.group[rows]).tolist():
        seqs = spans.seq[rows[spans.group[rows] == group]]
        # The wait for the last one that it launched may have ended with an error.
        ended = seqs[seqs < arrivals.launched[group] - 1]
        if len(ended):
            joined[group] = int(ended.max()) + 1
    return joined


def _at_least(
    arrived: Mapping[int, int], rank: int, least: Mapping[int, int], groups: Mapping[int, Group]
) -> dict[int, int]:
    joined_by_all = {group: count for group, count in least.items() if group in groups and rank in groups[group].ranks}
    return {group: max(arrived.get(group, 0), joined_by_all.get(group, 0)) for group in (*arrived, *joined_by_all)}


def known_groups(run: Run) -> dict[int, Group]:
    """Return the groups of all ranks; of one over several worlds, what any of its members knows of the others."""
    groups: dict[int, Group] = {}
    for trace in run.ranks.values():
        for number, group in trace.groups.items():
            before = groups.get(number)
            if before is not None and len(before.members) == len(group.members) > 0:
                members = tuple(
                    known or known_before for known, known_before in zip(group.members, before.members, strict=True)
                )
                group = structs.replace(group, members=members, key=group.key or before.key)
            groups[number] = group
    return groups


def _of_rank(trace: RankTrace, send: int) -> RankArrivals:
    ended, longest = _ended(trace)
    messages = _messages(trace, send)
    in_flight = () if trace.closed else tuple(sorted(open_communications(trace), key=lambda call: not call.blocking))
    launched = dict(ended)
    if trace.activity is not None:
        for group, count in trace.activity.collectives.items():
            launched[int(group)] = max(launched.get(int(group), 0), count)
        for number, is_send, peer, tag, count in trace.activity.p2p:
            message = MessageDirection(number, is_send, peer, tag)
            messages[message] = max(messages.get(message, 0), count)
    arrived: dict[int, int] = {}
    for call in in_flight:
        if call.is_p2p:
            message = MessageDirection(call.group, call.operation == "send", call.peer, call.tag)
            messages[message] = max(messages.get(message, 0), call.number + 1)
            continue
        launched[call.group] = max(launched.get(call.group, 0), call.seq + 1)
        if call.state == SCHEDULED:
            arrived[call.group] = min(arrived.get(call.group, call.seq), call.seq)
    return RankArrivals(
        launched=launched,
        arrived={**launched, **arrived},
        ended=ended,
        longest_ns=longest,
        longest_message_ns=_longest_messages(trace),
        messages=messages,
        in_flight=in_flight,
        last_written_ns=trace.last_written_ns,
        stalled_ns=_stalled_ns(trace),
    )


def _stalled_ns(trace: RankTrace) -> int:
    if trace.closed or not reports_activity(trace):
        return 0
    since = (trace.last_written_ns or 0) - (trace.activity_ns or 0)
    return trace.no_progress_ns + max(0, since)


def reports_activity(trace: RankTrace) -> bool:
    """Return whether training recorded nothing since the rank reported its activity, so that the report still holds.

    Collections of garbage do not count: other threads make them while training hangs.
    """
    if trace.activity_ns is None or trace.activity is None:
        return False
    ends = trace.spans.end[trace.spans.kind != schema.GC]
    return not len(ends) or trace.activity_ns >= int(ends.max())


def _ended(trace: RankTrace) -> tuple[dict[int, int], dict[int, int]]:
    spans = trace.spans
    rows = np.flatnonzero(_collectives(trace))
    if not len(rows):
        return {}, {}
    groups, which = np.unique(spans.group[rows], return_inverse=True)
    last, longest = np.full((2, len(groups)), -1, np.int64)
    np.maximum.at(last, which.reshape(-1), spans.seq[rows])
    took = spans.end[rows] - spans.start[rows]
    only_first = last[which.reshape(-1)] == 0
    np.maximum.at(longest, which.reshape(-1), np.where((spans.seq[rows] > 0) | only_first, took, -1))
    keys = groups.tolist()
    return dict(zip(keys, (last + 1).tolist(), strict=True)), dict(zip(keys, longest.tolist(), strict=True))


def _messages(trace: RankTrace, send: int) -> dict[MessageDirection, int]:
    spans = trace.spans
    rows = np.flatnonzero((spans.kind == schema.P2P) & (spans.group >= 0) & (spans.seq >= 0))
    if not len(rows):
        return {}
    is_send, tag = spans.name[rows] == send, spans.seq[rows] >> TAG_SHIFT
    key = pack((spans.group[rows], is_send.astype(np.int64), spans.peer[rows], tag))
    _, example, which = np.unique(key, return_index=True, return_inverse=True)
    last = np.full(len(example), -1, np.int64)
    np.maximum.at(last, which.reshape(-1), spans.seq[rows] & ((1 << TAG_SHIFT) - 1))
    columns = (spans.group[rows[example]], is_send[example], spans.peer[rows[example]], tag[example])
    directions = zip(*(column.tolist() for column in columns), strict=True)
    return {MessageDirection(*each): count for each, count in zip(directions, (last + 1).tolist(), strict=True)}


def _longest_messages(trace: RankTrace) -> dict[int, int]:
    spans = trace.spans
    rows = np.flatnonzero((spans.kind == schema.P2P) & (spans.group >= 0) & (spans.seq >= 0))
    took, is_first = spans.end[rows] - spans.start[rows], spans.seq[rows] & ((1 << TAG_SHIFT) - 1) == 0
    longest = {}
    for group in np.unique(spans.group[rows]).tolist():
        in_group = spans.group[rows] == group
        later = in_group & ~is_first
        longest[group] = int(took[later if later.any() else in_group].max())
    return longest


def open_communications(trace: RankTrace) -> Iterable[InFlight]:
    """Yield what a rank had launched and what had not ended when it last wrote."""
    spans = trace.spans
    is_dump = trace.metadata.is_dump  # which has rows of all operations
    for call in trace.in_flight:
        if (
            not is_dump
            and call.seq >= 0
            and ((spans.group == call.group) & (spans.seq == call.seq) & (spans.peer == call.peer)).any()
        ):
            continue  # It ended just before the rank's last write.
        yield call


class LabelledMember(NamedTuple):
    """A member of a group over several worlds."""

    world: str | None  # name of its run; empty for this world, None if unknown
    rank: int | None  # in its world


class GroupLabel(NamedTuple):
    """A process group as results name it."""

    id: str  # a string, because many readers of JSON lose numbers above 2⁵³
    role: str
    ranks: tuple[int, ...]  # empty if unknown
    name: str  # torch's
    members: tuple[LabelledMember, ...] = ()  # of a group over several worlds, by rank in the group

    @property
    def words(self) -> str:
        """Return its members: ``ranks 0–3``, ``rank 0 and ranks 0–1 of world rollout``; empty if nothing is known."""
        if not self.members:
            return format_ranks(self.ranks) if self.ranks else ""
        ranks: dict[str, list[int]] = {}
        for member in self.members:
            if member.rank is not None and member.world is not None:
                ranks.setdefault(member.world, []).append(member.rank)
        words = [
            format_ranks(ranks_of_world) + (f" of world {world}" if world else "")
            for world, ranks_of_world in sorted(ranks.items())
        ]
        unknown = sum(member.rank is None for member in self.members)
        if unknown:
            words.append(f"{unknown} member{'s' * (unknown != 1)} of unknown worlds")
        return " and ".join(words)

    def rank_words(self, rank: int) -> str:
        """Return ``rank 3``, of a peer in another world ``rank 3 of world rollout``."""
        number = rank - OUTSIDE
        if number < 0:
            return f"rank {rank}"
        member = self.members[number] if number < len(self.members) else None
        if member is None or member.rank is None:
            return f"member {number} of an unknown world"
        return f"rank {member.rank}" + (f" of world {member.world}" if member.world else "")


def describe_group(group: Group | None, number: int) -> GroupLabel:
    """Return the label of a group; of an unknown one, with its number alone."""
    if group is None:
        return GroupLabel(str(number), UNKNOWN_ROLE, (), "")
    members = tuple(
        LabelledMember(None, None)
        if member is None
        else LabelledMember("" if member.world == group.world else member.run_id, member.rank)
        for member in group.members
    )
    return GroupLabel(str(group.id), group.role, tuple(group.ranks), group.name, members)
