"""Hold the rows of several ranks as columns, so that one numpy call, with its fixed overhead, handles all of them.

>>> for block in run.blocks:                                    # doctest: +SKIP
...     longest = np.maximum.reduceat(block.spans.end - block.spans.start, block.bounds[:-1])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt

from commtrace.errors import TraceFormatError
from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int32, Int64, Spans

if TYPE_CHECKING:
    from commtrace.trace.selection import StepRange

_Scalar = TypeVar("_Scalar", bound=np.generic)

ROWS_OF_BLOCK: Final = 125_000
"""Enough to hide numpy's overhead, few enough for the caches of a core. A rank is never divided."""

_LONGEST_AXIS_NS: Final = 2.0**62


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of several ranks, ascending; rank ``ranks[i]`` has rows ``bounds[i]`` to ``bounds[i + 1]``."""

    ranks: tuple[int, ...]
    bounds: Int64
    spans: Spans

    @classmethod
    def of_ranks(cls, spans: Mapping[int, Spans]) -> Block:
        """Copy the rows of these ranks into a block."""
        return cls(
            tuple(spans), bounds_of([len(rows) for rows in spans.values()]), Spans.concatenate([*spans.values()])
        )

    def __len__(self) -> int:
        return len(self.spans)

    def slices(self) -> dict[int, slice]:
        return {
            rank: slice(begin, end)
            for rank, (begin, end) in zip(self.ranks, pairwise(self.bounds.tolist()), strict=True)
        }

    def split(self, column: npt.NDArray[_Scalar]) -> dict[int, npt.NDArray[_Scalar]]:
        """Return each rank's part of a column of the block, without a copy."""
        return {rank: column[rows] for rank, rows in self.slices().items()}

    def together(self, parts: Mapping[int, npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
        """Join the parts of a column, one per rank, to a column of the block."""
        return np.concatenate([parts[rank] for rank in self.ranks])

    def single(self) -> Iterator[Block]:
        """Yield every rank as a block, without a copy."""
        for rank, rows in self.slices().items():
            yield Block((rank,), bounds_of([rows.stop - rows.start]), self.spans.take(rows))

    def per_row(self, of_rank: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Repeat a value per rank, in the order of ``ranks``, for every row of the rank."""
        return np.repeat(of_rank, np.diff(self.bounds))

    def rank(self) -> Int32:
        return np.asarray(self.per_row(np.array(self.ranks, np.int32)))

    def end_to_end(self) -> Int64:
        return end_to_end(self.spans.start, self.spans.end, self.bounds)


def end_to_end(start: Int64, end: Int64, bounds: Int64) -> Int64:
    """Return a shift per rank, ns, that places the times of all ranks one after the other on a common axis.

    Rows of all ranks can then be sorted, searched or cut by time at once; ``bounds`` are as of :class:`Block`.

    Raises:
        TraceFormatError: the axis does not fit into 64 bits.
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


def pick(
    columns: Mapping[int, npt.NDArray[_Scalar]], rank: npt.NDArray[np.integer], row: npt.NDArray[np.integer]
) -> npt.NDArray[_Scalar]:
    """Return the values of these rows of these ranks; ``columns`` are by rank, ascending."""
    first = bounds_of([len(column) for column in columns.values()])[:-1]
    position = first[np.searchsorted([*columns], rank)] + row
    return np.concatenate([*columns.values()])[position]


def bounds_of(lengths: Sequence[int] | Int64) -> Int64:
    """Return the starts of parts of these lengths, and the end of the last one."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def blocks_of(spans: Iterable[tuple[int, Spans]]) -> Iterator[Block]:
    """Copy the rows of ranks into blocks."""
    held: dict[int, Spans] = {}
    rows = 0
    for rank, spans_of_rank in spans:
        held[rank] = spans_of_rank
        rows += len(spans_of_rank)
        if rows >= ROWS_OF_BLOCK:
            yield Block.of_ranks(held)
            held, rows = {}, 0
    if held:
        yield Block.of_ranks(held)


def rows_in_steps(block: Block, wanted: StepRange) -> Bool:
    """Return a mask of the rows of steps: those with their numbers, and those without one that begin in one of them.

    What lies between steps has no number, and belongs to the step that it precedes.
    """
    spans, chosen = block.spans, wanted.mask(block.spans.step)
    without_number = spans.step < 0
    if without_number.any():
        for rows in block.slices().values():
            steps = rows.start + np.flatnonzero(chosen[rows] & (spans.kind[rows] == schema.STEP))
            if len(steps):
                start, end = spans.start[steps], spans.end[steps]
                order = np.argsort(start, kind="stable")
                at = np.searchsorted(start[order], spans.start[rows], side="right") - 1
                is_within = (at >= 0) & (spans.start[rows] < end[order][np.maximum(at, 0)])
                chosen[rows] |= without_number[rows] & is_within
    return chosen
