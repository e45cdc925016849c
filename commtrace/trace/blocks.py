"""Ranks side by side in one table: what is done to a column is done to those of many ranks at once.

A step on one rank's rows costs Python the same whether they are a hundred or a hundred thousand, and a run has a
thousand ranks. A block holds so many ranks that this no longer counts, and so few rows that what is made of them on the
way stays in the caches of a core.

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
    """Rows of some ranks, those of one behind those of the other.

    Attributes:
        ranks: their numbers, ascending.
        bounds: rank ``ranks[i]`` has rows ``bounds[i]`` to ``bounds[i + 1]``.
        spans: all of the rows.
    """

    ranks: tuple[int, ...]
    bounds: Int64
    spans: Spans

    @classmethod
    def of_ranks(cls, spans: Mapping[int, Spans]) -> Block:
        """A copy of the rows of these ranks."""
        return cls(tuple(spans), bounds_of([len(own) for own in spans.values()]), Spans.concatenate([*spans.values()]))

    def __len__(self) -> int:
        return len(self.spans)

    def slices(self) -> dict[int, slice]:
        """By rank, its rows."""
        return {
            rank: slice(begin, end)
            for rank, (begin, end) in zip(self.ranks, pairwise(self.bounds.tolist()), strict=True)
        }

    def split(self, column: npt.NDArray[Any]) -> dict[int, npt.NDArray[Any]]:
        """By rank, its part of a column of the block; no copy."""
        return {rank: column[own] for rank, own in self.slices().items()}

    def together(self, parts: Mapping[int, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the parts of a column, one per rank, as a column of the block."""
        return np.concatenate([parts[rank] for rank in self.ranks])

    def single(self) -> Iterator[Block]:
        """Every rank as a block of its own; no copy."""
        for rank, rows in self.slices().items():
            yield Block((rank,), bounds_of([rows.stop - rows.start]), self.spans.take(rows))

    def per_row(self, of_rank: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A value per rank, in the order of ``ranks``, handed to all rows of each."""
        return np.repeat(of_rank, np.diff(self.bounds))

    def rank(self) -> Int32:
        """Whose each row is."""
        return np.asarray(self.per_row(np.array(self.ranks, np.int32)))

    def end_to_end(self) -> Int64:
        """See :func:`end_to_end`; of its rows."""
        return end_to_end(self.spans.start, self.spans.end, self.bounds)


def end_to_end(start: Int64, end: Int64, bounds: Int64) -> Int64:
    """What to add to the times of each rank so that no time of a rank is in another one's part of the axis.

    What is sorted, searched or cut by time can then be so for all ranks at once. The parts are in the order of the
    ranks; within each, times differ by as much as before.

    Args:
        start, end: of rows, those of one rank behind those of the other.
        bounds: where the rows of each rank begin, and the number of rows.

    Raises:
        TraceFormatError: the times are so far apart that the axis would be longer than 64 bits can count.
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
    """Where parts of these lengths begin, and after the last one where it ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def blocks_of(spans: Mapping[int, Spans]) -> Iterator[Block]:
    """The rows of ranks, copied into blocks."""
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
