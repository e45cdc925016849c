"""For whom the others waited: the last participant of a communication caused the waiting of all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from commtrace.analysis.keys import grouped
from commtrace.analysis.matching.match import Matches
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
        waited = np.flatnonzero((own.last_rank >= 0) & (own.last_rank != rank) & (wait > 0))
        last, which = grouped(own.last_rank[waited])
        # float64 sums are exact here: they stay far below 2⁵³ ns, which is 104 days.
        for one, sum_ns in zip(own.last_rank[waited[last]].tolist(), np.bincount(which, wait[waited]), strict=True):
            blame[one] += int(sum_ns)
    return blame
