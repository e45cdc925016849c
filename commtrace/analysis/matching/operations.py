"""Properties of communication operations, and selections of rows by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from commtrace.trace import schema
from commtrace.trace.blocks import Block
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Bool, Int32, Spans

ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
"""Collectives with a root: a member may end before the last one arrives."""

SYNCHRONISING: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end on no member before all have arrived."""

BYTES_DIFFER: Final = ("all_to_all", "gather", "scatter", "barrier")
"""Collectives whose members may record different numbers of bytes."""

ONLY_KERNELS: Final = (
    "Stragglers were not looked for: kernels show when a rank computes, not for which microbatch or phase. How long "
    "each rank waited, and how long others waited for it, is in the summary (wait_ns and blame_ns with --json)."
)
"""The reason that a trace of kernels has no stragglers."""


def communication_rows(spans: Spans) -> Bool:
    return np.asarray((spans.kind == schema.COLLECTIVE) | (spans.kind == schema.P2P))


def replayed_rows(spans: Spans) -> Bool:
    """Mark communications in replays of CUDA graphs: what they sent is known, and not when in the replay."""
    return np.asarray(spans.timing == schema.REPLAY_TIMING)


def timed_rows(spans: Spans) -> Bool:
    """Mark communications that have times of their own."""
    return np.asarray(communication_rows(spans) & ~replayed_rows(spans))


def named(run: Run, spans: Spans, operations: Iterable[str]) -> Bool:
    """Return a mask of the rows with one of these names."""
    return codes_named(run, spans.name, operations)


def codes_named(run: Run, codes: Int32, operations: Iterable[str]) -> Bool:
    """Return a mask of the name codes that stand for one of these names."""
    chosen = np.zeros(max(len(run.names), 1) + 1, np.bool_)
    chosen[[code for operation in operations if (code := run.name_code(operation)) >= 0]] = True
    return chosen.take(codes)  # name −1 reads the last entry, which is never chosen


def is_kernel_trace(spans: Spans) -> bool:
    """Return whether the rows are kernels: all work of the device, from which exposed time follows."""
    return bool((spans.timing == schema.KERNEL_TIMING).any())


def of_one_sort(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, with those in which only some ranks have kernels split into ranks."""
    return [part for block in blocks for part in ([*block.single()] if _is_mixed(block) else [block])]


def _is_mixed(block: Block) -> bool:
    traced = block.spans.timing == schema.KERNEL_TIMING
    return bool(traced.any()) and not all(part.any() for part in block.split(traced).values())


def unfinished_rows(trace: RankTrace) -> Bool:
    """Return a mask of communications without an end, so of unknown duration."""
    ids = unfinished_ids(trace)
    if not ids:
        return np.zeros(len(trace.spans), np.bool_)
    return communication_rows(trace.spans) & np.isin(trace.spans.id, ids)


def unfinished_ids(trace: RankTrace) -> list[int]:
    return [number for number, detail in trace.details.items() if '"unfinished"' in detail]


def unfinished_rows_of(run: Run, block: Block) -> Bool:
    unfinished = np.zeros(len(block), np.bool_)
    for rank, rows in block.slices().items():
        if run.ranks[rank].details:
            unfinished[rows] = unfinished_rows(run.ranks[rank])
    return unfinished
