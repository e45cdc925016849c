"""What recording costs a running rank, from the lengths of its own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np

from commtrace.analysis.comparison.own_cost import own_cost
from commtrace.findings.own_cost import OwnCost
from commtrace.trace.quiet import QuietChange
from commtrace.trace.selection import QUIET_STEPS

_MOST_STEPS: Final = 4_000
"""Newest steps that the cost is of."""


class OwnCostMeter:
    """Follows the steps of one rank. Written by the harvester's thread; other threads may read :attr:`cost`."""

    def __init__(self) -> None:
        self.cost: OwnCost | None = None  # None with too few steps that were not recorded
        self.counts: dict[str, float] = {}  # what the script counted in quiet steps
        self._quiet: set[int] = set()  # steps whose lengths are still to come
        self._steps: deque[tuple[int, int, bool]] = deque(maxlen=_MOST_STEPS)
        self._recorded_since = 0

    def learn(self, change: QuietChange) -> None:
        if change.is_quiet and len(self._quiet) < _MOST_STEPS:
            self._quiet.add(change.step)

    def is_quiet(self, step: int) -> bool:
        """Return whether a step that was not added yet was not recorded."""
        return step in self._quiet

    def add(self, step: int, duration_ns: int, counts: Mapping[str, float]) -> None:
        """Take the length of the next step, and what the script counted in it."""
        is_quiet = step in self._quiet
        if is_quiet:
            self._quiet.discard(step)
            for name, number in counts.items():
                self.counts[name] = self.counts.get(name, 0) + number
        self._steps.append((step, duration_ns, is_quiet))
        self._recorded_since = 0 if is_quiet else self._recorded_since + 1
        if self._recorded_since == QUIET_STEPS:  # behind a stretch, as many as it is compared with
            steps, durations, quiet = (np.array(column) for column in zip(*self._steps, strict=True))
            self.cost = own_cost(steps, durations, quiet, np.ones(len(steps), np.bool_))
