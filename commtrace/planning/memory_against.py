"""The memory that a plan expects on each stage beside the peak that its ranks recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from commtrace.analysis.memory import RankMemory, fullest
from commtrace.planning.memory import Memory

ALIKE: Final = 0.05
"""A peak is as planned within this share of the plan: workspaces and the rounding of blocks always add a little."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The peak of the fullest of some ranks for which the same is planned."""

    ranks: tuple[int, ...]  # that recorded a peak
    planned: Memory | None  # None if the plan has no memory
    fullest_rank: int
    measured_bytes: int  # of tensors, on this rank
    lowest_bytes: int  # of tensors, on the one of these ranks that held least
    reserved_bytes: int  # on the fullest rank
    reason: str  # a sentence; empty if the peak is as planned, and without a plan


def memory_beside(
    expected: Iterable[tuple[Sequence[int], Memory | None]], peaks: Iterable[RankMemory]
) -> Iterator[MemoryRow]:
    """Yield the planned memory of ranks beside what they recorded; nothing for ranks without a recorded peak."""
    by_rank = {one.rank: one for one in peaks}
    for ranks, planned in expected:
        own = [by_rank[rank] for rank in ranks if rank in by_rank]
        if own:
            most = fullest(own)
            yield MemoryRow(
                ranks=tuple(one.rank for one in own),
                planned=planned,
                fullest_rank=most.rank,
                measured_bytes=most.allocated_bytes,
                lowest_bytes=min(one.allocated_bytes for one in own),
                reserved_bytes=most.reserved_bytes,
                reason="" if planned is None else _reason(planned, most.allocated_bytes),
            )


def _reason(planned: Memory, measured_bytes: int) -> str:
    """Return what can make the difference. A peak alone does not tell which of it did."""
    kept = planned.peak_bytes - planned.activations_bytes
    if abs(measured_bytes - planned.peak_bytes) <= ALIKE * planned.peak_bytes:
        return ""
    if measured_bytes > planned.peak_bytes:
        return (
            "More than planned: the plan has no workspaces, no temporary tensors of kernels and of the loss, and no "
            "buffers of the framework. Or more activations are kept: less recomputation, more microbatches in flight."
        )
    if measured_bytes < kept:
        return (
            "Less than parameters, gradients and optimizer states would take: smaller types, a sharding that the plan "
            "lacks, or a recording without an optimizer step."
        )
    return "Parameters, gradients and optimizer states fit in it; fewer activations are kept than planned."
