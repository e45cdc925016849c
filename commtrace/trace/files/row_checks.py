"""Finds rows that no recorder writes, which readers leave out."""

from __future__ import annotations

from typing import Final

import numpy as np

from commtrace.trace import schema
from commtrace.trace.spans import Bool, Int64, Spans

_LATEST_NS: Final = 2**61
"""In the year 2043 of an imported trace; differences of such times fit into 64 bits."""
LONGEST_NS: Final = 2**55
"""A year and a month."""
_MOST_BYTES: Final = 2**47
"""141 TB in one communication."""
_AT_LEAST_NONE: Final = (
    "step", "microbatch", "chunk", "stage", "group", "seq", "op_in_seq", "bytes", "self_bytes", "peer", "id",
    "stalled_on", "dtype",
)  # fmt: skip
_OF_EVERY_ROW: Final = ("kind", "name", "lane", "timing")


def possible_rows(spans: Spans, most_ranks: Int64) -> Bool:
    """Return for each row whether a recorder can have written it.

    Args:
        most_ranks: no rank of the job that each row is from has this number.
    """
    # Not by np.abs: of the smallest int64 it is negative.
    possible = (spans.start > -_LATEST_NS) & (spans.start < _LATEST_NS)
    possible &= (spans.end > -_LATEST_NS) & (spans.end < _LATEST_NS)
    length = spans.end - spans.start  # may wrap where a time is impossible anyway
    possible &= (length >= 0) & (length < LONGEST_NS)
    for name in _OF_EVERY_ROW:
        possible &= getattr(spans, name) >= 0
    for name in _AT_LEAST_NONE:
        possible &= getattr(spans, name) >= schema.NOT_APPLICABLE
    possible &= (spans.bytes < _MOST_BYTES) & (spans.self_bytes < _MOST_BYTES)
    return np.asarray(possible & (spans.peer < most_ranks))
