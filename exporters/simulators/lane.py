"""The stalls of a rank's lane, to subtract them from the time of what ran around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commtrace.analysis.chain import Analysis
from commtrace.trace.spans import Int64


@dataclass(frozen=True, slots=True)
class Lane:
    """When the lane stalled, and for how long before each stall in all."""

    start: Int64
    total: Int64  # one more than starts: the last is behind all stalls

    @classmethod
    def of(cls, analysis: Analysis, rank: int) -> Lane:
        """Return the lane of a rank in the steps that count."""
        spans = analysis.context.run.ranks[rank].spans
        stalled = analysis.partition.stalled_ns[rank].sum(axis=1)
        rows = np.flatnonzero(stalled)
        rows = rows[np.argsort(spans.start[rows], kind="stable")]
        return cls(spans.start[rows], np.concatenate([[0], np.cumsum(stalled[rows])]))

    def compute_ns(self, begin: Int64, end: Int64) -> Int64:
        """Return the length of intervals without the stalls that began inside, ns."""
        first, last = np.searchsorted(self.start, np.stack([begin, end]))
        return np.asarray(np.maximum(end - begin - (self.total[last] - self.total[first]), 0))
