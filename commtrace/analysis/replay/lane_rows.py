"""The rows of many ranks, one rank behind the other in memory and in time: what is done for one is done for all.

A thousand ranks of a few thousand rows each would otherwise be a thousand times dozens of calls on short columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commtrace.analysis.matching.operations import unfinished_ids
from commtrace.trace.blocks import Block
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Int64, Spans


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of some ranks of a run.

    Attributes:
        ranks: their numbers, ascending.
        first: of each rank, its first row; and behind the last one how many rows there are.
        of_row: of each row, the index of its rank.
        spans: the rows.
        shift: of each rank, what brings its times behind those of the ranks before it.
    """

    run: Run
    ranks: Int64
    first: Int64
    of_row: Int64
    spans: Spans
    shift: Int64

    @classmethod
    def of(cls, run: Run, block: Block) -> LaneRows:
        """Return the rows of a block of the run."""
        return cls(
            run=run,
            ranks=np.array(block.ranks, np.int64),
            first=block.bounds,
            of_row=block.per_row(np.arange(len(block.ranks))),
            spans=block.spans,
            shift=block.end_to_end(),
        )

    def start(self, rows: Int64) -> Int64:
        """Return when these rows start, all ranks one behind the other."""
        return np.asarray(self.spans.start[rows] + self.shift[self.of_row[rows]])

    def end(self, rows: Int64) -> Int64:
        """Return when they end."""
        return np.asarray(self.spans.end[rows] + self.shift[self.of_row[rows]])

    def unfinished(self) -> Int64:
        """Return rows of communications whose end was never seen, and of whatever shares an id with them."""
        found = [
            first + np.flatnonzero(np.isin(trace.spans.id, ids))
            for first, trace in zip(self.first[:-1].tolist(), self._traces(), strict=True)
            if (ids := unfinished_ids(trace))
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _traces(self) -> Iterator[RankTrace]:
        return (self.run.ranks[rank] for rank in self.ranks.tolist())
