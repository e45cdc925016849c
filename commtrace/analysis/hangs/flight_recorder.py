"""Add dumps of torch's flight recorder to the files of a run: enqueued calls, their states and frames.

torch numbers collectives independently. Groups are matched by members and order of creation, numbers by operations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.hangs.stops import Stop
from commtrace.analysis.matching.arrivals import GroupLabel, RankArrivals, describe_group, known_groups
from commtrace.trace import schema
from commtrace.trace.run import Run

USUAL_OFFSET: Final = 1
"""torch counts from 1, commtrace from 0; other offsets come from calls before the recording began."""

_FAR: Final = 64
_MOST_FRAMES: Final = 16


class FlightCall(NamedTuple):
    """A collective that a rank had enqueued."""

    rank: int
    members: tuple[int, ...]
    order: int  # sorts groups of the same members by creation
    operation: str
    seq: int  # torch's number
    state: str  # scheduled, started or completed
    frames: tuple[str, ...] = ()  # innermost first


class FlightGroup(NamedTuple):
    """The match of a group in the dumps with one of the run."""

    offset: int  # torch's number minus ours
    agreed: int  # collectives on both sides with equal operations
    compared: int  # collectives on both sides
    calls: Mapping[tuple[int, int], FlightCall]  # by rank and our number


def fit_flight_calls(
    run: Run, arrivals: Mapping[int, RankArrivals], calls: Iterable[FlightCall]
) -> dict[int, FlightGroup]:
    """Return the groups of the dumps that the run knows, by the run's number of the group."""
    by_group: dict[int, list[FlightCall]] = defaultdict(list)
    listed = list(calls)
    number_of = _numbers(run, listed)
    for call in listed:
        number = number_of.get((call.members, call.order))
        if number is not None:
            by_group[number].append(call)
    return {number: _fitted(run, arrivals, number, own) for number, own in by_group.items()}


def _numbers(run: Run, calls: Sequence[FlightCall]) -> dict[tuple[tuple[int, ...], int], int]:
    """Return the group's number in the run, by members and order in the dumps."""
    ours: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, group in sorted(known_groups(run).items(), key=lambda item: item[1].ordinal):
        ours[group.ranks].append(number)
    theirs: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for call in calls:
        theirs[call.members].add(call.order)
    found = {}
    for members, orders in theirs.items():
        known = ours.get(members, [])
        # A group in which nothing was enqueued is in no dump: then which is which is not known.
        if len(known) == len(orders):
            found.update({(members, order): number for order, number in zip(sorted(orders), known, strict=True)})
    return found


def _fitted(run: Run, arrivals: Mapping[int, RankArrivals], number: int, calls: Sequence[FlightCall]) -> FlightGroup:
    ours = _operations(run, arrivals, number)
    votes: Counter[int] = Counter()
    compared: Counter[int] = Counter()
    by_rank: dict[int, list[FlightCall]] = defaultdict(list)
    for call in calls:
        by_rank[call.rank].append(call)
    offsets = {USUAL_OFFSET}
    for rank, own in by_rank.items():
        launched = arrivals[rank].launched.get(number, 0) if rank in arrivals else 0
        if launched:
            # Both count the last launches, but for those after one of the two was written.
            ends = max(call.seq for call in own) - (launched - 1)
            offsets.update(range(ends - 2, ends + 3))
        for call in own[-_FAR:]:
            for offset in offsets:
                operation = ours.get((rank, call.seq - offset))
                if operation is not None:
                    compared[offset] += 1
                    votes[offset] += operation == call.operation
    best = max(offsets, key=lambda offset: (2 * votes[offset] - compared[offset], offset == USUAL_OFFSET, -abs(offset)))
    return FlightGroup(best, votes[best], compared[best], {(call.rank, call.seq - best): call for call in calls})


def _operations(run: Run, arrivals: Mapping[int, RankArrivals], number: int) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    for rank, trace in run.ranks.items():
        spans = trace.spans
        rows = np.flatnonzero((spans.kind == schema.COLLECTIVE) & (spans.group == number))[-4 * _FAR :]
        found.update({(rank, int(spans.seq[row])): run.names[spans.name[row]] for row in rows})
        found.update(
            {
                (rank, one.seq): one.operation
                for one in arrivals[rank].in_flight
                if one.group == number and not one.is_p2p
            }
        )
    return found


def with_flight_calls(
    arrivals: Mapping[int, RankArrivals], groups: Mapping[int, FlightGroup]
) -> dict[int, RankArrivals]:
    """Return the arrivals with collectives that were enqueued according to the dumps and are not in the files."""
    refined = dict(arrivals)
    for number, group in groups.items():
        furthest: dict[int, int] = {}
        for rank, seq in group.calls:
            furthest[rank] = max(furthest.get(rank, 0), seq + 1)
        for rank, count in furthest.items():
            own = refined.get(rank)
            if own is not None and count > own.launched.get(number, 0):
                launched = {**own.launched, number: count}
                arrived = {**own.arrived, number: max(own.arrived.get(number, 0), count)}
                refined[rank] = replace(own, launched=launched, arrived=arrived)
    return refined


class FlightFit(NamedTuple):
    group: GroupLabel
    offset: int
    agreed: int
    compared: int


class FlightState(NamedTuple):
    """The state of one rank at a stop, from its dump."""

    rank: int
    arrived: bool  # it had enqueued the collective at which others stopped
    seq: int  # of that collective, or else of the last one before it
    collective_seq_id: int
    operation: str
    state: str
    frames: tuple[str, ...]


class FlightEvidence(NamedTuple):
    """Evidence from dumps of torch's flight recorder: ranks with a dump, fits of groups, and rank states by stop."""

    ranks: tuple[int, ...]
    groups: tuple[FlightFit, ...]
    stops: Mapping[int, tuple[FlightState, ...]]


def flight_evidence(
    run: Run, groups: Mapping[int, FlightGroup], stops: Sequence[Stop], ranks: Iterable[int]
) -> FlightEvidence:
    """Return the states of all ranks at every stop."""
    known = known_groups(run)
    return FlightEvidence(
        ranks=tuple(sorted(set(ranks))),
        groups=tuple(
            FlightFit(describe_group(known.get(number), number), group.offset, group.agreed, group.compared)
            for number, group in groups.items()
        ),
        stops={
            position: tuple(
                FlightState(
                    rank, seq == stop.seq, seq, call.seq, call.operation, call.state, call.frames[:_MOST_FRAMES]
                )
                for rank, seq, call in _of_stop(groups[stop.group_id], stop)
            )
            for position, stop in enumerate(stops)
            if stop.message is None and stop.group_id in groups
        },
    )


def _of_stop(group: FlightGroup, stop: Stop) -> Iterable[tuple[int, int, FlightCall]]:
    """Yield, of each rank, the call at the number of the stop, or the last one before it."""
    last: dict[int, int] = {}
    for rank, seq in group.calls:
        if seq <= stop.seq:
            last[rank] = max(last.get(rank, seq), seq)
    for rank in sorted(last):
        yield rank, last[rank], group.calls[rank, last[rank]]
