"""A rank's mean step, in whole nanoseconds that still add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import (
    BUBBLE,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    IDLE,
    MEMORY,
    OTHER,
    PHASES,
    REPLAY,
    TRANSFER,
    WAIT,
    State,
)
from commtrace.analysis.matching.match import Matches, blame_ns
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "compute": (COMPUTE,),
    "exposed": (WAIT, TRANSFER),
    "bubble": (BUBBLE,),
    "memory": (MEMORY,),
    "idle": (IDLE,),
    "replay": (REPLAY,),
    "data": (DATA,),
    "checkpoint": (CHECKPOINT,),
    "gc": (GC,),
    "other": (OTHER,),
}
"""The kinds of states in each part of a step; the parts add up to it."""


class ExposedTime(NamedTuple):
    """Time that a lane stalled on communication, ns: before and after the last participant had arrived."""

    wait_ns: int = 0
    transfer_ns: int = 0

    @property
    def total_ns(self) -> int:
        return self.wait_ns + self.transfer_ns

    def to_json(self) -> JsonObject:
        return {"wait": self.wait_ns, "transfer": self.transfer_ns}


@dataclass(frozen=True, slots=True)
class RankMean:
    """The mean over a rank's steps, ns per step."""

    rank: int
    host: str
    coordinates: dict[str, int]
    wall_ns: int  # rounded down
    hidden_ns: int  # communication in flight without a stall
    of_state: dict[State, int] = field(default_factory=dict)  # adds up to wall_ns
    wait_ns: int = 0  # in flight before the last participant arrived, hidden or not
    blame_ns: int = 0  # wait of others for communications in which this rank arrived last
    unmatched_ns: int = 0  # stalls with unseen members: exposed transfer, but part may be wait

    def total(self, kind: str) -> int:
        """Return the time in the states of a kind."""
        return sum(time for state, time in self.of_state.items() if state.kind == kind)

    def part(self, name: str) -> int:
        """Return one of the :data:`PARTS` of the step, ns."""
        return sum(map(self.total, PARTS[name]))

    @property
    def exposed(self) -> dict[str, ExposedTime]:
        """Return the exposed time by role, without roles for which the lane never stalled."""
        roles = sorted(
            {state.detail for state, time in self.of_state.items() if state.kind in (WAIT, TRANSFER) and time}
        )
        return {role: self.exposed_in(role) for role in roles}

    def exposed_in(self, role: str) -> ExposedTime:
        """Return the exposed time of a role; zero if the lane never stalled for it."""
        return ExposedTime(self.of_state.get(State(WAIT, role), 0), self.of_state.get(State(TRANSFER, role), 0))

    def to_json(self) -> JsonObject:
        return {
            "rank": self.rank,
            "host": self.host,
            "coordinates": self.coordinates,
            "wall_ns": self.wall_ns,
            "compute_ns": self.total(COMPUTE),
            "compute_phases_ns": {phase: self.of_state.get(State(COMPUTE, phase), 0) for phase in PHASES},
            "exposed_total_ns": self.part("exposed"),
            "exposed_ns": to_json(self.exposed),
            "hidden_ns": self.hidden_ns,
            "wait_ns": self.wait_ns,
            "blame_ns": self.blame_ns,
            "unmatched_ns": self.unmatched_ns,
            "exposed_memory_ns": self.total(MEMORY),
            "bubble_ns": self.total(BUBBLE),
            "idle_ns": self.total(IDLE),
            "replay_ns": self.total(REPLAY),
            "data_ns": self.total(DATA),
            "checkpoint_ns": self.total(CHECKPOINT),
            "gc_ns": self.total(GC),
            "other_ns": self.total(OTHER),
        }


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Sums over steps of one rank, ns; those of several windows add up. Fields are as of :class:`RankMean`."""

    num_steps: int
    of_state: Int64
    hidden_ns: int = 0
    wait_ns: int = 0
    blame_ns: int = 0
    unmatched_ns: int = 0

    def __add__(self, other: RankTotals) -> RankTotals:
        return RankTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def mean(self, trace: RankTrace, states: Sequence[State]) -> RankMean:
        """Return the mean step of this rank."""
        times = apportion(self.of_state, self.num_steps)
        return RankMean(
            rank=trace.rank,
            host=trace.metadata.node,
            coordinates=dict(trace.coordinates),
            wall_ns=sum(times),
            hidden_ns=self.hidden_ns // self.num_steps,
            of_state=dict(zip(states, times, strict=True)),
            wait_ns=self.wait_ns // self.num_steps,
            blame_ns=self.blame_ns // self.num_steps,
            unmatched_ns=self.unmatched_ns // self.num_steps,
        )


def rank_means(
    run: Run, partition: Partition, matches: Matches, unmatched_ns: Mapping[int, int] | None = None
) -> list[RankMean]:
    """Return the mean step of every rank that has steps; ``unmatched_ns`` is by rank, over all steps."""
    totals = rank_totals(run, partition, matches, unmatched_ns or {})
    return [own.mean(run.ranks[rank], partition.states) for rank, own in totals.items() if own.num_steps]


def rank_totals(
    run: Run, partition: Partition, matches: Matches, unmatched_ns: Mapping[int, int]
) -> dict[int, RankTotals]:
    """Add up the steps of every rank; ``unmatched_ns`` is by rank."""
    blame = blame_ns(run, matches)
    totals = {}
    for rank, trace in run.ranks.items():
        rows = slice(*np.searchsorted(partition.rank, [rank, rank + 1]).tolist())
        totals[rank] = RankTotals(
            num_steps=rows.stop - rows.start,
            of_state=partition.ns[rows].sum(axis=0),
            hidden_ns=int(partition.hidden_ns[rows].sum()),
            wait_ns=int(matches.ranks[rank].wait_ns(trace.spans).sum()),
            blame_ns=blame.get(rank, 0),
            unmatched_ns=unmatched_ns.get(rank, 0),
        )
    return totals


def apportion(totals: Int64, count: int) -> Sequence[int]:
    """Return each total divided by ``count``, as integers whose sum is the sum of the totals divided by ``count``.

    Shares are rounded down; the missing ns go, 1 each, to the largest remainders.
    """
    shares, remainders = np.divmod(totals, count)
    missing = int(totals.sum()) // count - int(shares.sum())
    shares[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]
