"""The order in which each stage of a schedule works.

>>> [str(action) for action in orders_of("1f1b", stages=2, microbatches=2)[0]]
['F0', 'F1', 'B0', 'B1']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from commtrace.errors import ConfigurationError

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT: Final = "I"
WEIGHTS: Final = "W"

GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved"
ZERO_BUBBLE: Final = "zero-bubble"


class Action(NamedTuple):
    """A forward, a backward, or the part of a backward for the inputs or the weights."""

    letter: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.letter}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def orders_of(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return what each stage does in a step.

    ``zero-bubble`` is schedule ZB-H1 of "Zero Bubble Pipeline Parallelism" (ICLR 2024), with chunks the interleaved
    form of torch.distributed.pipelining: stage r runs the weights' part of a backward r backwards later.

    Raises:
        ConfigurationError: the schedule cannot run so many chunks or microbatches.
    """
    _check(schedule, stages, microbatches, chunks)
    return tuple(tuple(_order(schedule, stage, stages, microbatches, chunks)) for stage in range(stages))


def _check(schedule: str, stages: int, microbatches: int, chunks: int) -> None:
    if schedule == ONE_F_ONE_B and chunks > 1:
        raise ConfigurationError(f"schedule 1f1b has one chunk per stage, not {chunks}: take interleaved")
    if schedule == INTERLEAVED and chunks < 2 <= stages:
        raise ConfigurationError("schedule interleaved needs several chunks per stage: add --chunks 2")
    if chunks > 1 and schedule != GPIPE and microbatches % stages:
        raise ConfigurationError(
            f"the {schedule} schedule with chunks takes microbatches in groups of the {stages} stages: {microbatches} "
            "is no multiple"
        )


def _order(schedule: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    total = microbatches * chunks
    if schedule == GPIPE:
        return [
            *(Action(FORWARD, number % microbatches, number // microbatches) for number in range(total)),
            *(Action(BACKWARD, number % microbatches, chunks - 1 - number // microbatches) for number in range(total)),
        ]
    ahead = 1 if chunks == 1 or schedule == ZERO_BUBBLE else 2
    warm_up = min(ahead * (stages - stage - 1) + (chunks - 1) * stages, total)
    forwards = [_nth(number, stages, chunks, FORWARD) for number in range(total)]
    backwards = [_nth(number, stages, chunks, BACKWARD) for number in range(total)]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[total - warm_up :]
    return _weights_later(order, stage) if schedule == ZERO_BUBBLE else order


def _nth(number: int, stages: int, chunks: int, letter: str) -> Action:
    """Return the n-th forward or backward: as many microbatches as stages through a chunk, then the next chunk."""
    if chunks == 1:
        return Action(letter, number)
    group, place = divmod(number, stages * chunks)
    chunk, microbatch = divmod(place, stages)
    return Action(letter, group * stages + microbatch, chunk if letter == FORWARD else chunks - 1 - chunk)


def _weights_later(order: Sequence[Action], delay: int) -> list[Action]:
    later: list[Action] = []
    split: list[Action] = []
    for action in order:
        if action.letter != BACKWARD:
            split.append(action)
            continue
        split.append(action._replace(letter=INPUT))
        later.append(action._replace(letter=WEIGHTS))
        if len(later) > delay:
            split.append(later.pop(0))
    return split + later
