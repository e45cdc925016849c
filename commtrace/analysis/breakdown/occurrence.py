"""Decide whether a cost belongs to every step or to a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.formatting import format_duration, format_ranges, ranges
from commtrace.trace.json_values import JsonObject

_MOST_OF_IT: Final = 0.8
_RARE: Final = 0.25
"""A time in at most this share of the steps belongs to those steps alone."""

_FEWEST_STEPS: Final = 4
_MOST_NAMED: Final = 6


class Occurrence(NamedTuple):
    """The fewest steps that hold most of a time; ``steps`` is ascending, and empty if the time is 0."""

    steps: tuple[int, ...]
    total_ns: int
    num_steps: int

    @property
    def is_rare(self) -> bool:
        """Return whether most steps have none of it, so that a mean over all steps would mislead."""
        enough = self.num_steps >= _FEWEST_STEPS and bool(self.steps)
        return enough and len(self.steps) <= max(1, int(_RARE * self.num_steps))

    def describe(self) -> str:
        """Return ``once, in step 7: 2.2 s`` or ``in 2 of 25 steps (10, 20): 11 s in all``."""
        total = format_duration(self.total_ns)
        if len(self.steps) == 1:
            return f"once, in step {self.steps[0]}: {total}"
        named = format_ranges(ranges(self.steps), _MOST_NAMED)
        return f"in {len(self.steps)} of {self.num_steps} steps ({named}): {total} in all"

    def to_json(self) -> JsonObject:
        return {"steps": list(self.steps), "total_ns": self.total_ns, "num_steps": self.num_steps}


def occurrence(steps: Sequence[int], times_ns: npt.NDArray[np.generic]) -> Occurrence:
    """Return the steps in which a time occurred; ``times_ns`` is by step."""
    times = np.maximum(np.asarray(times_ns, np.float64), 0.0)
    total = float(times.sum())
    if not total:
        return Occurrence((), 0, len(steps))
    order = np.argsort(-times, kind="stable")
    enough = int(np.searchsorted(np.cumsum(times[order]), _MOST_OF_IT * total)) + 1
    return Occurrence(tuple(sorted(int(steps[at]) for at in order[:enough])), round(total), len(steps))
