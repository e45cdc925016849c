"""Recognise a job's pipeline schedule from the order of its forwards and backwards.

>>> recognise([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], chunks=1)
Schedule(name='1f1b', reason='')

Schedules that run the backward of the weights apart:

* ``zb1p``: one chunk, as many forwards ahead as 1F1B (ZB-H1 of "Zero Bubble Pipeline Parallelism", ICLR 2024);
* ``interleaved_zero_bubble``: several chunks in a loop over the ranks;
* ``zbv``: two chunks in a V, to the last rank and back; every backward is split;
* ``dualpipev``: the same V, but steady backwards are whole, each beside a forward (both halves of DualPipe on one V);
* ``zero_bubble``: any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved_1f1b"
LOOPED_BFS: Final = "looped_bfs"
ZERO_BUBBLE: Final = "zero_bubble"
ZB1P: Final = "zb1p"
INTERLEAVED_ZERO_BUBBLE: Final = "interleaved_zero_bubble"
ZBV: Final = "zbv"
DUALPIPEV: Final = "dualpipev"
UNKNOWN: Final = "unknown"

_WITH_FORMULA: Final = frozenset({GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS})


class Schedule(NamedTuple):
    """A schedule's name; ``reason`` says why it is ``unknown``."""

    name: str
    reason: str = ""


def recognise(orders: Sequence[Sequence[str]], chunks: int) -> Schedule:
    """Return the schedule of one step, given ``chunks`` per stage.

    ``orders`` has per stage, ascending: ``F3`` and ``B3``, forward and backward of microbatch 3; ``I`` and ``W``, a
    backward of inputs or weights only; ``F3.1``, the same in chunk 1.
    """
    kinds = ["".join(action[0] for action in order) for order in orders]
    if any("F" not in order or not {"B", "I"} & set(order) for order in kinds):
        return Schedule(UNKNOWN, "A stage without a forward or without a backward was recorded.")
    if any("W" in order for order in kinds):
        return Schedule(_with_weights_apart(orders, kinds, chunks))
    counts = {(order.count("F"), order.count("B")) for order in kinds}
    if len(counts) > 1:
        return Schedule(UNKNOWN, "The stages run different numbers of forwards or backwards in a step.")
    ((forwards, backwards),) = counts
    if forwards != backwards:
        return Schedule(UNKNOWN, f"A step has {forwards} forwards and {backwards} backwards.")
    if forwards == chunks:
        return Schedule(UNKNOWN, "With a single microbatch all schedules are alike.")
    ahead = [_forwards_ahead(order) for order in kinds]
    if any(lead is None for lead in ahead):
        stage = ahead.index(None)
        return Schedule(UNKNOWN, f"Stage {stage} runs {_abbreviated(kinds[stage])}, which no known schedule does.")
    return _by_lead([lead or 0 for lead in ahead], forwards, chunks)


def theoretical_fraction_of_phase(name: str, stages: int, chunks: int, microbatches: int) -> float | None:
    """Return the bubble of equal stages over the phase, (p − 1)/(v·m + p − 1); None where no formula holds."""
    if name not in _WITH_FORMULA or not microbatches:
        return None
    return (stages - 1) / (chunks * microbatches + stages - 1)


def theoretical_ratio_to_work(name: str, stages: int, chunks: int, microbatches: int) -> float | None:
    """Return the same over the forwards and backwards: (p − 1)/(v·m)."""
    if name not in _WITH_FORMULA or not microbatches:
        return None
    return (stages - 1) / (chunks * microbatches)


def _forwards_ahead(order: str) -> int | None:
    """Return the forwards before the first pair; None unless the order is forwards, then pairs, then backwards."""
    lead = order.index("B") - 1
    pairs = order.count("F") - lead
    expected = "F" * lead + "FB" * pairs + "B" * lead
    return lead if order == expected else None


def _with_weights_apart(orders: Sequence[Sequence[str]], kinds: Sequence[str], chunks: int) -> str:
    if chunks == 1:
        first_backward = [min(order.find(letter) for letter in "BI" if letter in order) for order in kinds]
        ahead = [order[:first].count("F") - 1 for order, first in zip(kinds, first_backward, strict=True)]
        return ZB1P if ahead == _ahead_in_1f1b(len(kinds), kinds[0].count("F")) else ZERO_BUBBLE
    if chunks == 2 and _goes_back(orders):
        return DUALPIPEV if any("B" in order for order in kinds) else ZBV
    return INTERLEAVED_ZERO_BUBBLE


def _goes_back(orders: Sequence[Sequence[str]]) -> bool:
    """Return whether the last rank begins its second chunk before the first rank does, as in a V."""
    return _start_of_second_chunk(orders[-1]) < _start_of_second_chunk(orders[0])


def _start_of_second_chunk(order: Sequence[str]) -> int:
    starts = (place for place, action in enumerate(order) if action[0] == "F" and action.endswith(".1"))
    return next(starts, len(order))


def _ahead_in_1f1b(stages: int, forwards: int) -> list[int]:
    return [min(stages - stage - 1, forwards - 1) for stage in range(stages)]


def _by_lead(ahead: Sequence[int], forwards: int, chunks: int) -> Schedule:
    if chunks == 1 and list(ahead) == _ahead_in_1f1b(len(ahead), forwards):
        return Schedule(ONE_F_ONE_B)
    if chunks > 1 and _is_interleaved(ahead, forwards, chunks):
        return Schedule(INTERLEAVED)
    if all(lead == forwards - 1 for lead in ahead):
        return Schedule(GPIPE if chunks == 1 else LOOPED_BFS)
    leads = ", ".join(map(str, ahead))
    return Schedule(UNKNOWN, f"The stages run {leads} forwards ahead of their first backward: no known schedule does.")


def _is_interleaved(ahead: Sequence[int], forwards: int, chunks: int) -> bool:
    """Return whether stage r runs 2·(p − r − 1) + (v − 1)·g forwards ahead, g ≥ p; one more if P2P is overlapped.

    A stage with fewer forwards than that runs all of them first.
    """
    stages, most = len(ahead), forwards - 1
    for group in range(stages, forwards // chunks + 1):
        for extra in (0, 1):
            leads = [2 * (stages - stage - 1) + (chunks - 1) * group + extra for stage in range(stages)]
            if list(ahead) == [min(lead, most) for lead in leads]:
                return True
    return False


def _abbreviated(order: str, most: int = 24) -> str:
    return order if len(order) <= most else order[:most] + "…"
