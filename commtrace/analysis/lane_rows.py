"""The rows of many ranks, one rank behind the other in memory and in time: what is done for one is done for all.

A thousand ranks of a few thousand rows each would otherwise be a thousand times dozens of calls on short columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analysis.operations import unfinished_ids
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import DTYPE_OF_COLUMN, Int64, Spans

_COLUMNS: Final = frozenset(
    {"kind", "name", "lane", "start", "end", "step", "microbatch", "chunk"}
    | {"bytes", "peer", "op_in_seq", "id", "stalled_on"}
)
_MOST_ROWS: Final = 8_000_000
"""That are read at once: bounds the memory."""

_LONGEST_NS: Final = 2**61
"""Of all ranks' recordings together, so that instants on one line are numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of some ranks of a run.

    Attributes:
        ranks: their numbers, ascending.
        first: of each rank, its first row; and behind the last one how many there are.
        of_row: of each row, the index of its rank.
        spans: the rows; only the columns that a replay needs are filled in.
        shift: of each rank, what brings its times behind those of the ranks before it.
    """

    run: Run
    ranks: Int64
    first: Int64
    of_row: Int64
    spans: Spans
    shift: Int64

    @classmethod
    def of(cls, run: Run, ranks: Sequence[int]) -> LaneRows:
        """The rows of these ranks, each of which has some."""
        traces = [run.ranks[rank] for rank in ranks]
        counts = [len(trace.spans) for trace in traces]
        first = np.concatenate([[0], np.cumsum(counts)])
        begin = np.array([trace.spans.start.min() for trace in traces])
        length = np.array([_length_ns(trace) for trace in traces])
        return cls(
            run=run,
            ranks=np.array(ranks, np.int64),
            first=first,
            of_row=np.repeat(np.arange(len(ranks)), counts),
            spans=_columns_of([trace.spans for trace in traces]),
            shift=np.cumsum(length) - length - begin,
        )

    def start(self, rows: Int64) -> Int64:
        """When these rows start, all ranks one behind the other."""
        return np.asarray(self.spans.start[rows] + self.shift[self.of_row[rows]])

    def end(self, rows: Int64) -> Int64:
        """When they end."""
        return np.asarray(self.spans.end[rows] + self.shift[self.of_row[rows]])

    def unfinished(self) -> Int64:
        """Rows of communications whose end was never seen, and of whatever shares an id with them."""
        found = [
            first + np.flatnonzero(np.isin(trace.spans.id, ids))
            for first, trace in zip(self.first[:-1].tolist(), self._traces(), strict=True)
            if (ids := unfinished_ids(trace))
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _traces(self) -> Iterator[RankTrace]:
        return (self.run.ranks[rank] for rank in self.ranks.tolist())


def bunches(run: Run) -> list[list[int]]:
    """The ranks of a run, ascending, in groups whose rows may be put one behind the other."""
    groups: list[list[int]] = []
    rows = length = 0
    for rank in sorted(run.ranks):
        trace = run.ranks[rank]
        rows, length = rows + len(trace.spans), length + _length_ns(trace)
        if not groups or rows > _MOST_ROWS or length > _LONGEST_NS:
            groups.append([])
            rows, length = len(trace.spans), _length_ns(trace)
        groups[-1].append(rank)
    return groups


def _columns_of(parts: Sequence[Spans]) -> Spans:
    """Spans one behind the other, without the columns that are not needed: copying is most of the work."""
    return Spans(
        *(
            np.concatenate([getattr(part, name) for part in parts]) if name in _COLUMNS else np.empty(0, dtype)
            for name, dtype in DTYPE_OF_COLUMN.items()
        )
    )


def _length_ns(trace: RankTrace) -> int:
    """How long the rank was recorded, and a little more: what ends with one rank does not touch the next one."""
    return int(trace.spans.end.max()) - int(trace.spans.start.min()) + 2
