"""What an exporter is to the live part: something that is told every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from commtrace.live.summary import StepSummary
from commtrace.trace.rows import Row


class StepListener(Protocol):
    """Told of every step on the harvester thread. What can block belongs behind a bounded queue of the listener's own.

    A listener that raises is switched off, with one warning; training and the other listeners go on.
    """

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        """A step is complete.

        Args:
            summary: its numbers.
            rows: its rows in the order of ``schema.SCHEMA``, its ``step`` row and marks included, oldest first by
                their arrival. Every row is handed out once: what arrived after its step was closed comes with the
                next one.
        """

    def close(self) -> None:
        """Recording ends: give up threads, ports and files. Must not take longer than a second or two."""

    def abandon_after_fork(self) -> None:
        """In a forked child: everything belongs to the parent. Close inherited sockets, touch nothing else."""
