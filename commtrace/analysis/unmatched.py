"""Roles of which it is not known what was waiting and what was transfer, because members were not seen."""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.analysis.chain import Context
from commtrace.analysis.match import communication_of
from commtrace.analysis.partition import Partition
from commtrace.trace import schema
from commtrace.trace.run import Run

_FEW: Final = 0.05
"""Share of a role's stalled time that may be unmatched without changing what is said of the rest."""

_MOST_RANKS_NAMED: Final = 8


def unmatched_roles(context: Context, partition: Partition, recorded: Run) -> dict[str, str]:
    """By role, for those of which more than a few percent of the stalled time is unmatched: a sentence that says why.

    Args:
        context, partition: of the analysis.
        recorded: whatever was loaded: which ranks there are.
    """
    total, unmatched = np.zeros((2, len(context.roles.words)))
    for rank, trace in context.run.ranks.items():
        stood_ns = partition.stalled_ns[rank][:, 0] + partition.stalled_ns[rank][:, 1]
        stood = np.flatnonzero(stood_ns)
        is_stall = trace.spans.kind[stood] == schema.STALL
        communication = np.where(is_stall, communication_of(trace.spans, stood), stood)
        complete = (communication >= 0) & context.matches.ranks[rank].complete[communication]
        role, time = context.roles.ranks[rank].role[stood], stood_ns[stood]
        total += np.bincount(role, time, len(total))
        unmatched += np.bincount(role[~complete], time[~complete], len(total))
    sentence = f"How much of it is waiting cannot be told, because {_reason(recorded)}."
    return {context.roles.words[role]: sentence for role in np.flatnonzero(unmatched > _FEW * total)}


def _reason(recorded: Run) -> str:
    missing = sorted(set(range(recorded.world_size)) - set(recorded.ranks))
    if not missing:
        return "not every member of it was matched"
    if len(missing) == 1:
        return f"rank {missing[0]} is missing"
    named = ", ".join(map(str, missing[:_MOST_RANKS_NAMED])) + (" …" if len(missing) > _MOST_RANKS_NAMED else "")
    return f"ranks {named} are missing"
