"""The lost time in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commtrace.analysis.rank_words import seconds_in_words
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.cli.units import share

_WORDS: Final = {
    "stragglers_ns": "stragglers",
    "imbalance_ns": "imbalance",
    "exposed_communication_ns": "exposed communication",
    "bubble_ns": "bubble",
    "input_ns": "input",
    "rest_ns": "the rest",
}
_WORTH_A_WORD: Final = 0.001
_WORTH_A_TIME: Final = 0.01
_NS_PER_HOUR: Final = 3.6e12


def lost_time_lines(lost: LostTime | None) -> Iterator[str]:
    """Yield what everything beyond the ideal was due to; nothing where steps were not replayed."""
    if lost is None or not lost.steps_ns:
        return
    whole, gpus, costs_ns = lost.steps_ns, lost.gpus, lost.costs_ns()
    parts = [
        f"{words} {share(costs_ns[name], whole)}"
        + (f" ({_time(costs_ns[name], gpus)})" if costs_ns[name] >= _WORTH_A_TIME * whole else "")
        for name, words in _WORDS.items()
        if costs_ns[name] >= _WORTH_A_WORD * whole or costs_ns[name] <= -_WORTH_A_TIME * whole
    ]
    beyond = whole - lost.ideal_ns
    yield (
        f"Lost: {share(beyond, whole)} of {_time(whole, gpus)} in steps"
        + (f": {', '.join(parts)}" if parts else "")
        + f"; ideal {share(lost.ideal_ns, whole)}"
    )


def _time(time_ns: int, gpus: int | None) -> str:
    if gpus is None:
        return seconds_in_words(time_ns)
    return f"{time_ns * gpus / _NS_PER_HOUR:.3g} GPU-hours"
