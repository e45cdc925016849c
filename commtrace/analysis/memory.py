"""How much device memory each rank held at its peak, as torch's allocator counted it.

>>> peak_memory(run)[0].allocated_bytes  # doctest: +SKIP
44238675968
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commtrace.trace.run import Run


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak memory of a rank since its process began, or since the script reset its statistics."""

    rank: int
    stage: int | None  # of the pipeline; None if the job did not say
    allocated_bytes: int  # of tensors: torch.cuda.max_memory_allocated
    reserved_bytes: int  # held for tensors: torch.cuda.max_memory_reserved
    step: int  # at whose end a peak rose for the last time


def peak_memory(run: Run) -> tuple[RankMemory, ...]:
    """Return the peak memory of the ranks that recorded one: those that train on a device, by rank."""
    return tuple(
        RankMemory(
            rank=rank,
            stage=trace.coordinates.get("pp"),
            allocated_bytes=trace.peak_memory.allocated_bytes,
            reserved_bytes=trace.peak_memory.reserved_bytes,
            step=trace.peak_memory.step,
        )
        for rank, trace in run.ranks.items()
        if trace.peak_memory is not None
    )


def fullest(peaks: Sequence[RankMemory]) -> RankMemory:
    """Return the rank that held most; the first of several."""
    return max(peaks, key=lambda one: (one.allocated_bytes, -one.rank))
