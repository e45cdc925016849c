"""The lost time in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from commtrace.analysis.rank_words import seconds_in_words
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


def lost_time_lines(lost: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what everything beyond the ideal was due to; nothing where steps were not replayed."""
    if lost is None or not lost["steps_ns"]:
        return
    whole, gpus = lost["steps_ns"], lost["gpus"]
    parts = [
        f"{words} {share(lost[name], whole)}"
        + (f" ({_time(lost[name], gpus)})" if lost[name] >= _WORTH_A_TIME * whole else "")
        for name, words in _WORDS.items()
        if lost[name] >= _WORTH_A_WORD * whole or lost[name] <= -_WORTH_A_TIME * whole
    ]
    beyond = whole - lost["ideal_ns"]
    yield (
        f"Lost: {share(beyond, whole)} of {_time(whole, gpus)} in steps"
        + (f": {', '.join(parts)}" if parts else "")
        + f"; ideal {share(lost['ideal_ns'], whole)}"
    )


def _time(time_ns: int, gpus: int | None) -> str:
    if gpus is None:
        return seconds_in_words(time_ns)
    return f"{time_ns * gpus / _NS_PER_HOUR:.3g} GPU-hours"
