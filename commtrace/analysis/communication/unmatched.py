"""Find ranks and roles whose wait and transfer cannot be separated, because members were not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.communication.table import Communication
from commtrace.analysis.matched import Context
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run

_FEW: Final = 0.05
"""Unmatched share of a role's stalls that does not change the findings on the rest."""

_MOST_RANKS_NAMED: Final = 8


class Unmatched(NamedTuple):
    """Stalls whose wait and transfer cannot be separated."""

    roles: dict[str, str]  # a sentence with the reason, by role
    ranks: dict[int, int]  # ns over all steps


@dataclass(frozen=True, slots=True)
class UnmatchedSums:
    """Stalls of lanes, ns: by role all and unmatched, by rank unmatched. Sums of several windows add up."""

    roles: Mapping[str, tuple[int, int]]
    ranks: Mapping[int, int]

    def __add__(self, other: UnmatchedSums) -> UnmatchedSums:
        roles = {
            role: (total + other.roles[role][0], unmatched + other.roles[role][1])
            for role, (total, unmatched) in self.roles.items()
        }
        return UnmatchedSums(roles, {rank: time + other.ranks[rank] for rank, time in self.ranks.items()})

    def find(self, recorded: Run) -> Unmatched:
        """Return the significant part; ``recorded`` shows which ranks are missing."""
        sentence = f"How much of it is waiting is unknown, because {_reason(recorded)}."
        return Unmatched(
            {role: sentence for role, (total, unmatched) in self.roles.items() if unmatched > _FEW * total},
            {rank: time for rank, time in self.ranks.items() if time},
        )


def sum_unmatched(context: Context, partition: Partition) -> UnmatchedSums:
    """Add up the stalls of a run that was analysed."""
    parts = [_stalled_time(context, partition, block) for block in context.run.blocks]
    words = context.roles.words
    total, unmatched = sum((part.roles for part in parts), np.zeros((2, len(words)))).astype(np.int64).tolist()
    return UnmatchedSums(
        dict(zip(words, zip(total, unmatched, strict=True), strict=True)),
        {rank: time for part in parts for rank, time in part.ranks.items()},
    )


def roles_of_one_rank(communication: Iterable[Communication]) -> dict[str, str]:
    """Return a sentence for each role without a group of several recorded ranks."""
    sizes: dict[str, set[int | None]] = {}
    for row in communication:
        sizes.setdefault(row.role, set()).add(row.group_size)
    sentence = "Its groups have one rank and send nothing: it is the calls that take this time, so leave them out."
    return {role: sentence for role, found in sizes.items() if found == {1}}


class _StalledTime(NamedTuple):
    roles: npt.NDArray[np.float64]
    ranks: dict[int, int]


def _stalled_time(context: Context, partition: Partition, block: Block) -> _StalledTime:
    stalled_ns = block.together({rank: partition.stalled_ns[rank] for rank in block.ranks})
    complete, stall_complete = (
        block.together({rank: getattr(context.matches.ranks[rank], column) for rank in block.ranks})
        for column in ("complete", "stall_complete")
    )
    role = block.together({rank: context.roles.ranks[rank].role for rank in block.ranks})
    stall_ns = stalled_ns[:, 0] + stalled_ns[:, 1]
    stalled = np.flatnonzero(stall_ns)
    lacking = ~np.where(block.spans.kind[stalled] == schema.STALL, stall_complete[stalled], complete[stalled])
    role, time, count = role[stalled], stall_ns[stalled], len(context.roles.words)
    roles = np.stack([np.bincount(role, time, count), np.bincount(role[lacking], time[lacking], count)])
    of_rank = np.searchsorted(block.bounds, stalled[lacking], side="right") - 1
    ranks = np.bincount(of_rank, time[lacking], len(block.ranks)).astype(np.int64)
    return _StalledTime(roles.astype(np.float64), dict(zip(block.ranks, ranks.tolist(), strict=True)))


def _reason(recorded: Run) -> str:
    missing = sorted(set(range(recorded.world_size)) - set(recorded.ranks))
    if not missing:
        return "not every member of it was matched"
    if len(missing) == 1:
        return f"rank {missing[0]} is missing"
    named = ", ".join(map(str, missing[:_MOST_RANKS_NAMED])) + (" …" if len(missing) > _MOST_RANKS_NAMED else "")
    return f"ranks {named} are missing"
