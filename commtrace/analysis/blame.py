"""For whom the others waited: the last participant of a communication caused the waiting of all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from commtrace.analysis.match import Matches
from commtrace.trace.run import Run


def blame_ns(run: Run, matches: Matches) -> Mapping[int, int]:
    """By rank: how long others waited, in all, for communications in which it arrived last.

    Args:
        run: with all ranks on one clock.
        matches: of this run.
    """
    blame = Counter[int]()
    for rank, trace in run.ranks.items():
        own = matches.ranks[rank]
        wait = own.wait_ns(trace.spans)
        waited = (own.last_rank >= 0) & (own.last_rank != rank) & (wait > 0)
        for last in np.unique(own.last_rank[waited]):
            blame[int(last)] += int(wait[waited & (own.last_rank == last)].sum())
    return blame
