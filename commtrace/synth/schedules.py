"""Order the forwards and backwards of each stage by pipeline schedule."""

from __future__ import annotations

from typing import Final, NamedTuple

from commtrace.synth.job import GPIPE, INTERLEAVED, ZERO_BUBBLE

FORWARD: Final = "F"
BACKWARD: Final = "B"
WEIGHTS: Final = "W"


class Action(NamedTuple):
    """A forward, a backward, or a deferred backward of the weights."""

    letter: str
    microbatch: int
    chunk: int = 0


def stage_order(schedule: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Action]:
    if schedule == GPIPE:
        return [Action(letter, number) for letter in (FORWARD, BACKWARD) for number in range(microbatches)]
    total = microbatches * chunks
    if schedule == INTERLEAVED:
        warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
        forwards = [_interleaved(number, stages, chunks, FORWARD) for number in range(total)]
        backwards = [_interleaved(number, stages, chunks, BACKWARD) for number in range(total)]
    else:
        warm_up = min(stages - stage - 1, total)
        forwards = [Action(FORWARD, number) for number in range(total)]
        backwards = [Action(BACKWARD, number) for number in range(total)]
    order = _one_forward_one_backward(forwards, backwards, warm_up)
    return _put_off_weights(order, stage) if schedule == ZERO_BUBBLE else order


def ideal_step_ns(
    schedule: str, stages: int, microbatches: int, chunks: int, forward_ns: int, backward_ns: int, weight_ns: int
) -> int:
    """Return the length of a step of forwards and backwards alone: (v·m + p − 1)(F + B), ns.

    With at least p microbatches, the bubble of zero-bubble is (p − 1)(F + B − 2W): schedule ZB-H1 of "Zero Bubble
    Pipeline Parallelism" (ICLR 2024).
    """
    work = chunks * microbatches * (forward_ns + backward_ns)
    hidden = 2 * weight_ns if schedule == ZERO_BUBBLE else 0
    return work + (stages - 1) * (forward_ns + backward_ns - hidden)


def _one_forward_one_backward(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _interleaved(number: int, stages: int, chunks: int, letter: str) -> Action:
    """Return the n-th action in Megatron's order: p microbatches per chunk, backwards from the last chunk."""
    round_, place = divmod(number, stages * chunks)
    chunk, microbatch = divmod(place, stages)
    return Action(letter, round_ * stages + microbatch, chunk if letter == FORWARD else chunks - 1 - chunk)


def _put_off_weights(order: list[Action], stage: int) -> list[Action]:
    """Add the backward of the weights, ``stage`` backwards later, the last ones at the end."""
    late: list[Action] = []
    full: list[Action] = []
    for action in order:
        full.append(action)
        if action.letter == BACKWARD:
            late.append(Action(WEIGHTS, action.microbatch, action.chunk))
            if len(late) > stage:
                full.append(late.pop(0))
    return full + late
