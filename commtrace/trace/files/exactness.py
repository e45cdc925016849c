"""Tell which starts and ends are exact in recordings of versions that did not write it.

They wrote the timing ``unknown`` where an end is an upper bound. They called every start exact, but NCCL runs the
operations of a communicator one after another: one that was launched while an earlier one was in flight started after
that one had ended. The recorder moved its start there if it knew that end exactly; otherwise the start is the launch, a
lower bound.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int64, Spans

_OF_DEVICE: Final = (schema.CUDA_EVENT_TIMING, schema.NCCL_TIMING, schema.UNKNOWN_TIMING)

_NEVER: Final = np.iinfo(np.int64).max


def exact_ends(spans: Spans) -> Bool:
    return np.asarray(spans.timing != schema.UNKNOWN_TIMING)


def exact_starts(spans: Spans, rank: Int64, is_unfinished: Bool) -> Bool:
    """Mark the rows whose start is not before the end of the operation before it on its communicator.

    Args:
        rank: of each row, or its position.
        is_unfinished: the rows without an end; what was launched behind one has no exact start.
    """
    is_operation = (spans.kind == schema.COLLECTIVE) | (spans.kind == schema.P2P)
    rows = np.flatnonzero(is_operation & np.isin(spans.timing, _OF_DEVICE))
    exact = np.ones(len(spans), np.bool_)
    if not len(rows):
        return exact
    rows = rows[np.lexsort((spans.id[rows], spans.group[rows], rank[rows]))]  # ids count launches
    communicator = np.stack([rank[rows], spans.group[rows], _pair(spans, rows, rank)])
    order = np.lexsort((spans.id[rows], *communicator[::-1]))
    rows, communicator = rows[order], communicator[:, order]
    begins = _begins_launch(spans, rows, rank)
    launch = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    end = np.where(is_unfinished[rows], _NEVER, spans.end[rows])
    launch_end = np.maximum.reduceat(end, first)
    is_same = (communicator[:, first[1:]] == communicator[:, first[:-1]]).all(axis=0)
    end_before = np.concatenate([[-_NEVER], np.where(is_same, launch_end[:-1], -_NEVER)])
    is_late = spans.start[rows] < end_before[launch]
    exact[rows[is_late & (spans.timing[rows] != schema.NCCL_TIMING)]] = False
    return exact


def _begins_launch(spans: Spans, rows: Int64, rank: Int64) -> Bool:
    """Mark the rows that are not in the coalescing bracket of the row before; those of a bracket run together."""
    before, behind = rows[:-1], rows[1:]
    is_next = (rank[before] == rank[behind]) & (spans.group[before] == spans.group[behind])
    is_next &= spans.id[behind] == spans.id[before] + 1
    is_next &= spans.op_in_seq[behind] == spans.op_in_seq[before] + 1
    return np.concatenate([[True], ~is_next])


def _pair(spans: Spans, rows: Int64, rank: Int64) -> Int64:
    """Return the other rank of messages outside of brackets, which have a communicator per pair; else −1."""
    begins = _begins_launch(spans, rows, rank)
    is_alone = begins & np.append(begins[1:], True)
    is_message = (spans.kind[rows] == schema.P2P) & is_alone
    return np.where(is_message, spans.peer[rows], schema.NOT_APPLICABLE).astype(np.int64)
