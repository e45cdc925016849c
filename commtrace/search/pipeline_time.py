"""How long a pipeline takes: its schedule is replayed, each forward and backward after what it depends on.

The closed formula (m − 1)·max(F + B) + Σ(F + B) is exact only for equal stages and messages that take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commtrace.schedule import FORWARD, default_schedule, orders


class ChunkTimes(NamedTuple):
    """One model chunk of a stage: the times of one microbatch."""

    forward_ns: int
    backward_ns: int

    @property
    def both_ns(self) -> int:
        return self.forward_ns + self.backward_ns


def pipeline_ns(stages: Sequence[Sequence[ChunkTimes]], microbatches: int, message_ns: Sequence[int] = ()) -> int:
    """Return the time from the first forward to the last backward of any stage.

    Args:
        stages: The chunks of each stage.
        microbatches: Of an iteration. With several chunks a multiple of the number of stages.
        message_ns: Of each stage, what an activation to the next stage takes, and a gradient from it. A message begins
            when both sides are ready, and the receiver works on when it has ended. Empty: no time.
    """
    pipeline, chunks = len(stages), len(stages[0])
    parts = pipeline * chunks  # of the model, in the order of its layers: part = chunk · pipeline + stage
    last_part = parts - 1
    forward_end = [[-1] * microbatches for _ in range(parts)]
    backward_end = [[-1] * microbatches for _ in range(parts)]
    by_stage = orders(default_schedule(chunks), pipeline, microbatches, chunks)
    free = [0] * pipeline
    position = [0] * pipeline
    messages = message_ns or [0] * pipeline
    waiting = set(range(pipeline))
    while waiting:
        has_moved = False
        for stage in sorted(waiting):
            order, times = by_stage[stage], stages[stage]
            while position[stage] < len(order):
                letter, microbatch, chunk = order[position[stage]]
                is_forward = letter == FORWARD
                part = chunk * pipeline + stage
                if is_forward:
                    ready = 0 if part == 0 else forward_end[part - 1][microbatch]
                elif part == last_part:
                    ready = forward_end[part][microbatch]
                else:
                    ready = backward_end[part + 1][microbatch]
                if ready < 0:
                    break
                is_own = part == (0 if is_forward else last_part)
                sender = stage - 1 if is_forward else stage  # −1: from the last stage to the next chunk of the first
                start = max(free[stage], ready) + (0 if is_own or pipeline == 1 else messages[sender])
                if is_forward:
                    free[stage] = forward_end[part][microbatch] = start + times[chunk].forward_ns
                else:
                    free[stage] = backward_end[part][microbatch] = start + times[chunk].backward_ns
                position[stage] += 1
                has_moved = True
        waiting = {stage for stage in waiting if position[stage] < len(by_stage[stage])}
        assert has_moved or not waiting, "the schedule waits for itself"
    return max(free)


def shortest_pipeline_ns(stages: Sequence[Sequence[ChunkTimes]], microbatches: int) -> int:
    """Return a bound that no schedule goes below.

    The busiest stage does all its work; before its first forward the stages before it do one forward each, and after
    its last backward one backward each.
    """
    return max(
        microbatches * sum(chunk.both_ns for chunk in own) + sum(before[0].both_ns for before in stages[:stage])
        for stage, own in enumerate(stages)
    )
