"""Find where communication stopped, the missing ranks, and their own waits.

Stops form a graph: one leads to another if a rank missing in the first is stuck in the second. A rank that is missing
somewhere and stuck nowhere is a root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from commtrace.analysis.hangs.rank_state import DUMPED, ENDED, RUNNING, SILENT, Ending, LastActivity
from commtrace.analysis.matching.arrivals import (
    GroupLabel,
    MessageDirection,
    RankArrivals,
    describe_group,
    known_groups,
)
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.hang_report import InFlight
from commtrace.trace.json_values import JsonObject, fields_to_json
from commtrace.trace.metadata import Group
from commtrace.trace.processes import GONE, SUSPENDED
from commtrace.trace.run import Run

HUNG: Final = "hung"
WAITING: Final = "waiting"
UNEQUAL: Final = "unequal"

SHORTEST_HANG_NS: Final = 2_000_000_000
"""No shorter wait is a hang."""

_TIMES_LONGEST: Final = 3
"""A wait of more than so many times the longest communication that the group has completed is unusual."""

_FIRST_NS: Final = 60_000_000_000
"""Usual time of a group's first communication in a running job: communicators are set up, graphs compiled."""


class MissingRank(NamedTuple):
    """A rank that had not arrived, and the last number that it had launched, if any."""

    rank: int
    last_seq: int | None


class Between(NamedTuple):
    """The two sides of a message; the sender is −1 for any rank."""

    sender: int
    receiver: int
    tag: int


class Elsewhere(NamedTuple):
    """A member of another world, or of an unknown one, by its number in the group; None where nothing is known."""

    number: int
    rank: int | None = None  # in its world
    world: str | None = None  # name of its run
    host: str | None = None
    pid: int | None = None
    launched: int | None = None  # of the communications that the stop counts
    state: str | None = None  # end of its files
    activity: LastActivity | None = None  # at its last write

    def has_arrived(self, seq: int) -> bool | None:
        """Return whether it has come to the communication; None if its files do not tell."""
        return None if self.launched is None else self.launched > seq


@dataclass(frozen=True, slots=True)
class Stop:
    """A communication that did not end."""

    kind: str  # hung; waiting, which may be usual; or unequal: all ranks ended, after different counts
    group: GroupLabel
    group_id: int
    seq: int  # number at which it stopped; of a message, among those of its direction and tag
    operations: Mapping[str, tuple[int, ...]]  # calls of the arrived ranks, ranks by operation
    arrived: tuple[int, ...]
    missing: tuple[MissingRank, ...]
    unknown: tuple[int, ...]  # members without files
    waited_ns: int | None  # longest wait by its rank's last write; None if unknown
    longest_before_ns: int | None  # longest of the group that ended on the arrived; None without any
    message: Between | None = None
    elsewhere: tuple[Elsewhere, ...] = ()  # members of other worlds, in a group over several

    def to_json(self) -> JsonObject:
        parts = fields_to_json(self)
        del parts["group_id"]
        if self.message is None:
            del parts["message"]
        if not self.elsewhere:
            del parts["elsewhere"]
        return parts


def find_stops(run: Run, arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending]) -> list[Stop]:
    """Return every communication that had begun on some rank and not ended, by kind, then the longest wait first."""
    groups = known_groups(run)
    stops = [
        stop
        for number in sorted({number for rank_arrivals in arrivals.values() for number in rank_arrivals.launched})
        if (stop := _collective(run, groups.get(number), number, arrivals, endings)) is not None
    ]
    stops += _messages(run, groups, arrivals, endings)
    order = {HUNG: 0, UNEQUAL: 1, WAITING: 2}
    return sorted(stops, key=lambda stop: (order[stop.kind], -(stop.waited_ns or 0), stop.group_id))


def _collective(
    run: Run,
    group: Group | None,
    number: int,
    arrivals: Mapping[int, RankArrivals],
    endings: Mapping[int, Ending],
) -> Stop | None:
    members = [rank for rank in (_ranks(run, group) if group else arrivals) if rank in arrivals]
    members = members if group else [rank for rank in members if number in arrivals[rank].launched]
    arrived = {rank: arrivals[rank].arrived.get(number, 0) for rank in members}
    waits = _waits(number, members, arrivals)
    if not arrived or (len(members) < 2 and not waits):
        return None
    behind, front = min(arrived.values()), max(arrived.values())
    if front == behind:
        # All known members had arrived: one that some rank has not left has stopped.
        common = min((call.seq for call in waits.values()), default=-1)
        if common < 0 or _went_on(number, common, arrivals):
            return None
        behind = common
    absent = {rank: count - 1 for rank, count in arrived.items() if count <= behind}
    there = tuple(rank for rank, count in arrived.items() if count > behind)
    here = {rank: call for rank, call in waits.items() if call.seq == behind and rank in there}
    # Unrecorded steps show nothing in flight, but their numbers have stopped.
    unrecorded = [arrivals[rank].stalled_ns for rank in there if run.ranks[rank].recording]
    waited = max(
        (arrivals[rank].age_ns(call) for rank, call in here.items()), default=max(unrecorded, default=0) or None
    )
    longest = max((arrivals[rank].longest_ns.get(number, -1) for rank in there), default=-1)
    kind = _kind(run, there, absent, waited, longest, endings)
    if kind is None:
        return None
    operations: dict[str, list[int]] = defaultdict(list)
    for rank, call in here.items():
        operations[call.operation].append(rank)
    return Stop(
        kind=kind,
        group=describe_group(group, number),
        group_id=number,
        seq=behind,
        operations={operation: tuple(ranks) for operation, ranks in operations.items()},
        arrived=there,
        missing=_missing(absent),
        unknown=tuple(rank for rank in (group.ranks if group else ()) if rank not in arrivals),
        waited_ns=waited,
        longest_before_ns=longest if longest >= 0 else None,
    )


def _ranks(run: Run, group: Group) -> Sequence[int]:
    """Return the members of a group in this world."""
    if group.ranks:
        return group.ranks
    return [rank for rank, trace in run.ranks.items() if group.id in trace.groups]


def _missing(absent: Mapping[int, int]) -> tuple[MissingRank, ...]:
    return tuple(MissingRank(rank, last if last >= 0 else None) for rank, last in absent.items())


def _waits(number: int, members: Sequence[int], arrivals: Mapping[int, RankArrivals]) -> dict[int, InFlight]:
    waits = {}
    for rank in members:
        calls = [call for call in arrivals[rank].in_flight if call.group == number and not call.is_p2p]
        if calls:
            waits[rank] = min(calls, key=lambda call: call.seq)
    return waits


def _went_on(number: int, seq: int, arrivals: Mapping[int, RankArrivals]) -> bool:
    """Return whether later ones of the group have ended: then this one has too, only its end was never asked for."""
    return any(rank_arrivals.ended.get(number, 0) > seq + 1 for rank_arrivals in arrivals.values())


def _kind(
    run: Run,
    there: Sequence[int],
    absent: Mapping[int, int],
    waited: int | None,
    longest: int,
    endings: Mapping[int, Ending],
) -> str | None:
    """Return the kind of a stop; None where nothing is wrong."""
    states = {rank: endings[rank].state for rank in (*there, *absent)}
    if DUMPED in states.values():
        # A dump is written in a hang, and does not say when: what its rank had waited for by then is not known.
        return None if waited is None else HUNG
    if all(state == ENDED for state in states.values()):
        return UNEQUAL if absent and _counts_are_sure(run, states) else None
    if waited is None:
        # The ranks ahead wrote later, or their wait was not recorded: that alone is no hang.
        gone = any(states[rank] in (ENDED, SILENT) for rank in absent)
        return WAITING if gone else None
    if any(states[rank] == SILENT and endings[rank].process in (SUSPENDED, GONE) for rank in absent):
        return HUNG if waited >= SHORTEST_HANG_NS else WAITING  # the awaited rank will not come
    running = any(state == RUNNING for state in states.values())
    least = max(SHORTEST_HANG_NS, _TIMES_LONGEST * longest)
    if running and longest < 0:
        least = max(least, _FIRST_NS)
    return HUNG if waited >= least else WAITING if waited >= SHORTEST_HANG_NS else None


def _counts_are_sure(run: Run, ranks: Mapping[int, str]) -> bool:
    """Return whether every row was to be written and none was lost."""
    traces = [run.ranks[rank] for rank in ranks]
    return all(trace.closed and not (trace.dropped or trace.recording or trace.discarded) for trace in traces)


def _messages(
    run: Run,
    groups: Mapping[int, Group],
    arrivals: Mapping[int, RankArrivals],
    endings: Mapping[int, Ending],
) -> list[Stop]:
    sides: dict[tuple[int, int, int, int, int], dict[int, InFlight]] = defaultdict(dict)
    for rank, rank_arrivals in arrivals.items():
        for call in rank_arrivals.in_flight:
            if call.is_p2p:
                sender, receiver = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
                sides[sender, receiver, call.group, call.tag, call.number if call.seq >= 0 else -1][rank] = call
    stops = []
    for (sender, receiver, number, tag, seq), waits in sides.items():
        absent = {
            rank: last for rank in (sender, receiver) if (last := _last(rank, waits, arrivals, sender)) is not None
        }
        absent = {rank: last for rank, last in absent.items() if last < seq}
        waited = max(arrivals[rank].age_ns(call) for rank, call in waits.items())
        there = tuple(waits)
        longest = max((arrivals[rank].longest_message_ns.get(number, -1) for rank in there), default=-1)
        known = {rank: last for rank, last in absent.items() if rank in arrivals}
        kind = _kind(run, there, known, waited, longest, endings)
        if kind is None or kind == UNEQUAL:
            continue
        operations: dict[str, list[int]] = defaultdict(list)
        for rank, call in waits.items():
            operations[call.operation].append(rank)
        stops.append(
            Stop(
                kind=kind,
                group=describe_group(groups.get(number), number),
                group_id=number,
                seq=seq,
                operations={operation: tuple(ranks) for operation, ranks in operations.items()},
                arrived=there,
                missing=_missing(known),
                unknown=tuple(rank for rank in (sender, receiver) if 0 <= rank < OUTSIDE and rank not in arrivals),
                waited_ns=waited,
                longest_before_ns=longest if longest >= 0 else None,
                message=Between(sender, receiver, tag),
            )
        )
    return stops


def _last(rank: int, waits: Mapping[int, InFlight], arrivals: Mapping[int, RankArrivals], sender: int) -> int | None:
    """Return the number of the last message that the other side had launched; None if it waits, or is any rank."""
    if rank in waits or rank < 0 or rank not in arrivals:
        return None
    call = next(iter(waits.values()))
    (waiter,) = waits
    message = MessageDirection(call.group, rank == sender, waiter, call.tag)
    return max(arrivals[rank].messages.get(message, 0), arrivals[rank].sent.get(message, 0)) - 1


@dataclass(frozen=True, slots=True)
class StopLink:
    """Ranks that are missing in one communication because they are stuck in another."""

    ranks: tuple[int, ...]
    waits_at_stop: int | None  # position among the stops; None at the end of the chain
    is_certain: bool  # training is known to stall on it


class Root(NamedTuple):
    """A rank that waits for none, and the number of ranks that it holds up, also through others."""

    rank: int
    ranks_held_up: int


@dataclass(frozen=True, slots=True)
class Chains:
    """The graph of waits."""

    links: Mapping[int, tuple[StopLink, ...]]  # by position of a stop, the reasons of its missing ranks
    roots: tuple[Root, ...]  # those that hold up most first
    cycles: tuple[tuple[int, ...], ...]  # stops that wait for each other in a circle: a deadlock


def find_chains(stops: Sequence[Stop], arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending]) -> Chains:
    """Follow every stop to its roots."""
    stuck = _stuck_in(stops, arrivals, endings)
    links = {position: _links(stop, stuck) for position, stop in enumerate(stops)}
    cycles = _cycles(links)
    in_cycle = {position for cycle in cycles for position in cycle}
    held: dict[int, set[int]] = {}
    for position in range(len(stops)):
        for rank in _roots(position, links, in_cycle):
            held.setdefault(rank, set()).update(stops[position].arrived)
    roots = [Root(rank, len(ranks)) for rank, ranks in held.items()]
    return Chains(links, tuple(sorted(roots, key=lambda root: (-root.ranks_held_up, root.rank))), cycles)


def _stuck_in(
    stops: Sequence[Stop], arrivals: Mapping[int, RankArrivals], endings: Mapping[int, Ending]
) -> dict[int, tuple[int, bool]]:
    """Return, by rank, the position of its stop, and whether training surely stalls on it."""
    by_wait = {}
    for position, stop in enumerate(stops):
        for rank in stop.arrived:
            by_wait[rank, stop.group_id, stop.seq, stop.message is not None] = position
    stuck = {}
    for rank, rank_arrivals in arrivals.items():
        if endings[rank].state in (ENDED, SILENT):
            continue  # A rank that ended or fell silent waits for nothing any more.
        for call in rank_arrivals.in_flight:  # The one that blocks training comes first.
            seq = call.number if call.is_p2p and call.seq >= 0 else call.seq
            known = by_wait.get((rank, call.group, seq, call.is_p2p))
            waits = rank_arrivals.age_ns(call) >= SHORTEST_HANG_NS or endings[rank].state == DUMPED
            if known is not None and waits and rank not in stuck:
                stuck[rank] = (known, bool(call.blocking))
    return stuck


def _links(stop: Stop, stuck: Mapping[int, tuple[int, bool]]) -> tuple[StopLink, ...]:
    by_reason: dict[tuple[int | None, bool], list[int]] = {}
    for rank in (*(missing_rank.rank for missing_rank in stop.missing), *stop.unknown):
        by_reason.setdefault(stuck.get(rank, (None, True)), []).append(rank)
    return tuple(StopLink(tuple(ranks), position, is_certain) for (position, is_certain), ranks in by_reason.items())


def _cycles(links: Mapping[int, Sequence[StopLink]]) -> tuple[tuple[int, ...], ...]:
    """Return circles of certain links: a rank that only perhaps waits may be busy."""
    state: dict[int, int] = {}
    cycles = []
    for begin in links:
        path: list[int] = []
        stack = [(begin, iter(_next(links[begin])))]
        if begin in state:
            continue
        state[begin] = 1
        path.append(begin)
        while stack:
            position, following = stack[-1]
            after = next(following, None)
            if after is None:
                state[position] = 2
                stack.pop()
                path.pop()
            elif state.get(after) == 1:
                cycles.append(tuple(path[path.index(after) :]))
            elif after not in state:
                state[after] = 1
                path.append(after)
                stack.append((after, iter(_next(links[after]))))
    return tuple(cycles)


def _next(links: Sequence[StopLink]) -> list[int]:
    return [link.waits_at_stop for link in links if link.waits_at_stop is not None and link.is_certain]


def _roots(begin: int, links: Mapping[int, Sequence[StopLink]], in_cycle: set[int]) -> set[int]:
    """Return the ranks at the ends of all chains from a stop on."""
    roots: set[int] = set()
    seen = {begin}
    waiting = [begin]
    while waiting:
        position = waiting.pop()
        for link in links[position]:
            if link.waits_at_stop is None:
                roots.update(link.ranks)
            elif link.waits_at_stop not in seen:
                seen.add(link.waits_at_stop)
                waiting.append(link.waits_at_stop)
            elif not link.is_certain and link.waits_at_stop not in in_cycle:
                roots.update(link.ranks)
    return roots
