"""The past of a job: stages and links while they were healthy, and the pauses of ranks in the last minute.

>>> past = JobPast()
>>> past.add(Usual({0: 100.0, 1: 100.0}))
>>> past.add(Usual({0: 102.0}))  # stage 1 is slow by now
>>> past.usual.quickest_ns
{0: 101.0, 1: 100.0}
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import numpy as np

from commtrace.analysis.replay.step_statistics import LinkTraffic
from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.limits import FAST_PERCENTILE, WINDOWS_TO_NAME, Thresholds
from commtrace.analysis.stragglers.normal import PAST, Usual, Work
from commtrace.analysis.stragglers.pauses import PausesOf, judge_on_purpose, judge_pauses
from commtrace.analysis.stragglers.places import RankPlace, group_by_place
from commtrace.findings.causes import MEANT, PAUSES
from commtrace.findings.finding import Occurrence
from commtrace.live.monitoring.findings import Since
from commtrace.live.monitoring.window import WORK, Pause, WindowReport

_WINDOWS_WELL: Final = 16
"""Windows kept of each stage and link: the newest in which it was healthy."""

_MOST_KEPT: Final = 10_000
"""Limit of entries: the past of a job with more sizes of messages is of no use."""

_Key = TypeVar("_Key")


class JobPast:
    """The work of stages and the speed of links while they were healthy. Not thread-safe."""

    def __init__(self) -> None:
        self._quickest_ns: dict[int, deque[float]] = {}
        self._transfer_ns: dict[LinkTraffic, deque[float]] = {}
        self._windows = 0

    def add(self, healthy: Usual) -> None:
        self._windows += 1
        _remember(self._quickest_ns, healthy.quickest_ns)
        _remember(self._transfer_ns, healthy.transfer_ns)

    @property
    def usual(self) -> Usual:
        """Return the median work of each stage, and the time of transfers in the fast windows of their link."""
        # A network may be busy for seconds.
        has_links = self._windows >= WINDOWS_TO_NAME
        return Usual(
            quickest_ns={stage: float(np.median(seen)) for stage, seen in self._quickest_ns.items()},
            transfer_ns={
                link: float(np.percentile(seen, FAST_PERCENTILE, method="lower"))
                for link, seen in self._transfer_ns.items()
                if has_links
            },
            by=PAST,
        )


def _remember(known: dict[_Key, deque[float]], news: Mapping[_Key, float]) -> None:
    for key, ns in news.items():
        if key in known or len(known) < _MOST_KEPT:
            known.setdefault(key, deque(maxlen=_WINDOWS_WELL)).append(ns)


_WINDOWS_OF_PAUSES: Final = 15
"""A minute, with windows of the usual length."""

_LATE: Final = 1.5
"""Pauses are over if the next one is late by this multiple of the usual interval."""


class RankPauses(NamedTuple):
    """A rank that pauses longer than its peers; times per remembered step."""

    rank: int
    cause: str
    mean_ns: float
    normal_ns: float

    @property
    def excess_ns(self) -> float:
        return self.mean_ns - self.normal_ns

    @property
    def beyond(self) -> str:
        return self.cause


class SlowPauses(NamedTuple):
    """Ranks that pause longer than their peers, the one that loses most first."""

    place: str
    cause: str
    members: tuple[RankPauses, ...]
    cost_ns: float  # per step, of all of them
    steps: int  # of that mean
    when: Occurrence
    since: Since  # the step of the first pause


class _Window(NamedTuple):
    number: int
    steps: int
    last_step: int
    pauses: tuple[Pause, ...]


class PauseMemory:
    """The pauses of all ranks in single steps. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[_Window]] = {}

    def take(self, reports: Sequence[WindowReport]) -> list[SlowPauses]:
        """Take windows with steps, and return the sets of ranks that pause longer than their peers and still do."""
        for one in reports:
            own = self._windows.setdefault(one.rank, deque(maxlen=_WINDOWS_OF_PAUSES))
            own.append(_Window(one.window, one.steps, one.last_step, one.pauses))
        return [found for kind in map(WORK.index, PAUSES) for found in self._judge(reports, kind)]

    def _judge(self, reports: Sequence[WindowReport], kind: int) -> Iterator[SlowPauses]:
        if not any(pause.work == kind for one in reports for own in self._windows[one.rank] for pause in own.pauses):
            return
        steps = np.array([sum(own.steps for own in self._windows[one.rank]) for one in reports])
        pauses = [tuple(float(pause.ns) for pause in self._pauses(one.rank, kind)) for one in reports]
        mean = np.array([sum(own) for own in pauses]) / np.maximum(steps, 1)
        duration = np.array([one.duration_ns for one in reports], np.float64)
        _, host = np.unique([one.host for one in reports], return_inverse=True)
        work = Work(
            rank=np.array([one.rank for one in reports], np.int64),
            peers=np.array([one.stage for one in reports], np.int64),
            host=host.reshape(-1).astype(np.int64),
            total_ns=mean,
            error_ns=np.zeros(len(mean)),
            scale_ns=duration,
        )
        if WORK[kind] in MEANT:
            judged = judge_on_purpose(work, self._by_step(reports, kind, int(steps.max())))
        else:
            judged = judge_pauses(
                work, [PausesOf(own, count) for own, count in zip(pauses, steps.tolist(), strict=True)]
            )
        slow = [at for at in np.flatnonzero(judged.is_slow).tolist() if self._lasts(int(judged.rank[at]), kind)]
        members = [
            RankPauses(int(judged.rank[at]), WORK[kind], float(mean[at]), float(judged.normal_ns[at])) for at in slow
        ]
        places = {one.rank: RankPlace(one.host, one.tensor_group) for one in reports}
        most_steps = int(steps.max())
        limits = Thresholds()
        least_ns = max(limits.cost_ms * 1e6, limits.share_of_step * float(np.median(duration)))
        for one_set in group_by_place(places, members):
            own = sorted(one_set.members, key=lambda one: (-one.excess_ns, one.rank))
            found = self._together(one_set.place, kind, own, most_steps)
            if found.cost_ns >= least_ns:
                yield found

    def _together(self, place: str, kind: int, members: Sequence[RankPauses], steps: int) -> SlowPauses:
        lost_ns: dict[int, float] = {}
        total_ns = 0
        for one in members:
            for pause in self._pauses(one.rank, kind):
                lost_ns[pause.step] = max(lost_ns.get(pause.step, 0.0), pause.ns * one.excess_ns / one.mean_ns)
                total_ns += pause.ns
        cost_ns, spread = _cost(sorted(lost_ns.items()), steps)
        when = Occurrence(tuple(sorted(lost_ns)), total_ns, steps)
        first = min((pause for one in members for pause in self._pauses(one.rank, kind)), key=lambda one: one.begin_ns)
        since = Since(first.step, first.begin_ns / 1e9)
        return SlowPauses(place, WORK[kind], tuple(members), cost_ns, spread, when, since)

    def _by_step(self, reports: Sequence[WindowReport], kind: int, num_steps: int) -> Float64:
        """Return the pauses of each rank in each remembered step, ns; steps without one are at the end."""
        struck = sorted({pause.step for one in reports for pause in self._pauses(one.rank, kind)})
        by_step = np.zeros((len(reports), max(num_steps, len(struck))))
        for row, one in enumerate(reports):
            for pause in self._pauses(one.rank, kind):
                by_step[row, bisect_left(struck, pause.step)] = pause.ns
        return by_step

    def _pauses(self, rank: int, kind: int) -> list[Pause]:
        return [pause for own in self._windows[rank] for pause in own.pauses if pause.work == kind]

    def _lasts(self, rank: int, kind: int) -> bool:
        windows = self._windows[rank]
        struck = [own.number for own in windows if any(pause.work == kind for pause in own.pauses)]
        newest = windows[-1]
        steps = [pause.step for pause in self._pauses(rank, kind)]
        if len(struck) < WINDOWS_TO_NAME and WORK[kind] not in MEANT:
            return False
        if not struck or struck[-1] == newest.number:
            return bool(struck)
        between = max((after - before for before, after in pairwise(steps)), default=0)
        return newest.last_step - steps[-1] <= _LATE * between


def _cost(lost_ns: Sequence[tuple[int, float]], steps: int) -> tuple[float, int]:
    """Return the cost per step, and the number of steps of that mean.

    ``lost_ns`` has the steps with a pause, ascending, and the time lost in each.
    """
    if len(lost_ns) == 1:
        return lost_ns[0][1] / max(steps, 1), steps
    between = lost_ns[-1][0] - lost_ns[0][0]
    return sum(ns for _, ns in lost_ns[1:]) / max(between, 1), between
