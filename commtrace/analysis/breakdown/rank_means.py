"""A rank's mean step, in whole nanoseconds that still add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import (
    BETWEEN_STEPS,
    BUBBLE,
    CHECKPOINT,
    COMPUTE,
    DATA,
    GC,
    IDLE,
    IN_NO_SPAN,
    LAUNCH_BOUND_PHASES,
    MEMORY,
    OTHER,
    PHASES,
    REPLAY,
    TRANSFER,
    UNKNOWN_TIME,
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
    "between": (BETWEEN_STEPS,),
    "other": (OTHER,),
}
"""The kinds of states in each part of a step; the parts add up to it."""


_OF_PHASES: Final = {
    "forward": "the forward",
    "backward": "the backward",
    "recompute": "the recomputation",
    "optimizer": "the optimizer step",
    "evaluation": "the evaluation",
    "other": "other compute",
    IN_NO_SPAN: "the time in no span",
}
_WORTH_A_SENTENCE: Final = 0.01
"""Least share that is mentioned."""


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
    # By phase of compute, and IN_NO_SPAN: of the time in it, the device waited for its host; None if not known.
    launch_bound_ns: Mapping[str, int] | None = None

    @property
    def launch_bound_share(self) -> float | None:
        """Return the share of the step in which the device waited for its host; None if not known."""
        if self.launch_bound_ns is None or not self.wall_ns:
            return None
        return sum(self.launch_bound_ns.values()) / self.wall_ns

    def launch_bound_share_of(self, phase: str) -> float | None:
        """Return the same share of a phase, or of the time IN_NO_SPAN; None also without any such time."""
        whole = self.total(OTHER) if phase == IN_NO_SPAN else self.of_state.get(State(COMPUTE, phase), 0)
        return None if self.launch_bound_ns is None or not whole else self.launch_bound_ns[phase] / whole

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
            "launch_bound_ns": None if self.launch_bound_ns is None else dict(self.launch_bound_ns),
            "exposed_memory_ns": self.total(MEMORY),
            "bubble_ns": self.total(BUBBLE),
            "idle_ns": self.total(IDLE),
            "replay_ns": self.total(REPLAY),
            "data_ns": self.total(DATA),
            "checkpoint_ns": self.total(CHECKPOINT),
            "gc_ns": self.total(GC),
            "between_ns": self.total(BETWEEN_STEPS),
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
    launch_bound_ns: Int64 = field(default_factory=lambda: np.zeros(len(LAUNCH_BOUND_PHASES), np.int64))
    num_known: int = 0  # steps in which that is known: it is the sum over these

    def __add__(self, other: RankTotals) -> RankTotals:
        return RankTotals(*(getattr(self, column.name) + getattr(other, column.name) for column in fields(self)))

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
            launch_bound_ns=self._launch_bound(),
        )

    def _launch_bound(self) -> dict[str, int] | None:
        if not self.num_known:
            return None
        means = (self.launch_bound_ns // self.num_known).tolist()
        return dict(zip(LAUNCH_BOUND_PHASES, means, strict=True))


def rank_means(
    run: Run, partition: Partition, matches: Matches, unmatched_ns: Mapping[int, int] | None = None
) -> list[RankMean]:
    """Return the mean step of every rank that has steps; ``unmatched_ns`` is by rank, over all steps."""
    totals = rank_totals(run, partition, matches, unmatched_ns or {})
    return [total.mean(run.ranks[rank], partition.states) for rank, total in totals.items() if total.num_steps]


def rank_totals(
    run: Run, partition: Partition, matches: Matches, unmatched_ns: Mapping[int, int]
) -> dict[int, RankTotals]:
    """Add up the steps of every rank; ``unmatched_ns`` is by rank."""
    blame = blame_ns(run, matches)
    totals = {}
    for rank, trace in run.ranks.items():
        rows = slice(*np.searchsorted(partition.rank, [rank, rank + 1]).tolist())
        launch_bound_ns = partition.launch_bound_ns[rows]
        is_known = launch_bound_ns[:, 0] != UNKNOWN_TIME
        totals[rank] = RankTotals(
            num_steps=rows.stop - rows.start,
            of_state=partition.ns[rows].sum(axis=0),
            hidden_ns=int(partition.hidden_ns[rows].sum()),
            wait_ns=int(matches.ranks[rank].wait_ns(trace.spans).sum()),
            blame_ns=blame.get(rank, 0),
            unmatched_ns=unmatched_ns.get(rank, 0),
            launch_bound_ns=launch_bound_ns[is_known].sum(axis=0),
            num_known=int(is_known.sum()),
        )
    return totals


def launch_bound_sentence(ranks: Sequence[RankMean]) -> str:
    """Say how long devices waited for their hosts; empty if it is little, or not known."""
    known = [(share, rank) for rank in ranks if (share := rank.launch_bound_share) is not None]
    most, worst = max(known, key=lambda share_and_rank: share_and_rank[0], default=(0.0, None))
    if worst is None or most < _WORTH_A_SENTENCE:
        return ""
    shares = [(word, worst.launch_bound_share_of(phase) or 0.0) for phase, word in _OF_PHASES.items()]
    phases = ", ".join(f"{share:.0%} of {word}" for word, share in shares if share >= _WORTH_A_SENTENCE)
    typical = float(np.median([share for share, _ in known]))
    compared = f" (the typical rank: {typical:.0%})" if len(known) > 1 else ""
    waits = f"the device of rank {worst.rank} waits for its host in {most:.0%} of the step{compared}"
    return f"Launch-bound: {waits}: {phases}."


def apportion(totals: Int64, count: int) -> Sequence[int]:
    """Return each total divided by ``count``, as integers whose sum is the sum of the totals divided by ``count``.

    Shares are rounded down; the missing ns go, 1 each, to the largest remainders.
    """
    shares, remainders = np.divmod(totals, count)
    missing = int(totals.sum()) // count - int(shares.sum())
    shares[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return [int(share) for share in shares]
