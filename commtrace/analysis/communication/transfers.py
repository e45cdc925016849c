"""The large calls whose transfer is known: what they moved, and how long it took.

A send is none of them: its end may come before the data arrive. The receive has it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.communication.links import SMALLEST_BYTES
from commtrace.analysis.keys import grouped_rows
from commtrace.analysis.matched import Context
from commtrace.analysis.matching.operations import codes_named, timed_rows
from commtrace.trace.blocks import Block
from commtrace.trace.run import Run
from commtrace.trace.spans import Bool, Int64, Spans

Float64 = npt.NDArray[np.float64]


class TransferColumns(NamedTuple):
    """Columns of equal length."""

    row: Int64  # of the block
    bus_bytes: Float64  # S · f of commtrace.analysis.communication.bandwidth
    ns: Int64  # after the last participant had arrived


def large_transfers(context: Context, block: Block) -> TransferColumns:
    """Return the calls of at least ``SMALLEST_BYTES`` in the steps that count, of exact transfer.

    That is, they were matched on all members, and neither a start nor their end is a bound.
    """
    spans, matches = block.spans, context.matches.ranks
    complete, mismatched, ready, ready_exact = (
        block.together({rank: getattr(matches[rank], column) for rank in block.ranks})
        for column in ("complete", "mismatched", "ready", "ready_exact")
    )
    group_size = block.together({rank: context.roles.ranks[rank].group_size for rank in block.ranks})
    transfer_ns = spans.end - ready
    chosen = complete & ~mismatched & (spans.bytes >= SMALLEST_BYTES) & (transfer_ns > 0) & (group_size > 1)
    chosen &= ready_exact & spans.end_exact
    chosen &= timed_rows(spans) & np.isin(spans.step, context.steps) & ~_named(context.run, spans)
    rows = np.flatnonzero(chosen)
    bus_bytes = np.zeros(len(rows))
    if len(rows):
        example, which = grouped_rows((spans.name[rows], group_size[rows]))
        for number, row in enumerate(rows[example].tolist()):
            of_kind = np.flatnonzero(which == number)
            operation, self_bytes = context.run.names[int(spans.name[row])], spans.self_bytes[rows[of_kind]]
            factors = bus_factors(operation, int(group_size[row]), self_bytes)
            bus_bytes[of_kind] = moved_bytes(operation, spans.bytes[rows[of_kind]], self_bytes) * factors
    return TransferColumns(rows, bus_bytes, transfer_ns[rows])


def _named(run: Run, spans: Spans) -> Bool:
    return codes_named(run, spans.name, ("send", *WITHOUT_BANDWIDTH))
