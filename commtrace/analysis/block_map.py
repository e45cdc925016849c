"""Does something to all rows of a run, a block of ranks at a time, several blocks side by side.

A block is worked through in long columns, on which numpy lets other threads go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from commtrace.trace import schema
from commtrace.trace.blocks import Block

_MOST_THREADS: Final = 4
"""Each needs the memory of a block; and between two columns they take turns."""

_Block = TypeVar("_Block", Block, int)
_Result = TypeVar("_Result")


def map_blocks(function: Callable[[_Block], _Result], blocks: Sequence[_Block]) -> list[_Result]:
    """``function`` of every block, or of every number of one, in their order."""
    threads = min(os.cpu_count() or 1, _MOST_THREADS, len(blocks))
    if threads < 2:
        return [function(block) for block in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, blocks))


def of_one_sort(blocks: Sequence[Block]) -> list[Block]:
    """The blocks; those in which the kernels of some ranks were traced, and of others not, rank by rank."""
    return [one for block in blocks for one in _of_one_sort(block)]


def _of_one_sort(block: Block) -> Iterator[Block]:
    traced = block.spans.timing == schema.KERNEL_TIMING
    if traced.any() and not all(part.any() for part in block.split(traced).values()):
        return block.single()
    return iter((block,))
