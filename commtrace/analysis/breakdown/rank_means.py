"""A rank's mean step, in whole nanoseconds that still add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    TRANSFER,
    WAIT,
    State,
)
from commtrace.analysis.matching.blame import blame_ns
from commtrace.analysis.matching.match import Matches
from commtrace.trace.run import Run
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class RankMean:
    """The mean over a rank's steps; all times ns per step.

    Attributes:
        rank, host, coordinates: which rank it is.
        wall_ns: of the step, rounded down.
        of_state: time in each state; they add up to ``wall_ns``.
        hidden_ns: communication in flight while the lane did not stand still for any.
        wait_ns: summed over communications, the time in flight before the last participant arrived, hidden or not.
        blame_ns: how long the other ranks waited, in all, for communications in which this one arrived last.
        unmatched_ns: stood still for communications of which not all members were seen: it counts as exposed transfer,
            and nobody knows what of it was waiting, or bubble.
    """

    rank: int
    host: str
    coordinates: dict[str, int]
    wall_ns: int
    hidden_ns: int
    of_state: dict[State, int] = field(default_factory=dict)
    wait_ns: int = 0
    blame_ns: int = 0
    unmatched_ns: int = 0

    def total(self, kind: str) -> int:
        """Time in the states of a kind."""
        return sum(time for state, time in self.of_state.items() if state.kind == kind)

    @property
    def exposed_ns(self) -> dict[str, dict[str, int]]:
        """By role: wait and transfer. Roles for which the lane never stood still are left out."""
        roles = sorted(
            {state.detail for state, time in self.of_state.items() if state.kind in (WAIT, TRANSFER) and time}
        )
        return {
            role: {
                "wait": self.of_state.get(State(WAIT, role), 0),
                "transfer": self.of_state.get(State(TRANSFER, role), 0),
            }
            for role in roles
        }

    @property
    def exposed_total_ns(self) -> int:
        return self.total(WAIT) + self.total(TRANSFER)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "coordinates": self.coordinates,
            "wall_ns": self.wall_ns,
            "compute_ns": self.total(COMPUTE),
            "compute_phases_ns": {phase: self.of_state.get(State(COMPUTE, phase), 0) for phase in PHASES},
            "exposed_total_ns": self.exposed_total_ns,
            "exposed_ns": self.exposed_ns,
            "hidden_ns": self.hidden_ns,
            "wait_ns": self.wait_ns,
            "blame_ns": self.blame_ns,
            "unmatched_ns": self.unmatched_ns,
            "exposed_memory_ns": self.total(MEMORY),
            "bubble_ns": self.total(BUBBLE),
            "idle_ns": self.total(IDLE),
            "data_ns": self.total(DATA),
            "checkpoint_ns": self.total(CHECKPOINT),
            "gc_ns": self.total(GC),
            "other_ns": self.total(OTHER),
        }


def rank_means(
    run: Run, partition: Partition, matches: Matches, unmatched_ns: Mapping[int, int] | None = None
) -> list[RankMean]:
    """Return the mean step of every rank that has steps, by rank; ``unmatched_ns`` over all of their steps, where
    known.
    """
    blame = blame_ns(run, matches)
    bounds = {rank: np.searchsorted(partition.rank, [rank, rank + 1]).tolist() for rank in run.ranks}
    means = (
        _mean_of_rank(run, partition, matches, rank, blame.get(rank, 0), slice(*rows))
        for rank, rows in bounds.items()
        if rows[1] > rows[0]
    )
    if not unmatched_ns:
        return list(means)
    steps = {rank: rows[1] - rows[0] for rank, rows in bounds.items()}
    return [replace(mean, unmatched_ns=unmatched_ns.get(mean.rank, 0) // steps[mean.rank]) for mean in means]


def _mean_of_rank(run: Run, partition: Partition, matches: Matches, rank: int, blame: int, rows: slice) -> RankMean:
    """Return the mean of these rows of the partition, which are those of the rank."""
    trace = run.ranks[rank]
    num_steps = rows.stop - rows.start
    times = apportion(partition.ns[rows].sum(axis=0), num_steps)
    return RankMean(
        rank=rank,
        host=trace.metadata.node,
        coordinates=dict(trace.coordinates),
        wall_ns=sum(times),
        hidden_ns=int(partition.hidden_ns[rows].sum()) // num_steps,
        of_state=dict(zip(partition.states, times, strict=True)),
        wait_ns=int(matches.ranks[rank].wait_ns(trace.spans).sum()) // num_steps,
        blame_ns=blame // num_steps,
    )


def apportion(totals: Int64, count: int) -> Sequence[int]:
    """Return each total divided by ``count``, as integers whose sum is the sum of the totals divided by ``count``.

    Everything is rounded down, and what is then missing goes, 1 ns each, to the largest remainders.
    """
    shares, remainders = np.divmod(totals, count)
    missing = int(totals.sum()) // count - int(shares.sum())
    shares[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]
