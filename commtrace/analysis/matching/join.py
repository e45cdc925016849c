"""Brings together the rows of all ranks that are one communication: one sort over all communication rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import numbered, pack
from commtrace.analysis.matching.operations import communication_rows, named, unfinished_rows_of
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.order import stable_order
from commtrace.trace.run import Run
from commtrace.trace.spans import DTYPE_OF_COLUMN, Bool, Int32, Int64, Spans


class Rows(NamedTuple):
    """Communication rows of all ranks, one rank after the other.

    Attributes:
        rank: which rank the row is of.
        clock: number of the clock that its times were read on.
        position: of the row in its block.
        is_send: it is the sending side of a point-to-point operation.
        finished: its end was seen.
        spans: the rows themselves.
    """

    rank: Int32
    clock: Int32
    position: Int64
    is_send: Bool
    finished: Bool
    spans: Spans

    def take(self, chosen: Bool) -> Rows:
        """Return only these rows; the rows themselves where they are all of them."""
        if chosen.all():
            return self
        own = np.flatnonzero(chosen)
        return Rows(
            self.rank[own], self.clock[own], self.position[own], self.is_send[own], self.finished[own],
            self.spans.take(own),
        )  # fmt: skip


class Buckets(NamedTuple):
    """Rows sorted so that those of one communication are neighbours.

    Attributes:
        order: sorts the rows.
        first: where each bucket begins in the sorted rows.
        size: how many rows each bucket has.
        of_sorted_row: the bucket of each sorted row.
    """

    order: Int64
    first: Int64
    size: Int64
    of_sorted_row: Int64

    def maximum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Largest value in each bucket, of values aligned with the unsorted rows."""
        return np.asarray(np.maximum.reduceat(values[self.order], self.first))

    def minimum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Smallest value in each bucket."""
        return np.asarray(np.minimum.reduceat(values[self.order], self.first))

    def differ(self, values: npt.NDArray[Any]) -> Bool:
        """Buckets whose rows do not all have the same value."""
        ordered = values[self.order]
        changes = ordered[1:] != ordered[:-1]
        changes &= self.of_sorted_row[1:] == self.of_sorted_row[:-1]
        found = np.zeros(len(self.first), np.bool_)
        found[self.of_sorted_row[1:][changes]] = True
        return found

    def of_row(self) -> Int64:
        """The bucket of each unsorted row."""
        buckets = np.empty(len(self.order), np.int64)
        buckets[self.order] = self.of_sorted_row
        return buckets


IDENTITY: Final = frozenset({"kind", "group", "seq", "op_in_seq", "peer"})
"""The columns by which rows are recognised as one communication."""

_EMPTY: Final = Spans.empty()
_OF_ROWS: Final = ("rank", "clock", "position", "is_send", "finished")


def gather(run: Run, chosen: Callable[[Block], Bool] | None = None, columns: Collection[str] | None = None) -> Rows:
    """The communication rows of a run that know their group; of those, what ``chosen`` selects.

    Args:
        run: with its ranks.
        chosen: which rows of a block.
        columns: only these are copied, the others are −1 throughout; None for all. Copying is most of the work.
    """
    return concatenate(gather_blocks(run, chosen, columns), columns)


def gather_blocks(
    run: Run, chosen: Callable[[Block], Bool] | None = None, columns: Collection[str] | None = None
) -> list[Rows]:
    """The same, block by block."""
    number_of_clock = {key: number for number, key in enumerate(dict.fromkeys(t.clock_key for t in run.ranks.values()))}

    def of_block(block: Block) -> Rows:
        selected = communication_rows(block.spans) & (block.spans.group >= 0)
        position = np.flatnonzero(selected & chosen(block) if chosen else selected)
        spans = block.spans.take(position) if columns is None else _columns(block.spans, position, columns)
        clock = np.array([number_of_clock[run.ranks[rank].clock_key] for rank in block.ranks], np.int32)
        return Rows(
            rank=block.rank()[position],
            clock=block.per_row(clock)[position],
            position=position,
            is_send=(spans.kind == schema.P2P) & named(run, spans, ("send",)),
            finished=~unfinished_rows_of(run, block)[position],
            spans=spans,
        )

    return [of_block(block) for block in run.blocks]


def concatenate(parts: Sequence[Rows], columns: Collection[str] | None = None) -> Rows:
    """Rows one behind the other; ``columns`` as of :func:`gather`."""
    spans = [part.spans for part in parts]
    copied = [name for name in DTYPE_OF_COLUMN if columns is None or name in columns]
    of_spans = {name: np.concatenate([getattr(own, name) for own in spans]) for name in copied}
    rank, clock, position, is_send, finished = (
        np.concatenate([getattr(part, name) for part in parts]) for name in _OF_ROWS
    )
    count = sum(map(len, spans))
    own_columns = (of_spans[name] if name in of_spans else _nothing(name, count) for name in DTYPE_OF_COLUMN)
    return Rows(rank, clock, position, is_send, finished, Spans(*own_columns))


def _columns(spans: Spans, rows: Int64, columns: Collection[str]) -> Spans:
    """Only some columns; the others are filled in when the ranks are put together, which is cheaper."""
    return Spans(
        *(getattr(spans, name)[rows] if name in columns else getattr(_EMPTY, name) for name in DTYPE_OF_COLUMN)
    )


def _nothing(name: str, count: int) -> npt.NDArray[Any]:
    """A column of "does not apply" that takes no memory."""
    return np.broadcast_to(np.array(schema.NOT_APPLICABLE).astype(DTYPE_OF_COLUMN[name]), count)


def bucket(rows: Rows) -> Buckets:
    """Sort the rows by what identifies a communication."""
    spans = rows.spans
    p2p = np.flatnonzero(spans.kind == schema.P2P)
    own, peer, is_send = rows.rank[p2p], spans.peer[p2p], rows.is_send[p2p]
    pair = np.full(len(spans), schema.NOT_APPLICABLE, np.int64)
    pair[p2p] = pack((np.where(is_send, own, peer), np.where(is_send, peer, own)))
    # The seq of a P2P counts its pair alone; only collectives of one bracket need the index to tell them apart.
    op_in_seq = spans.op_in_seq.copy()
    op_in_seq[p2p] = 0
    key = pack((numbered(spans.group), pair, spans.seq, op_in_seq))
    order = stable_order(key)
    ordered = key[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = np.flatnonzero(is_first)
    return Buckets(order, first, np.diff(np.append(first, len(order))), np.cumsum(is_first) - 1)
