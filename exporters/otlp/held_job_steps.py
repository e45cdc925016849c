"""Job steps that wait for the times of other ranks before they are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from commtrace.live.monitoring.job_steps import MOST_JOINED, JobStep
from commtrace.live.rank import LiveRank

WINDOWS: Final = 3
"""Windows of the monitor. The other ranks report a step in the next window at the latest, and this rank learns of it in
the one after."""


class HeldJobSteps:
    """Holds each step until the monitor has sent the times of all ranks, with a time limit. For several threads.

    Args:
        rank: this rank, with the job steps from its monitor.
        seconds: longest wait of a step; 0 without a monitor.
        monotonic: clock, seconds.
    """

    def __init__(self, rank: LiveRank, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._seconds = seconds if rank.metadata.world_size > 1 else 0.0
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[float, JobStep]] = {}

    def hold(self, own: JobStep) -> None:
        """Add a step with the times of this rank."""
        with self._lock:
            self._held[own.key] = (self._monotonic() + self._seconds, own)

    def release(self, *, all_of_them: bool = False) -> tuple[JobStep, ...]:
        """Return the steps whose wait is over, oldest first, with the times known by now."""
        with self._lock:
            now, known = self._monotonic(), self._rank.job_steps
            too_many = len(self._held) - MOST_JOINED
            released = [
                key
                for number, (key, (until, _)) in enumerate(self._held.items())
                if all_of_them or number < too_many or until <= now or self._is_complete(known.get(key))
            ]
            return tuple(_joined(self._held.pop(key)[1], known.get(key)) for key in released)

    def _is_complete(self, of_all: JobStep | None) -> bool:
        return of_all is not None and of_all.ranks >= self._rank.metadata.world_size


def _joined(own: JobStep, of_all: JobStep | None) -> JobStep:
    """Return the step of all ranks, of which the own one may be missing in ``of_all``."""
    if of_all is None:
        return own
    return of_all._replace(begin_ns=min(own.begin_ns, of_all.begin_ns), end_ns=max(own.end_ns, of_all.end_ns))
