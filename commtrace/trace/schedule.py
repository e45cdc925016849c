"""Pipeline schedules: their names, the order in which each stage works, warm-up and bubble by formula.

>>> schedule_named("Interleaved1F1B")
'interleaved_1f1b'
>>> [str(action) for action in orders("1f1b", stages=2, microbatches=2)[0]]
['F0', 'F1', 'B0', 'B1']
>>> recognise([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], chunks=1)
RecognisedSchedule(name='1f1b', reason='')

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (SC 2021), section 2.2, for
1F1B and its interleaved form; Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024) for those whose backward is
split; Lamy-Poirier, "Breadth-First Pipeline Parallelism" (MLSys 2023).

p are the stages, m the microbatches, v the chunks of a stage, F and B the forward and the backward of one microbatch in
one chunk, and W the part of B that computes the gradients of weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from commtrace.errors import ConfigurationError

Number = TypeVar("Number", int, float)

NO_PIPELINING: Final = "no_pipelining"
GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved_1f1b"
LOOPED_BFS: Final = "looped_bfs"
ZB1P: Final = "zb1p"
INTERLEAVED_ZERO_BUBBLE: Final = "interleaved_zero_bubble"
ZBV: Final = "zbv"
DUALPIPEV: Final = "dualpipev"
OTHER_ZERO_BUBBLE: Final = "zero_bubble"
UNKNOWN: Final = "unknown"

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    NO_PIPELINING: ("forward_backward_no_pipelining",),
    GPIPE: (),
    ONE_F_ONE_B: ("forward_backward_pipelining_without_interleaving", "PipeDream-Flush", "TrainSchedule"),
    INTERLEAVED: ("interleaved", "Interleaved1F1B", "forward_backward_pipelining_with_interleaving"),
    LOOPED_BFS: ("breadth-first",),
    ZB1P: ("zero-bubble", "ZB-H1"),
    INTERLEAVED_ZERO_BUBBLE: (),
    ZBV: ("ZB-V", "ZBVZeroBubble"),
    DUALPIPEV: (),
}
"""Every schedule by the name that is printed, with what Megatron-core, DeepSpeed, torch and the papers call it besides.

Of a name only letters and digits count, and the word "schedule" does not: ``ScheduleGPipe`` is ``gpipe``.
``unknown`` and ``zero_bubble``, an order with split backwards that has no name here, are printed only: as the name of a
schedule to run, ``zero_bubble`` is ``zb1p``.
"""

WRITTEN: Final = (GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS, ZB1P, INTERLEAVED_ZERO_BUBBLE)
"""Schedules whose order :func:`orders` can write."""

_WITH_CHUNKS: Final = {GPIPE: LOOPED_BFS, ZB1P: INTERLEAVED_ZERO_BUBBLE}
"""What a schedule of one chunk is called if its stages have several."""

_OF_SEVERAL_CHUNKS: Final = frozenset({INTERLEAVED, LOOPED_BFS, INTERLEAVED_ZERO_BUBBLE})
_IN_GROUPS: Final = frozenset({INTERLEAVED, INTERLEAVED_ZERO_BUBBLE})
"""They take as many microbatches as there are stages through a chunk, then through the next one."""

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT: Final = "I"
WEIGHTS: Final = "W"


class Action(NamedTuple):
    """A forward, a backward, or the part of a backward for the inputs or the weights."""

    letter: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.letter}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).replace("schedule", "")


_BY_KEY: Final = {_key(text): name for name, aliases in NAMES.items() for text in (name, *aliases)}


def known_name(text: str) -> str | None:
    """Return the printed name of the schedule that ``text`` means; None if it means none."""
    return _BY_KEY.get(_key(text))


def schedule_named(text: str, among: Collection[str] = tuple(NAMES)) -> str:
    """Return the printed name of the schedule that ``text`` means.

    Raises:
        ConfigurationError: it means none, or none of ``among``. The message lists these.
    """
    name = known_name(text)
    if name is None:
        raise ConfigurationError(f"no schedule is called {text!r}: choose one of {', '.join(among)}")
    if name not in among:
        raise ConfigurationError(f"the schedule {name} can only be recognised: choose one of {', '.join(among)}")
    return name


def with_chunks(name: str, chunks: int) -> str:
    """Return the name of the schedule with so many chunks per stage: GPipe becomes looped BFS, ZB1P interleaved."""
    return _WITH_CHUNKS.get(name, name) if chunks > 1 else name


def as_chunked(name: str, chunks: int) -> str:
    """Return the schedule of the same kind for so many chunks per stage: of 1F1B its interleaved form, and back."""
    of_one = {INTERLEAVED: ONE_F_ONE_B, LOOPED_BFS: GPIPE, INTERLEAVED_ZERO_BUBBLE: ZB1P}.get(name, name)
    if chunks == 1:
        return of_one
    return INTERLEAVED if of_one == ONE_F_ONE_B else with_chunks(of_one, chunks)


def default_schedule(chunks: int) -> str:
    """Return 1F1B, or its interleaved form for several chunks."""
    return INTERLEAVED if chunks > 1 else ONE_F_ONE_B


def splits_backwards(name: str) -> bool:
    """Return whether the gradients of weights are computed apart from those of inputs."""
    return name in (ZB1P, INTERLEAVED_ZERO_BUBBLE, ZBV, DUALPIPEV, OTHER_ZERO_BUBBLE)


def check_sizes(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Check that a schedule can run so many chunks and microbatches. Raise ConfigurationError if not."""
    if name == ONE_F_ONE_B and chunks > 1:
        raise ConfigurationError(
            f"the schedule {name} has one chunk per stage, not {chunks}: take {INTERLEAVED}, or one chunk"
        )
    if name in _OF_SEVERAL_CHUNKS and chunks < 2 <= stages:
        raise ConfigurationError(f"the schedule {name} needs several chunks per stage: give 2 chunks or more")
    if name in _IN_GROUPS and chunks > 1 and microbatches % stages:
        raise ConfigurationError(
            f"the schedule {name} takes microbatches in groups of the {stages} stages: {microbatches} is no multiple. "
            "Change the microbatches or the global batch, or take one chunk"
        )


def orders(name: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Return what each stage does in a step.

    Of ``zb1p`` and its interleaved form, stage r runs the weights' part of a backward r backwards later.

    Args:
        name: One of :data:`WRITTEN`.
        stages: p.
        microbatches: m, of each replica.
        chunks: v, of each stage. With several, ``gpipe`` is ``looped_bfs``, ``zb1p`` ``interleaved_zero_bubble``.

    Raises:
        ConfigurationError: the schedule cannot run so many chunks or microbatches.
    """
    name = with_chunks(schedule_named(name, WRITTEN), chunks)
    check_sizes(name, stages, microbatches, chunks)
    return tuple(tuple(_order(name, stage, stages, microbatches, chunks)) for stage in range(stages))


def _order(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    # GPipe and looped BFS take all microbatches through a chunk, 1F1B has one chunk, the others take them in groups.
    group = microbatches if name in (GPIPE, LOOPED_BFS) or chunks == 1 else stages
    total = microbatches * chunks
    forwards = [_nth(number, group, chunks, FORWARD) for number in range(total)]
    backwards = [_nth(number, group, chunks, BACKWARD) for number in range(total)]
    ahead = warm_up(name, stage, stages, microbatches, chunks)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[total - ahead :]
    return _weights_later(order, stage) if splits_backwards(name) else order


def _nth(number: int, group: int, chunks: int, letter: str) -> Action:
    """Return the n-th forward or backward: a group of microbatches through a chunk, then through the next one."""
    round_, position = divmod(number, group * chunks)
    chunk, microbatch = divmod(position, group)
    return Action(letter, round_ * group + microbatch, chunk if letter == FORWARD else chunks - 1 - chunk)


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


def warm_up(
    name: str, stage: int, stages: int, microbatches: int, chunks: int = 1, group: int = 0, extra: int = 0
) -> int:
    """Return how many forwards a stage runs before it takes turns, a forward and then a backward.

    1F1B and ZB1P: p − r − 1 on stage r. With chunks 2(p − r − 1) + (v − 1)g, or (p − r − 1) + (v − 1)g if backwards are
    split. GPipe and looped BFS run all forwards first.

    Args:
        name: One of :data:`WRITTEN`.
        stage: r, from 0.
        stages: p.
        microbatches: m.
        chunks: v.
        group: g, microbatches that pass a chunk before the next one; 0 for p.
        extra: Forwards ahead of these: Megatron-core runs one more if it overlaps messages.
    """
    total = microbatches * chunks
    if name in (GPIPE, LOOPED_BFS):
        return total
    per_stage = 2 if name == INTERLEAVED else 1
    return min(per_stage * (stages - stage - 1) + (chunks - 1) * (group or stages) + extra, total)


def most_in_flight(name: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Return how many forwards of a chunk a stage has done at most before their backwards: the warm-up and one more."""
    return min(warm_up(name, stage, stages, microbatches, chunks) + 1, microbatches * chunks)


def idle_ns(
    name: str, stages: int, forward_ns: Number, backward_ns: Number, weights_ns: Number | None = None
) -> Number | None:
    """Return how long each rank idles in a step of equal stages whose messages take no time: the bubble.

    (p − 1)(F + B), and of ZB1P (p − 1)(F + B − 2W), which holds from p microbatches on. None where no formula holds, or
    W is needed and not given.
    """
    if name in (GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS):
        return (stages - 1) * (forward_ns + backward_ns)
    if name == ZB1P and weights_ns is not None:
        return (stages - 1) * (forward_ns + backward_ns - 2 * weights_ns)
    return None


class Bubble(NamedTuple):
    """The bubble of equal stages whose messages take no time."""

    fraction_of_step: float  # of forwards, backwards and the bubble
    ratio_to_work: float  # to forwards and backwards


def bubble(name: str, stages: int, microbatches: int, chunks: int = 1) -> Bubble | None:
    """Return (p − 1)/(v·m + p − 1) and (p − 1)/(v·m); None where no formula holds that F and B do not enter."""
    if not microbatches or idle_ns(name, stages, 1, 1) is None:
        return None
    idle, work = stages - 1, chunks * microbatches
    return Bubble(idle / (work + idle), idle / work)


class RecognisedSchedule(NamedTuple):
    """A schedule's name; ``reason`` says why it is ``unknown``."""

    name: str
    reason: str = ""


def recognise(orders: Sequence[Sequence[str]], chunks: int) -> RecognisedSchedule:
    """Return the schedule of one step, given ``chunks`` per stage.

    ``orders`` has per stage, ascending: ``F3`` and ``B3``, forward and backward of microbatch 3; ``I`` and ``W``, a
    backward of inputs or weights only; ``F3.1``, the same in chunk 1.

    Of schedules that run the backward of the weights apart, ``zb1p`` has one chunk and as many forwards ahead as 1F1B,
    ``interleaved_zero_bubble`` several chunks in a loop over the ranks, ``zbv`` two chunks in a V, to the last rank and
    back, and ``dualpipev`` the same V, but steady backwards are whole, each beside a forward (both halves of DualPipe
    on one V). ``zero_bubble`` is any other.
    """
    kinds = ["".join(action[0] for action in order) for order in orders]
    if any(FORWARD not in order or not {BACKWARD, INPUT} & set(order) for order in kinds):
        return RecognisedSchedule(UNKNOWN, "A stage without a forward or without a backward was recorded.")
    if any(WEIGHTS in order for order in kinds):
        return RecognisedSchedule(_with_weights_apart(orders, kinds, chunks))
    counts = {(order.count(FORWARD), order.count(BACKWARD)) for order in kinds}
    if len(counts) > 1:
        return RecognisedSchedule(UNKNOWN, "The stages run different numbers of forwards or backwards in a step.")
    ((forwards, backwards),) = counts
    if forwards != backwards:
        return RecognisedSchedule(UNKNOWN, f"A step has {forwards} forwards and {backwards} backwards.")
    if forwards == chunks:
        return RecognisedSchedule(UNKNOWN, "With a single microbatch all schedules are alike.")
    ahead = [_forwards_ahead(order) for order in kinds]
    if any(lead is None for lead in ahead):
        stage = ahead.index(None)
        return RecognisedSchedule(
            UNKNOWN, f"Stage {stage} runs {_abbreviated(kinds[stage])}, which no known schedule does."
        )
    return _by_lead([lead or 0 for lead in ahead], forwards, chunks)


def _forwards_ahead(order: str) -> int | None:
    """Return the forwards before the first pair; None unless the order is forwards, then pairs, then backwards."""
    lead = order.index(BACKWARD) - 1
    pairs = order.count(FORWARD) - lead
    expected = FORWARD * lead + (FORWARD + BACKWARD) * pairs + BACKWARD * lead
    return lead if order == expected else None


def _with_weights_apart(orders: Sequence[Sequence[str]], kinds: Sequence[str], chunks: int) -> str:
    if chunks == 1:
        first_backward = [min(order.find(letter) for letter in "BI" if letter in order) for order in kinds]
        ahead = [order[:first].count(FORWARD) - 1 for order, first in zip(kinds, first_backward, strict=True)]
        return ZB1P if ahead == _leads(ZB1P, len(kinds), kinds[0].count(FORWARD)) else OTHER_ZERO_BUBBLE
    if chunks == 2 and _goes_back(orders):
        return DUALPIPEV if any(BACKWARD in order for order in kinds) else ZBV
    return INTERLEAVED_ZERO_BUBBLE


def _goes_back(orders: Sequence[Sequence[str]]) -> bool:
    """Return whether the last rank begins its second chunk before the first rank does, as in a V."""
    return _start_of_second_chunk(orders[-1]) < _start_of_second_chunk(orders[0])


def _start_of_second_chunk(order: Sequence[str]) -> int:
    starts = (position for position, action in enumerate(order) if action[0] == FORWARD and action.endswith(".1"))
    return next(starts, len(order))


def _leads(name: str, stages: int, forwards: int, chunks: int = 1, group: int = 0, extra: int = 0) -> list[int]:
    """Return how many forwards each stage runs before its first pair: a stage that runs all first has a pair, too."""
    microbatches = -(-forwards // chunks)
    return [
        min(warm_up(name, stage, stages, microbatches, chunks, group, extra), forwards - 1) for stage in range(stages)
    ]


def _by_lead(ahead: list[int], forwards: int, chunks: int) -> RecognisedSchedule:
    stages = len(ahead)
    if chunks == 1 and ahead == _leads(ONE_F_ONE_B, stages, forwards):
        return RecognisedSchedule(ONE_F_ONE_B)
    # Megatron-core lets groups of more than p microbatches pass a chunk, and runs one forward more if messages overlap.
    if chunks > 1 and any(
        ahead == _leads(INTERLEAVED, stages, forwards, chunks, group, extra)
        for group in range(stages, forwards // chunks + 1)
        for extra in (0, 1)
    ):
        return RecognisedSchedule(INTERLEAVED)
    if ahead == [forwards - 1] * stages:
        return RecognisedSchedule(with_chunks(GPIPE, chunks))
    leads = ", ".join(map(str, ahead))
    return RecognisedSchedule(
        UNKNOWN, f"The stages run {leads} forwards ahead of their first backward: no known schedule does."
    )


def _abbreviated(order: str, most: int = 24) -> str:
    return order if len(order) <= most else order[:most] + "…"
