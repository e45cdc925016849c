"""Finds the rows of all ranks that are one communication, with one sort of all communication rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.keys import numbered, pack
from commtrace.analysis.matching.operations import communication_rows, named, unfinished_rows_of
from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.order import stable_order
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int32, Int64, Spans


class Rows(NamedTuple):
    """Communication rows of all ranks, one rank after the other.

    Attributes:
        rank: of the row.
        clock: number of its clock.
        position: in its block.
        is_send: the row is a send.
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
        """Return only these rows."""
        own = np.flatnonzero(chosen)
        return Rows(
            self.rank[own], self.clock[own], self.position[own], self.is_send[own], self.finished[own],
            self.spans.take(own),
        )  # fmt: skip


class Buckets(NamedTuple):
    """Rows sorted so that those of one communication are neighbours.

    Attributes:
        order: sorts the rows.
        first: position of each bucket's first sorted row.
        size: number of rows by bucket.
        of_sorted_row: bucket of each sorted row.
    """

    order: Int64
    first: Int64
    size: Int64
    of_sorted_row: Int64

    def maximum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the largest value in each bucket; values are aligned with the unsorted rows."""
        return np.asarray(np.maximum.reduceat(values[self.order], self.first))

    def minimum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the smallest value in each bucket."""
        return np.asarray(np.minimum.reduceat(values[self.order], self.first))

    def differ(self, values: npt.NDArray[Any]) -> Bool:
        """Return the buckets with different values."""
        ordered = values[self.order]
        changes = ordered[1:] != ordered[:-1]
        changes &= self.of_sorted_row[1:] == self.of_sorted_row[:-1]
        found = np.zeros(len(self.first), np.bool_)
        found[self.of_sorted_row[1:][changes]] = True
        return found

    def of_row(self) -> Int64:
        """Return the bucket of each unsorted row."""
        buckets = np.empty(len(self.order), np.int64)
        buckets[self.order] = self.of_sorted_row
        return buckets


def gather(run: Run, chosen: Callable[[Block], Bool] | None = None) -> Rows:
    """Return the communication rows that know their group, of all ranks.

    Args:
        run: with its ranks.
        chosen: returns the rows of a block to take.
    """
    return concatenate(gather_blocks(run, chosen))


def gather_blocks(run: Run, chosen: Callable[[Block], Bool] | None = None) -> list[Rows]:
    """Return likewise the rows of each block."""
    number_of_clock = {key: number for number, key in enumerate(dict.fromkeys(t.clock_key for t in run.ranks.values()))}

    def of_block(block: Block) -> Rows:
        selected = communication_rows(block.spans) & (block.spans.group >= 0)
        position = np.flatnonzero(selected & chosen(block) if chosen else selected)
        spans = block.spans.take(position)
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


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts."""
    rank, clock, position, is_send, finished = (
        np.concatenate([part[column] for part in parts]) for column in range(len(Rows._fields) - 1)
    )
    return Rows(rank, clock, position, is_send, finished, Spans.concatenate([part.spans for part in parts]))


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
