"""Group slow ranks, of recorded runs and running jobs, by host, by tensor-parallel group, or only by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from commtrace.analysis.rank_words import range_in_words, ranks_in_words
from commtrace.analysis.stragglers.limits import SHARE_OF_HOST
from commtrace.analysis.stragglers.microbatches import SEQUENCES
from commtrace.analysis.stragglers.normal import BASELINE, FASTEST, PAST
from commtrace.analysis.stragglers.verdict import ACTIVITY, HOST, RANKS, TENSOR_GROUP, cause_in_words
from commtrace.trace.run import Run

_MOST_HOSTS: Final = 3
_COMPARED_WITH: Final = {
    PAST: "the ranks that do the same work and are as fast as before",
    BASELINE: "the ranks that do the same work and are as fast as in the baseline",
    FASTEST: "the fastest ranks that do the same work",
}


class Place(NamedTuple):
    """The place of a rank."""

    host: str
    tensor_group: str  # equal for the ranks of one tensor-parallel group; empty without one


class SlowOne(Protocol):
    """A rank that does something too long."""

    @property
    def rank(self) -> int: ...

    @property
    def cause(self) -> str: ...

    @property
    def beyond(self) -> str:
        """Return what it stands out in; ranks that stand out in different things are not grouped."""


_Slow = TypeVar("_Slow", bound=SlowOne)


def places_of(run: Run) -> dict[int, Place]:
    return {
        rank: Place(trace.metadata.node, tensor_group_of(trace.coordinates, trace.parallel))
        for rank, trace in run.ranks.items()
    }


def tensor_group_of(coordinates: Mapping[str, int], parallel: Mapping[str, int]) -> str:
    """Return a name that is equal for ranks of one tensor-parallel group; empty without tensor parallelism."""
    if parallel.get("tp", 1) < 2:
        return ""
    own = (f"{name} {at}" for name, at in sorted(coordinates.items()) if name not in ("tp", "ep"))
    return ", ".join(own) or "all ranks"


@dataclass(frozen=True, slots=True)
class Together(Generic[_Slow]):
    """Slow ranks that share a place."""

    place: str  # HOST, TENSOR_GROUP, or RANKS that share only a cause
    what: str  # of a host or a group, what its ranks stand out in; else their cause
    members: list[_Slow]


def by_common_place(places: Mapping[int, Place], slow: Iterable[_Slow]) -> list[Together[_Slow]]:
    """Group slow ranks by host, then by tensor-parallel group, then by cause. No host or group is all of the job."""
    found: list[Together[_Slow]] = []
    left: list[_Slow] = []
    by_what: dict[str, list[_Slow]] = {}
    for one in slow:
        if one.cause == SEQUENCES:  # what the ranks of a replica share is their input, wherever they are
            left.append(one)
        else:
            by_what.setdefault(one.beyond, []).append(one)
    for beyond, standing_out in by_what.items():
        whole, others = _whole_places(places, standing_out)
        found += [Together(place, beyond, members) for place, members in whole]
        left += others
    causes: dict[tuple[str, str], list[_Slow]] = {}
    for one in left:
        causes.setdefault((one.cause, one.beyond), []).append(one)
    return [*found, *(Together(RANKS, cause, members) for (cause, _), members in causes.items())]


def _whole_places(
    places: Mapping[int, Place], slow: Sequence[_Slow]
) -> tuple[list[tuple[str, list[_Slow]]], list[_Slow]]:
    found: list[tuple[str, list[_Slow]]] = []
    left = list(slow)
    for place, share in ((HOST, SHARE_OF_HOST), (TENSOR_GROUP, 1.0)):
        place_of = attrgetter(place)
        sizes = Counter(place_of(own) for own in places.values())
        at_place: dict[str, list[_Slow]] = {}
        for one in left:
            at_place.setdefault(place_of(places[one.rank]), []).append(one)
        whole = {
            name
            for name, own in at_place.items()
            if name and sizes[name] < len(places) and len(own) >= max(2.0, share * sizes[name])
        }
        found += [(place, own) for name, own in at_place.items() if name in whole]
        left = [one for one in left if place_of(places[one.rank]) not in whole]
    return found, left


def who_in_words(places: Mapping[int, Place], place: str, ranks: Sequence[int]) -> str:
    """Return the name of a set of slow ranks: ``ranks 1, 3 on node0``, ``host node1 (ranks 4–7)``."""
    if place == HOST:
        return f"host {places[ranks[0]].host} ({ranks_in_words(ranks)})"
    on_hosts = _on_hosts(places, ranks)
    return f"tensor-parallel group of {on_hosts}" if place == TENSOR_GROUP else on_hosts


def _on_hosts(places: Mapping[int, Place], ranks: Sequence[int]) -> str:
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(places[rank].host, []).append(rank)
    if len(hosts) > _MOST_HOSTS:
        return f"{ranks_in_words(ranks)} on {len(hosts)} hosts"
    return ", ".join(f"{ranks_in_words(own)} on {host}" for host, own in hosts.items())


def compared_with(told_by: str) -> str:
    return _COMPARED_WITH.get(told_by, "the ranks that do the same work")


def one_needs_longer(where: str, details: str, excess_ms: float, told_by: str, normal_ms: float, basis: str) -> str:
    """Say, without a full stop, that a rank works longer than its peers; ``details`` are from :func:`work_in_words`."""
    return (
        f"{where} needs {details}: {excess_ms:.1f} ms per step more than {compared_with(told_by)}, which need "
        f"{normal_ms:.1f} ms ({basis})"
    )


def work_in_words(cause: str, work_ms: float, phases: str = "") -> str:
    """Return the work of a rank: ``phases``, as ``48.0 ms per forward (peers 40.0)``, if known, or all of its work."""
    if cause == "late_launch":
        return f"{work_ms:.1f} ms per step, more of it before its phases, in no span"
    if cause == "unknown":
        return f"{work_ms:.1f} ms per step, more of it outside of forward and backward"
    return phases or f"{work_ms:.1f} ms of work per step"


def one_pauses_longer(where: str, cause: str, mean_ms: float, excess_ms: float) -> str:
    """Say, without a full stop, that a rank loses more per step to pauses that may be rare."""
    return (
        f"{where} needs {mean_ms:.1f} ms per step for {cause_in_words(cause)} (mean), {excess_ms:.1f} ms more than "
        "other ranks of its stage"
    )


def several_need_longer(
    places: Mapping[int, Place],
    place: str,
    ranks: Collection[int],
    told_by: str,
    percent: Sequence[float],
    excess_ms: Sequence[float],
) -> str:
    """Say, without a full stop, that ranks, the slowest first, work longer than their peers."""
    named, others = _subject(places, place, ranks), compared_with(told_by)
    if place == HOST:
        others = others.replace("ranks that", "ranks of other hosts that")
    return f"{named} need {range_in_words(percent)} % longer per step than {others}, {range_in_words(excess_ms)} ms"


def several_pause_longer(
    places: Mapping[int, Place], place: str, cause: str, ranks: Collection[int], excess_ms: Iterable[float]
) -> str:
    """Say that ranks lose more to pauses than their peers."""
    what = f" for {cause_in_words(cause)}" if cause in ACTIVITY else ""
    return (
        f"{_subject(places, place, ranks)} need {range_in_words(excess_ms)} ms per step more{what} than "
        "other ranks of their stages (means)."
    )


def _subject(places: Mapping[int, Place], place: str, ranks: Collection[int]) -> str:
    if place != HOST:
        return ranks_in_words(ranks).capitalize()
    host = places[next(iter(ranks))].host
    return f"{_how_many(len(ranks), sum(one.host == host for one in places.values()))} ranks on {host}"


def _how_many(some: int, all_of_them: int) -> str:
    if some == all_of_them == 2:
        return "Both"
    return f"All {some}" if some == all_of_them else f"{some} of the {all_of_them}"
