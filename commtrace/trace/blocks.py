"""Columns that hold the rows of several ranks, so that one numpy call handles all of them.

A numpy call has the same overhead for a hundred rows as for a hundred thousand. A block has so many ranks that this
overhead does not matter, and so few rows that they stay in the caches of a core.

>>> for block in run.blocks:                                    # doctest: +SKIP
...     longest = np.maximum.reduceat(block.spans.end - block.spans.start, block.bounds[:-1])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.errors import TraceFormatError
from commtrace.trace.spans import Int32, Int64, Spans

ROWS_OF_BLOCK: Final = 125_000
"""Of most blocks. A rank is never divided, so one of many rows is a block of its own."""

_LONGEST_AXIS_NS: Final = 2.0**62


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of several ranks, one rank after the other.

    Attributes:
        ranks: ascending.
        bounds: rank ``ranks[i]`` has rows ``bounds[i]`` to ``bounds[i + 1]``.
    """

    ranks: tuple[int, ...]
    bounds: Int64
    spans: Spans

    @classmethod
    def of_ranks(cls, spans: Mapping[int, Spans]) -> Block:
        """Return a copy of the rows of these ranks."""
        return cls(tuple(spans), bounds_of([len(own) for own in spans.values()]), Spans.concatenate([*spans.values()]))

    def __len__(self) -> int:
        return len(self.spans)

    def slices(self) -> dict[int, slice]:
        return {
            rank: slice(begin, end)
            for rank, (begin, end) in zip(self.ranks, pairwise(self.bounds.tolist()), strict=True)
        }

    def split(self, column: npt.NDArray[np.generic]) -> dict[int, npt.NDArray[Any]]:
        """Return each rank's part of a column of the block, without a copy."""
        return {rank: column[own] for rank, own in self.slices().items()}

    def together(self, parts: Mapping[int, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the parts of a column, one per rank, as a column of the block."""
        return np.concatenate([parts[rank] for rank in self.ranks])

    def single(self) -> Iterator[Block]:
        """Yield every rank as a block, without a copy."""
        for rank, rows in self.slices().items():
            yield Block((rank,), bounds_of([rows.stop - rows.start]), self.spans.take(rows))

    def per_row(self, of_rank: npt.NDArray[np.generic]) -> npt.NDArray[Any]:
        """Return a value per rank, in the order of ``ranks``, repeated for every row of the rank."""
        return np.repeat(of_rank, np.diff(self.bounds))

    def rank(self) -> Int32:
        return np.asarray(self.per_row(np.array(self.ranks, np.int32)))

    def end_to_end(self) -> Int64:
        return end_to_end(self.spans.start, self.spans.end, self.bounds)


def end_to_end(start: Int64, end: Int64, bounds: Int64) -> Int64:
    """Return a shift per rank that places the times of all ranks one after the other on a common axis.

    Rows of all ranks can then be sorted, searched or cut by time at once; ranks keep their order, times their
    distances.

    Args:
        start, end: of rows, one rank after the other, ns.
        bounds: where the rows of each rank begin, and the number of rows.

    Raises:
        TraceFormatError: the axis would be longer than 64 bits can count.
    """
    shifts = np.zeros(len(bounds) - 1, np.int64)
    filled = np.diff(bounds) > 0
    if filled.any():
        begins = bounds[:-1][filled]
        low = np.minimum(np.minimum.reduceat(start, begins), np.minimum.reduceat(end, begins))
        high = np.maximum(np.maximum.reduceat(start, begins), np.maximum.reduceat(end, begins))
        # In floating point, which does not wrap; an axis this long is no recording of this century.
        if float((high.astype(np.float64) - low).sum()) > _LONGEST_AXIS_NS:
            raise TraceFormatError(
                f"the times of {len(begins)} ranks add up to more than 64 bits can count: some rows have times that no "
                "clock showed. Leave out the ranks, or the steps, that hold them."
            )
        shifts[filled] = bounds_of(high - low + 1)[:-1] - low
    return shifts


def bounds_of(lengths: Sequence[int] | Int64) -> Int64:
    """Return where parts of these lengths begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def blocks_of(spans: Mapping[int, Spans]) -> Iterator[Block]:
    """Yield the rows of ranks, copied into blocks."""
    held: dict[int, Spans] = {}
    rows = 0
    for rank, own in spans.items():
        held[rank] = own
        rows += len(own)
        if rows >= ROWS_OF_BLOCK:
            yield Block.of_ranks(held)
            held, rows = {}, 0
    if held:
        yield Block.of_ranks(held)
