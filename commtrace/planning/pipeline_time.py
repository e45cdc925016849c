"""How long a pipeline takes: its schedule becomes a graph, which is replayed with the times of each stage.

The closed formula (m − 1)·max(F + B) + Σ(F + B) is exact only for equal stages and messages that take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.prediction.pipeline_graph import PipelineGraph, pipeline_graph
from commtrace.trace.schedule import BACKWARD, FORWARD, default_schedule, orders
from commtrace.trace.spans import Int64

_SHAPES_KEPT: Final = 128

PAIRS: Final = tuple((before, after) for before in (FORWARD, BACKWARD) for after in (FORWARD, BACKWARD))
"""What may follow what on a stage."""


class ChunkTimes(NamedTuple):
    """One model chunk of a stage: the times of one microbatch."""

    forward_ns: int
    backward_ns: int

    @property
    def both_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a stage does besides its forwards and backwards, ns."""

    head_ns: float = 0.0  # before its first forward
    between_ns: Mapping[tuple[str, str], float] = field(default_factory=lambda: dict.fromkeys(PAIRS, 0.0))


class _Shape(NamedTuple):
    """What all pipelines with so many stages, chunks and microbatches have in common."""

    graph: PipelineGraph
    gap: Int64  # of each action: its number among the stage's kinds of gaps, 0 for the head
    part: Int64  # of each action: its number among the stage's times, 2 · chunk, + 1 for a backward
    link: Int64  # of each message: the stage before the link that it takes


@lru_cache(_SHAPES_KEPT)
def _shape(stages: int, chunks: int, microbatches: int) -> _Shape:
    by_stage = orders(default_schedule(chunks), stages, microbatches, chunks)
    graph = pipeline_graph(by_stage)
    is_backward = np.array([action.letter == BACKWARD for action in graph.actions])
    chunk = np.array([action.chunk for action in graph.actions])
    gap = 1 + 2 * np.append(0, is_backward[:-1]) + is_backward
    gap[graph.first_action[:-1]] = 0
    sender = graph.stage[graph.sender]
    link = np.where(is_backward[graph.receiver], graph.stage[graph.receiver], sender)
    return _Shape(graph, gap, 2 * chunk + is_backward, link)


def pipeline_ns(
    stages: Sequence[Sequence[ChunkTimes]],
    microbatches: int,
    message_ns: Sequence[int] = (),
    gaps: Sequence[Gaps] = (),
    send_delay_ns: Sequence[int] = (),
    *,
    receives_early: bool = False,
) -> int:
    """Return the time from the start of all stages to the last backward of any stage.

    Args:
        stages: The chunks of each stage.
        microbatches: Of an iteration. With several chunks a multiple of the number of stages.
        message_ns: Of each stage, what an activation to the next stage takes, and a gradient from it. A message begins
            when both sides are ready, and the receiver works on when it has ended. Empty: no time.
        gaps: Of each stage. Empty: none.
        send_delay_ns: Of each stage, from the end of an action until its message is sent. Empty: none.
        receives_early: Messages are received while their receiver works.
    """
    shape = _shape(len(stages), len(stages[0]), microbatches)
    graph = shape.graph
    nothing = [0] * len(stages)
    times = np.array([[ns for chunk in stage for ns in chunk] for stage in stages], np.int64)
    between = np.array(
        [[gap.head_ns, *(gap.between_ns[pair] for pair in PAIRS)] for gap in gaps or [Gaps()] * len(stages)]
    )
    weights = graph.weights(
        np.rint(between).astype(np.int64)[graph.stage, shape.gap],
        times[graph.stage, shape.part],
        np.array(send_delay_ns or nothing, np.int64)[graph.stage[graph.sender]],
        np.array(message_ns or nothing, np.int64)[shape.link],
        receives_early=receives_early,
    )
    return graph.phase_ns(weights)


def shortest_pipeline_ns(stages: Sequence[Sequence[ChunkTimes]], microbatches: int) -> int:
    """Return a bound that no schedule goes below.

    The busiest stage does all its work; before its first forward the stages before it do one forward each, and after
    its last backward one backward each.
    """
    return max(
        microbatches * sum(chunk.both_ns for chunk in chunks) + sum(before[0].both_ns for before in stages[:stage])
        for stage, chunks in enumerate(stages)
    )
