"""Which pipeline schedule a job follows, read from the order of its forwards and backwards.

>>> recognise([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], chunks=1)
Schedule(name='1f1b', reason='')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

GPIPE: Final = "gpipe"
ONE_F_ONE_B: Final = "1f1b"
INTERLEAVED: Final = "interleaved_1f1b"
ZERO_BUBBLE: Final = "zero_bubble"
UNKNOWN: Final = "unknown"


class Schedule(NamedTuple):
    """A schedule's name, and why it could not be told where it is ``unknown``."""

    name: str
    reason: str = ""


def recognise(orders: Sequence[Sequence[str]], chunks: int) -> Schedule:
    """The schedule of one step.

    Args:
        orders: per stage, ascending, what it does in a step: ``F3`` and ``B3`` are forward and backward of microbatch
            3; ``W`` stands for a backward of weights only. Chunks need not be told apart.
        chunks: model chunks per stage.
    """
    kinds = ["".join(action[0] for action in order) for order in orders]
    if any("F" not in order or "B" not in order for order in kinds):
        return Schedule(UNKNOWN, "A stage without a forward or without a backward was recorded.")
    if any("W" in order for order in kinds):
        return Schedule(ZERO_BUBBLE)
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


def ideal_fraction_of_total(name: str, stages: int, chunks: int, microbatches: int) -> float | None:
    """Bubble of an ideal step, as a share of the step: (p − 1)/(v·m + p − 1); None where no formula holds."""
    if name not in (GPIPE, ONE_F_ONE_B, INTERLEAVED):
        return None
    return (stages - 1) / (chunks * microbatches + stages - 1)


def ideal_ratio_to_work(name: str, stages: int, chunks: int, microbatches: int) -> float | None:
    """Bubble of an ideal step, as a share of its forwards and backwards: (p − 1)/(v·m); None where none holds."""
    if name not in (GPIPE, ONE_F_ONE_B, INTERLEAVED):
        return None
    return (stages - 1) / (chunks * microbatches)


def _forwards_ahead(order: str) -> int | None:
    """Forwards before the first pair, if the order is forwards, then forward-backward pairs, then backwards."""
    lead = order.index("B") - 1
    pairs = order.count("F") - lead
    expected = "F" * lead + "FB" * pairs + "B" * lead
    return lead if order == expected else None


def _by_lead(ahead: Sequence[int], forwards: int, chunks: int) -> Schedule:
    stages = len(ahead)
    if chunks == 1 and list(ahead) == [min(stages - stage - 1, forwards - 1) for stage in range(stages)]:
        return Schedule(ONE_F_ONE_B)
    if chunks > 1 and _is_interleaved(ahead, forwards, chunks):
        return Schedule(INTERLEAVED)
    if all(lead == forwards - 1 for lead in ahead):
        return Schedule(GPIPE)
    leads = ", ".join(map(str, ahead))
    return Schedule(UNKNOWN, f"The stages run {leads} forwards ahead of their first backward: no known schedule does.")


def _is_interleaved(ahead: Sequence[int], forwards: int, chunks: int) -> bool:
    """Stage r runs 2·(p − r − 1) + (v − 1)·g forwards ahead, g at least p; one more each if P2P is overlapped.

    A stage that has no more forwards than that runs all of them first.
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
