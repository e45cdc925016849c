"""The ideal pipeline schedule of a layout: what is in flight on a stage, and the bubble."""

from __future__ import annotations

from typing import NamedTuple

from commtrace.planning.layout import Layout


class Bubble(NamedTuple):
    """The ideal bubble of a rank: all stages take the same time, and messages none."""

    fraction_of_step: float
    ratio_to_work: float


def ideal_bubble(layout: Layout) -> Bubble:
    """Return (p − 1)/(v·m + p − 1) and (p − 1)/(v·m) of 1F1B and its interleaved form.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    idle, work = layout.pp - 1, layout.chunks * layout.microbatches
    return Bubble(idle / (work + idle), idle / work)


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Return how many forwards of a model chunk a stage has done at most before their backwards.

    The warm-up of Megatron-core and one more: p − r microbatches on stage r; with v chunks
    2(p − r − 1) + (v − 1)p + 1 chunks.
    """
    stages_after = layout.pp - stage - 1
    if layout.chunks == 1:
        return min(layout.microbatches, stages_after + 1)
    return min(layout.microbatches * layout.chunks, 2 * stages_after + (layout.chunks - 1) * layout.pp + 1)
