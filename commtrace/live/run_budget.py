"""Divides the wall time of a running process so far: training, evaluation, checkpoints, loading, start.

The arithmetic is that of :mod:`commtrace.analysis.breakdown.run_budget`, step by step. One process cannot know whether
steps were lost by a restart, and how long it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from commtrace.analysis.breakdown.run_budget import PART_OF_KIND, PARTS, START, TRAINING, PartIntervals, divide
from commtrace.trace.schema import Row

KNOWN_PARTS: Final = ("training", "evaluation", "checkpoint", "loading", "start", "unknown")


class LiveBudget:
    """Adds up the time of every part, up to the end of the last step. Not for several threads at a time."""

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._until_ns = 0
        self._ns = [0] * len(PARTS)
        self._pending: list[tuple[int, int, int]] = []

    def add(self, rows: Iterable[Row], topology: Mapping[str, object]) -> None:
        """Take the rows of one pass.

        Args:
            rows: of any kind.
            topology: of the rank: when its process began, and whether it records all steps.
        """
        found = [(PART_OF_KIND[row.kind], row.start, row.end) for row in rows if row.kind in PART_OF_KIND]
        self._pending += found
        step_ends = [end for part, _, end in found if part == TRAINING]
        if step_ends:
            self._close(max(step_ends), topology)

    def _close(self, until_ns: int, topology: Mapping[str, Any]) -> None:
        claims = [PartIntervals(part, np.array([start]), np.array([end])) for part, start, end in self._pending]
        first_ns = min(start for part, start, _ in self._pending if part == TRAINING)
        if self._began_ns is None:
            self._began_ns = self._until_ns = min(first_ns, topology.get("process_start_ns", first_ns))
            if "steps" not in topology.get("recording", {}):
                claims.append(PartIntervals(START, np.array([self._began_ns]), np.array([first_ns])))
        for part, time in enumerate(divide(claims, self._until_ns, max(until_ns, self._until_ns))):
            self._ns[part] += time
        self._until_ns = max(until_ns, self._until_ns)
        self._pending = [one for one in self._pending if one[2] > self._until_ns]

    def seconds(self) -> dict[str, float]:
        """Return the time of each part; together, that from the begin of the process to the end of its last step."""
        return {part: self._ns[PARTS.index(part)] / 1e9 for part in KNOWN_PARTS}

    def goodput(self, now_ns: int) -> float | None:
        """Return the share of the process's wall time in training steps; None before the first step has ended.

        Args:
            now_ns: on the monotonic clock.
        """
        if self._began_ns is None or now_ns <= self._began_ns:
            return None
        return self._ns[TRAINING] / (now_ns - self._began_ns)
