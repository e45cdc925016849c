"""Job steps that wait for the times of other ranks before their spans are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.live.rank import LiveRank

WINDOWS: Final = 3
"""Windows of the monitor. The other ranks tell of a step in the next window at the latest, and this rank hears of it in
the one after that."""


class HeldJobSteps:
    """Holds each step until the monitor has told the times of all ranks, but not for long. For several threads.

    Args:
        rank: that sends the spans; what its monitor has told is used.
        seconds: how long a step waits at most; 0 where no monitor will tell.
        monotonic: clock, in seconds.
    """

    def __init__(self, rank: LiveRank, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._seconds = seconds if rank.metadata.world_size > 1 else 0.0
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[float, JobStep]] = {}

    def hold(self, own: JobStep) -> None:
        """Take a step with the times of this rank."""
        with self._lock:
            self._held[own.key] = (self._monotonic() + self._seconds, own)

    def release(self, *, all_of_them: bool = False) -> tuple[JobStep, ...]:
        """Return the steps that wait no longer, oldest first, each with the times known by now."""
        with self._lock:
            now, known = self._monotonic(), self._rank.job_steps
            too_many = len(self._held) - MOST_JOINED
            released = [
                key
                for number, (key, (until, _)) in enumerate(self._held.items())
                if all_of_them or number < too_many or until <= now or self._is_complete(known.get(key))
            ]
            return tuple(_joined(self._held.pop(key)[1], known.get(key)) for key in released)

    def _is_complete(self, told: JobStep | None) -> bool:
        return told is not None and told.ranks >= self._rank.metadata.world_size


def _joined(own: JobStep, told: JobStep | None) -> JobStep:
    """Return the step with what was told of it; its own rank may be missing in that."""
    if told is None:
        return own
    return told._replace(begin_ns=min(own.begin_ns, told.begin_ns), end_ns=max(own.end_ns, told.end_ns))
