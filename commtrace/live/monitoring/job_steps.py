"""Begin and end of the job's steps: the earliest begin and the latest end of its ranks, on the wall clock.

>>> steps = JobSteps()
>>> steps.add([StepTimes(7, 0, 100, 200)])
>>> steps.add([StepTimes(7, 0, 90, 180)])
>>> steps.newest
(JobStep(step=7, repetition=0, begin_ns=90, end_ns=200, ranks=2),)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from commtrace.live.monitoring.wire_types import Count, Instant, Number

MOST_REPORTED: Final = 64
"""Steps whose times a rank sends in one report, the newest."""

MOST_JOINED: Final = 256
"""Steps whose times are kept, the newest."""

_MOST_REMEMBERED: Final = 1_000


class RankStep(NamedTuple):
    """One step on one rank, epoch ns; ``repetition`` counts earlier steps of this number."""

    step: Number
    repetition: Count
    begin_ns: Instant
    end_ns: Instant


class JobStep(NamedTuple):
    """One step on those ranks whose times are known, epoch ns."""

    step: Number
    repetition: Count
    begin_ns: Instant
    end_ns: Instant
    ranks: Count

    @property
    def key(self) -> tuple[int, int]:
        """Return the identity of the step on all ranks."""
        return self.step, self.repetition


class JobSteps:
    """Joins the times that ranks report, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], JobStep] = {}

    def add(self, times: Iterable[RankStep]) -> None:
        for one in times:
            key = (one.step, one.repetition)
            known = self._known.get(key)
            begin_ns = min(one.begin_ns, known.begin_ns) if known else one.begin_ns
            end_ns = max(one.end_ns, known.end_ns) if known else one.end_ns
            self._known[key] = JobStep(*key, begin_ns, end_ns, 1 + (known.ranks if known else 0))
        while len(self._known) > MOST_JOINED:
            del self._known[next(iter(self._known))]

    @property
    def newest(self) -> tuple[JobStep, ...]:
        """Return at most ``MOST_JOINED`` steps in the order of their first report."""
        return tuple(self._known.values())


class RepetitionCounter:
    """Counts the repetitions of steps on a rank, for the newest thousand numbers."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def begin(self, step: int) -> int:
        """Return the repetition of a new step."""
        self._seen[step] = self._seen.pop(step, -1) + 1
        if len(self._seen) > _MOST_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return self._seen[step]

    def of(self, step: int) -> int:
        """Return the repetition of the newest step of this number."""
        return self._seen.get(step, 0)
