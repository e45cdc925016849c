"""Steps that were done more than once, as lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from commtrace.analysis.steps.attempts import Attempt, RepeatedStep
from commtrace.cli.units import duration

_MOST_RANGES: Final = 4


def step_attempts_lines(repeated: Sequence[RepeatedStep], launch: int) -> Iterator[str]:
    """``Steps 5–8 were done twice: attempt 1 from …; attempt 2 from …, shown here``, for each range of them.

    Args:
        repeated: steps that were done more than once.
        launch: the one that is shown.
    """
    ranges = list(_ranges(repeated))
    for steps in ranges[:_MOST_RANGES]:
        first, last = steps[0], steps[-1]
        count = len(first.attempts)
        often = "twice" if count == 2 else f"{count} times"
        which = f"Step {first.step} was" if first is last else f"Steps {first.step}–{last.step} were"
        attempts_in_words = "; ".join(
            _attempt([step.attempts[number] for step in steps], number + 1 == count, launch) for number in range(count)
        )
        yield f"{which} done {often}: {attempts_in_words}"
    if len(ranges) > _MOST_RANGES:
        yield f"{sum(map(len, ranges[_MOST_RANGES:]))} more steps were done more than once (--json)."


def _ranges(repeated: Sequence[RepeatedStep]) -> Iterator[Sequence[RepeatedStep]]:
    """Yield steps that follow each other and were done in the same launches."""

    def key(item: tuple[int, RepeatedStep]) -> tuple[int, tuple[int, ...]]:
        position, step = item
        return step.step - position, tuple(attempt.launch for attempt in step.attempts)

    for _, alike in groupby(enumerate(repeated), key):
        yield [step for _, step in alike]


def _attempt(attempts: Sequence[Attempt], is_last: bool, launch: int) -> str:
    first = attempts[0]
    began = time.strftime("%H:%M:%S", time.localtime(first.start_ns / 1e9))
    mean_ns = sum(attempt.duration_ns for attempt in attempts) / len(attempts)
    shown = ", shown here" if is_last and first.launch == launch else ""
    return f"attempt {first.attempt} from {began}, {duration(mean_ns)} a step{shown}"
