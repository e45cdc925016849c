"""The clocks that time a device's work: ``mark`` on the training thread, ``resolve`` to ns on the harvester thread."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

from commtrace.trace import schema

now_ns: Final = time.monotonic_ns
"""The axis of all spans: CLOCK_MONOTONIC is shared by the processes of a host and no clock step moves it."""

Mark = Any
"""A point on a device's timeline: an int (ns, already known) or an object that the clock can resolve later."""


class DeviceClock(Protocol):
    """Take marks on the training thread, resolve them on the harvester thread."""

    timing: int
    """The timing of spans between two marks: a code of ``schema.TIMINGS``."""

    def mark(self) -> Mark:
        """Return a mark at the current position of the current stream. Never waits."""

    def resolve(self, mark: Mark) -> int | None:
        """Return the time of a mark in ns, or None while the device has not reached it. Never waits."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is recording a graph, in which marks must not be taken."""

    def refresh(self) -> None:
        """Take a new anchor between device time and host time: the harvester, before each pass."""


class HostClock:
    """The clock of CPU work: a mark is the host's time in ns."""

    timing = schema.HOST_TIMING
    mark = staticmethod(now_ns)

    def resolve(self, mark: Mark) -> int | None:
        return int(mark)

    def is_capturing(self) -> bool:
        return False

    def refresh(self) -> None:
        return None
