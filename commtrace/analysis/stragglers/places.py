"""Group slow ranks, of recorded runs and running jobs, by host, by tensor-parallel group, or only by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from commtrace.analysis.stragglers.limits import SHARE_OF_HOST
from commtrace.analysis.stragglers.microbatches import SEQUENCES
from commtrace.analysis.stragglers.strikes import not_by_chance
from commtrace.findings.causes import HOST, RANKS, TENSOR_GROUP
from commtrace.findings.formatting import format_ranks
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool

_MOST_HOSTS: Final = 3


class RankPlace(NamedTuple):
    """The place of a rank."""

    host: str
    tensor_group: str  # equal for the ranks of one tensor-parallel group; empty without one


class SlowMember(Protocol):
    """A rank that does something too long."""

    @property
    def rank(self) -> int: ...

    @property
    def cause(self) -> str: ...

    @property
    def beyond(self) -> str:
        """Return what it stands out in; ranks that stand out in different things are not grouped."""


_Slow = TypeVar("_Slow", bound=SlowMember)


def places_of(run: Run) -> dict[int, RankPlace]:
    return {
        rank: RankPlace(trace.metadata.node, tensor_group_of(trace.coordinates, trace.parallel))
        for rank, trace in run.ranks.items()
    }


def tensor_group_of(coordinates: Mapping[str, int], parallel: Mapping[str, int]) -> str:
    """Return a name that is equal for ranks of one tensor-parallel group; empty without tensor parallelism."""
    if parallel.get("tp", 1) < 2:
        return ""
    positions = (f"{name} {at}" for name, at in sorted(coordinates.items()) if name not in ("tp", "ep"))
    return ", ".join(positions) or "all ranks"


@dataclass(frozen=True, slots=True)
class PlacedRanks(Generic[_Slow]):
    """Slow ranks that share a place."""

    place: str  # HOST, TENSOR_GROUP, or RANKS that share only a cause
    what: str  # of a host or a group, what its ranks stand out in; else their cause
    members: list[_Slow]


def group_by_place(places: Mapping[int, RankPlace], slow: Iterable[_Slow]) -> list[PlacedRanks[_Slow]]:
    """Group slow ranks by host, then by tensor-parallel group, then by cause. No host or group is all of the job."""
    placed: list[PlacedRanks[_Slow]] = []
    left: list[_Slow] = []
    by_what: dict[str, list[_Slow]] = {}
    for slow_rank in slow:
        if slow_rank.cause == SEQUENCES:  # what the ranks of a replica share is their input, wherever they are
            left.append(slow_rank)
        else:
            by_what.setdefault(slow_rank.beyond, []).append(slow_rank)
    for beyond, standing_out in by_what.items():
        whole, elsewhere = _whole_places(places, standing_out)
        placed += [PlacedRanks(place, beyond, members) for place, members in whole]
        left += elsewhere
    causes: dict[tuple[str, str], list[_Slow]] = {}
    for slow_rank in left:
        causes.setdefault((slow_rank.cause, slow_rank.beyond), []).append(slow_rank)
    return [*placed, *(PlacedRanks(RANKS, cause, members) for (cause, _), members in causes.items())]


def _whole_places(
    places: Mapping[int, RankPlace], slow: Sequence[_Slow]
) -> tuple[list[tuple[str, list[_Slow]]], list[_Slow]]:
    whole_places: list[tuple[str, list[_Slow]]] = []
    left = list(slow)
    for place, share in ((HOST, SHARE_OF_HOST), (TENSOR_GROUP, 1.0)):
        place_of = attrgetter(place)
        sizes = Counter(place_of(rank_place) for rank_place in places.values())
        at_place: dict[str, list[_Slow]] = {}
        for slow_rank in left:
            at_place.setdefault(place_of(places[slow_rank.rank]), []).append(slow_rank)
        whole = {
            name
            for name, members in at_place.items()
            if name and sizes[name] < len(places) and len(members) >= max(2.0, share * sizes[name])
        }
        whole_places += [(place, members) for name, members in at_place.items() if name in whole]
        left = [slow_rank for slow_rank in left if place_of(places[slow_rank.rank]) not in whole]
    return whole_places, left


class _StruckRank(NamedTuple):
    """A rank that something strikes in a step."""

    rank: int
    cause: str = ""
    beyond: str = ""


def ranks_struck(places: Mapping[int, RankPlace], ranks: Sequence[int], is_struck: Bool) -> set[int]:
    """Return the ranks that are struck in some steps, with all of their host or tensor-parallel group or alone.

    Args:
        is_struck: Shape (ranks, steps).
    """
    struck: dict[str, dict[tuple[int, ...], set[int]]] = {place: {} for place in (HOST, TENSOR_GROUP, RANKS)}
    for step in np.flatnonzero(is_struck.any(axis=0)).tolist():
        for placed in group_by_place(
            places, (_StruckRank(ranks[row]) for row in np.flatnonzero(is_struck[:, step]).tolist())
        ):
            together = tuple(sorted(member.rank for member in placed.members))
            for subject in [(rank,) for rank in together] if placed.place == RANKS else [together]:
                struck[placed.place].setdefault(subject, set()).add(step)
    number = {
        HOST: len({place.host for place in places.values()}),
        TENSOR_GROUP: len({place.tensor_group for place in places.values()}),
        RANKS: len(ranks),
    }
    return {
        rank
        for place, steps in struck.items()
        for subject in not_by_chance(steps, number[place], is_struck.shape[1])
        for rank in subject
    }


def format_place(places: Mapping[int, RankPlace], place: str, ranks: Sequence[int]) -> str:
    """Return the name of a set of slow ranks: ``ranks 1, 3 on node0``, ``host node1 (ranks 4–7)``."""
    if place == HOST:
        return f"host {places[ranks[0]].host} ({format_ranks(ranks)})"
    on_hosts = _on_hosts(places, ranks)
    return f"tensor-parallel group of {on_hosts}" if place == TENSOR_GROUP else on_hosts


def _on_hosts(places: Mapping[int, RankPlace], ranks: Sequence[int]) -> str:
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(places[rank].host, []).append(rank)
    if len(hosts) > _MOST_HOSTS:
        return f"{format_ranks(ranks)} on {len(hosts)} hosts"
    return ", ".join(f"{format_ranks(ranks_there)} on {host}" for host, ranks_there in hosts.items())
