"""Keep a rank's folder within a budget by deleting its oldest segments."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.trace.files.file_calls import FileCalls
from commtrace.trace.files.rank_files import remove_file, size_of

_SEGMENTS_IN_BUDGET: Final = 8
"""A budget holds at least this many segments, because whole segments are deleted."""


class Budget(NamedTuple):
    """Limits of a rank's recording, in steps and in bytes of files; 0 means no limit."""

    steps: int = 0
    num_bytes: int = 0

    @property
    def steps_per_segment(self) -> int:
        """Return the most steps of a segment; 0 means no limit."""
        return max(1, self.steps // _SEGMENTS_IN_BUDGET) if self.steps else 0

    @property
    def bytes_per_segment(self) -> int:
        """Return the most bytes of a segment before its last batch; 0 means no limit."""
        return max(1, self.num_bytes // _SEGMENTS_IN_BUDGET) if self.num_bytes else 0


class _Closed(NamedTuple):
    path: Path
    num_bytes: int
    first_step: int
    last_step: int


class Discards:
    """The closed segments of a rank, oldest first, and counts of the deleted ones."""

    def __init__(self, budget: Budget, earlier: Sequence[tuple[Path, int]], files: FileCalls) -> None:
        self._budget = budget
        self._files = files
        self._closed = [_Closed(path, size, -1, -1) for path, size in earlier] if any(budget) else []
        self._segments = self._bytes = 0
        self._first_step = self._last_step = -1
        self._at_ns = 0

    def closed(self, path: Path, first_step: int, last_step: int) -> None:
        if any(self._budget):
            size = self._files.call(size_of, path)
            if size is not None:
                self._closed.append(_Closed(path, size, first_step, last_step))

    def rewritten(self, path: Path) -> None:
        num_bytes = self._files.call(size_of, path) or 0  # another process may have deleted it
        self._closed = [
            segment._replace(num_bytes=num_bytes) if segment.path == path else segment for segment in self._closed
        ]

    def has_room_for(self, path: Path) -> bool:
        """Return whether the budget allows a second file of this segment's size for a moment."""
        if not self._budget.num_bytes:
            return True
        held = sum(segment.num_bytes for segment in self._closed)
        num_bytes = sum(segment.num_bytes for segment in self._closed if segment.path == path)
        return held + num_bytes <= self._budget.num_bytes

    def make_room(self, step: int) -> None:
        """Delete the oldest segments beyond the budget, before one that begins with ``step``; may raise OSError."""
        while self._closed and self._exceeded(self._closed[0], step):
            oldest = self._closed[0]
            self._files.call(remove_file, oldest.path)
            del self._closed[0]
            self._note(oldest)

    def _exceeded(self, oldest: _Closed, step: int) -> bool:
        budget = self._budget
        if budget.num_bytes:
            held = sum(segment.num_bytes for segment in self._closed)
            if held > budget.num_bytes - budget.bytes_per_segment:
                return True
        if not budget.steps:
            return False
        if oldest.last_step >= 0:
            return oldest.last_step < step - budget.steps
        first_steps = [segment.first_step for segment in self._closed if segment.last_step >= 0]
        return bool(first_steps) and first_steps[0] <= step - budget.steps

    def _note(self, segment: _Closed) -> None:
        self._segments += 1
        self._bytes += segment.num_bytes
        self._at_ns = time.time_ns()
        if segment.last_step >= 0:
            self._first_step = segment.first_step if self._first_step < 0 else self._first_step
            self._last_step = max(self._last_step, segment.last_step)

    def to_json(self) -> dict[str, int] | None:
        """Return the ``discarded`` mark; None if nothing has been deleted."""
        if not self._segments:
            return None
        return {
            "segments": self._segments,
            "bytes": self._bytes,
            "first_step": self._first_step,
            "last_step": self._last_step,
            "at_ns": self._at_ns,
        }
