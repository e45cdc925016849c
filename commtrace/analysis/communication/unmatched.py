"""Ranks and roles of which it is not known what was waiting and what was transfer, because members were not seen."""

from __future__ import annotations

from collections.abc import Iterable
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
"""Share of a role's stalled time that may be unmatched without changing what is said of the rest."""

_MOST_RANKS_NAMED: Final = 8


class Unmatched(NamedTuple):
    """Stalls whose wait and transfer cannot be separated.

    Attributes:
        roles: by role, for those of which more than a few percent is unmatched: a sentence that says why.
        ranks: by rank, ns over all steps that it stood still for what was not matched on all members.
    """

    roles: dict[str, str]
    ranks: dict[int, int]


def find_unmatched(context: Context, partition: Partition, recorded: Run) -> Unmatched:
    """Of a run that was analysed.

    Args:
        context, partition: of the analysis.
        recorded: whatever was loaded: which ranks there are.
    """
    parts = [_stood(context, partition, block) for block in context.run.blocks]
    total, unmatched = sum((part.roles for part in parts), np.zeros((2, len(context.roles.words))))
    sentence = f"How much of it is waiting cannot be told, because {_reason(recorded)}."
    return Unmatched(
        {context.roles.words[role]: sentence for role in np.flatnonzero(unmatched > _FEW * total)},
        {rank: time for part in parts for rank, time in part.ranks.items() if time},
    )


def roles_of_one_rank(communication: Iterable[Communication]) -> dict[str, str]:
    """By role, for those that no group of several ranks has: a sentence that says so."""
    sizes: dict[str, set[int | None]] = {}
    for row in communication:
        sizes.setdefault(row.role, set()).add(row.group_size)
    sentence = "Its groups have one rank and send nothing: it is the calls that take this time, so leave them out."
    return {role: sentence for role, found in sizes.items() if found == {1}}


class _Stood(NamedTuple):
    """Of a block. By role: how long the lanes stood still, and for what was not matched; by rank: the latter."""

    roles: npt.NDArray[np.float64]
    ranks: dict[int, int]


def _stood(context: Context, partition: Partition, block: Block) -> _Stood:
    stalled_ns = block.together({rank: partition.stalled_ns[rank] for rank in block.ranks})
    complete, stall_complete = (
        block.together({rank: getattr(context.matches.ranks[rank], column) for rank in block.ranks})
        for column in ("complete", "stall_complete")
    )
    role = block.together({rank: context.roles.ranks[rank].role for rank in block.ranks})
    stood_ns = stalled_ns[:, 0] + stalled_ns[:, 1]
    stood = np.flatnonzero(stood_ns)
    lacking = ~np.where(block.spans.kind[stood] == schema.STALL, stall_complete[stood], complete[stood])
    role, time, count = role[stood], stood_ns[stood], len(context.roles.words)
    roles = np.stack([np.bincount(role, time, count), np.bincount(role[lacking], time[lacking], count)])
    of_rank = np.searchsorted(block.bounds, stood[lacking], side="right") - 1
    ranks = np.bincount(of_rank, time[lacking], len(block.ranks)).astype(np.int64)
    return _Stood(roles.astype(np.float64), dict(zip(block.ranks, ranks.tolist(), strict=True)))


def _reason(recorded: Run) -> str:
    missing = sorted(set(range(recorded.world_size)) - set(recorded.ranks))
    if not missing:
        return "not every member of it was matched"
    if len(missing) == 1:
        return f"rank {missing[0]} is missing"
    named = ", ".join(map(str, missing[:_MOST_RANKS_NAMED])) + (" …" if len(missing) > _MOST_RANKS_NAMED else "")
    return f"ranks {named} are missing"
