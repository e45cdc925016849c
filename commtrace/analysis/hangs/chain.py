"""Why a rank is missing: it waits itself, for somebody who waits …, down to who waits for nobody.

Nodes are communications that somebody is stuck in; one leads to another where a rank that is missing in the first is
stuck in the second. A rank that is missing somewhere and stuck nowhere is a root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commtrace.analysis.hangs.rank_state import ENDED, SILENT, Ending
from commtrace.analysis.hangs.stops import SHORTEST_HANG_NS, Stop
from commtrace.analysis.matching.arrivals import RankArrivals


@dataclass(frozen=True, slots=True)
class Link:
    """One sentence of a chain: these ranks are missing in one communication because they are stuck in another.

    Attributes:
        ranks: the ranks.
        stuck_in_stop: position, among the stops, of what they are stuck in; None where the chain ends with them.
        sure: training is known to stand still for it.
    """

    ranks: tuple[int, ...]
    stuck_in_stop: int | None
    sure: bool


class Root(NamedTuple):
    """A rank that others wait for and that waits for nobody; how many ranks it holds up, through others too."""

    rank: int
    ranks_held_up: int


@dataclass(frozen=True, slots=True)
class Chains:
    """Who waits for whom.

    Attributes:
        links: by position of a stop, what keeps its missing ranks away.
        roots: ranks that others wait for and that wait for nobody, those that hold up most first.
        cycles: stops that wait for each other in a circle, in that order: a deadlock.
    """

    links: Mapping[int, tuple[Link, ...]]
    roots: tuple[Root, ...]
    cycles: tuple[tuple[int, ...], ...]


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
    """By rank: position of the stop that it is stuck in, and whether that is sure."""
    by_wait = {}
    for position, stop in enumerate(stops):
        for rank in stop.arrived:
            by_wait[rank, stop.group_id, stop.seq, stop.message is not None] = position
    stuck = {}
    for rank, own in arrivals.items():
        if endings[rank].state in (ENDED, SILENT):
            continue  # Whatever it waited for when it wrote its last word, it does no more.
        for one in own.in_flight:  # What blocks training comes first.
            seq = one.number if one.is_p2p and one.seq >= 0 else one.seq
            found = by_wait.get((rank, one.group, seq, one.is_p2p))
            if found is not None and one.age_ns >= SHORTEST_HANG_NS and rank not in stuck:
                stuck[rank] = (found, bool(one.blocking))
    return stuck


def _links(stop: Stop, stuck: Mapping[int, tuple[int, bool]]) -> tuple[Link, ...]:
    by_reason: dict[tuple[int | None, bool], list[int]] = {}
    for rank in (*(one.rank for one in stop.missing), *stop.unknown):
        by_reason.setdefault(stuck.get(rank, (None, True)), []).append(rank)
    return tuple(Link(tuple(ranks), position, sure) for (position, sure), ranks in by_reason.items())


def _cycles(links: Mapping[int, Sequence[Link]]) -> tuple[tuple[int, ...], ...]:
    """Circles of links that are sure: whoever only perhaps waits may be busy with something else."""
    state: dict[int, int] = {}
    found = []
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
                found.append(tuple(path[path.index(after) :]))
            elif after not in state:
                state[after] = 1
                path.append(after)
                stack.append((after, iter(_next(links[after]))))
    return tuple(found)


def _next(links: Sequence[Link]) -> list[int]:
    return [link.stuck_in_stop for link in links if link.stuck_in_stop is not None and link.sure]


def _roots(begin: int, links: Mapping[int, Sequence[Link]], in_cycle: set[int]) -> set[int]:
    """Ranks at the ends of all chains from a stop on. A circle through a wait that is not sure ends there."""
    roots: set[int] = set()
    seen = {begin}
    waiting = [begin]
    while waiting:
        position = waiting.pop()
        for link in links[position]:
            if link.stuck_in_stop is None:
                roots.update(link.ranks)
            elif link.stuck_in_stop not in seen:
                seen.add(link.stuck_in_stop)
                waiting.append(link.stuck_in_stop)
            elif not link.sure and link.stuck_in_stop not in in_cycle:
                roots.update(link.ranks)
    return roots
