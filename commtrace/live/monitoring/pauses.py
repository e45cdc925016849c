"""The pauses of ranks in the last minute: which ranks pause longer than their peers."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.evidence import one_pauses_longer, several_pause_longer
from commtrace.analysis.stragglers.limits import WINDOWS_TO_NAME, Thresholds
from commtrace.analysis.stragglers.normal import Work
from commtrace.analysis.stragglers.pauses import PausesOf, judge_on_purpose, judge_pauses
from commtrace.analysis.stragglers.places import RankPlace, format_place, group_by_place
from commtrace.findings.causes import MEANT, PAUSES, advice
from commtrace.findings.finding import MOST_MEMBERS, SLOW, Finding, Member, Occurrence, finding_id
from commtrace.live.monitoring.since import Since
from commtrace.live.monitoring.slow_now import format_rank
from commtrace.live.monitoring.window import WORK, Pause, WindowReport

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


class _Window(NamedTuple):
    number: int
    steps: int
    last_step: int
    pauses: tuple[Pause, ...]


class PauseMemory:
    """The pauses of all ranks of a job in single steps. Not thread-safe."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._windows: dict[int, deque[_Window]] = {}

    def take(self, reports: Sequence[WindowReport]) -> list[Finding]:
        """Take windows with steps, and return the sets of ranks that pause longer than their peers and still do.

        The rank that loses most is the first of a set.
        """
        for report in reports:
            windows = self._windows.setdefault(report.rank, deque(maxlen=_WINDOWS_OF_PAUSES))
            windows.append(_Window(report.window, report.steps, report.last_step, report.pauses))
        return [finding for kind in map(WORK.index, PAUSES) for finding in self._judge(reports, kind)]

    def _judge(self, reports: Sequence[WindowReport], kind: int) -> Iterator[Finding]:
        if not any(
            pause.work == kind for report in reports for window in self._windows[report.rank] for pause in window.pauses
        ):
            return
        steps = np.array([sum(window.steps for window in self._windows[report.rank]) for report in reports])
        pauses = [tuple(float(pause.ns) for pause in self._pauses(report.rank, kind)) for report in reports]
        mean = np.array([sum(pauses_ns) for pauses_ns in pauses]) / np.maximum(steps, 1)
        duration = np.array([report.duration_ns for report in reports], np.float64)
        _, host = np.unique([report.host for report in reports], return_inverse=True)
        work = Work(
            rank=np.array([report.rank for report in reports], np.int64),
            peers=np.array([report.stage for report in reports], np.int64),
            host=host.reshape(-1).astype(np.int64),
            total_ns=mean,
            error_ns=np.zeros(len(mean)),
            scale_ns=duration,
        )
        if WORK[kind] in MEANT:
            judged = judge_on_purpose(work, self._by_step(reports, kind, int(steps.max())))
        else:
            judged = judge_pauses(
                work, [PausesOf(pauses_ns, count) for pauses_ns, count in zip(pauses, steps.tolist(), strict=True)]
            )
        slow = [at for at in np.flatnonzero(judged.is_slow).tolist() if self._lasts(int(judged.rank[at]), kind)]
        members = [
            RankPauses(int(judged.rank[at]), WORK[kind], float(mean[at]), float(judged.normal_ns[at])) for at in slow
        ]
        places = {report.rank: RankPlace(report.host, report.tensor_group) for report in reports}
        most_steps, step_ns = int(steps.max()), float(np.median(duration))
        limits = Thresholds()
        least_ns = max(limits.cost_ms * 1e6, limits.share_of_step * step_ns)
        for one_set in group_by_place(places, members):
            longest_first = sorted(one_set.members, key=lambda member: (-member.excess_ns, member.rank))
            cost_ns, when = self._cost(kind, longest_first, most_steps)
            if cost_ns >= least_ns:
                yield self._together(places, one_set.place, kind, longest_first, cost_ns, step_ns, when)

    def _together(
        self,
        places: Mapping[int, RankPlace],
        place: str,
        kind: int,
        members: Sequence[RankPauses],
        cost_ns: float,
        step_ns: float,
        when: Occurrence,
    ) -> Finding:
        ranks, cause = tuple(member.rank for member in members), WORK[kind]
        first = min(
            (pause for rank in ranks for pause in self._pauses(rank, kind)),
            key=lambda pause_of_rank: pause_of_rank.begin_ns,
        )
        finding = Finding(
            id=finding_id(SLOW, place, cause, ranks),
            kind=SLOW,
            place=place,
            cause=cause,
            who=format_place(places, place, sorted(ranks)),
            ranks=ranks,
            hosts=tuple(dict.fromkeys(places[rank].host for rank in ranks)),
            members=tuple(
                Member(member.rank, places[member.rank].host, member.excess_ns) for member in members[:MOST_MEMBERS]
            ),
            occurrence=when,
            cost_ns=cost_ns,
            share=cost_ns / max(step_ns, 1.0),
            gpu_hours_per_day=cost_ns / max(step_ns, 1.0) * 24 * self._world_size,
            evidence=_evidence(places, place, members),
            advice=advice(cause, len(ranks), place),
        )
        return Since(first.step, first.begin_ns / 1e9).of(finding)

    def _cost(self, kind: int, members: Sequence[RankPauses], steps: int) -> tuple[float, Occurrence]:
        """Return what some ranks that pause together cost per step, and the steps in which they do."""
        lost_ns: dict[int, float] = {}
        total_ns = 0
        for member in members:
            for pause in self._pauses(member.rank, kind):
                lost_ns[pause.step] = max(lost_ns.get(pause.step, 0.0), pause.ns * member.excess_ns / member.mean_ns)
                total_ns += pause.ns
        return _cost_per_step(sorted(lost_ns.items()), steps), Occurrence(tuple(sorted(lost_ns)), total_ns, steps)

    def _by_step(self, reports: Sequence[WindowReport], kind: int, num_steps: int) -> Float64:
        """Return the pauses of each rank in each remembered step, ns; steps without one are at the end."""
        struck = sorted({pause.step for report in reports for pause in self._pauses(report.rank, kind)})
        by_step = np.zeros((len(reports), max(num_steps, len(struck))))
        for row, report in enumerate(reports):
            for pause in self._pauses(report.rank, kind):
                by_step[row, bisect_left(struck, pause.step)] = pause.ns
        return by_step

    def _pauses(self, rank: int, kind: int) -> list[Pause]:
        return [pause for window in self._windows[rank] for pause in window.pauses if pause.work == kind]

    def _lasts(self, rank: int, kind: int) -> bool:
        windows = self._windows[rank]
        struck = [window.number for window in windows if any(pause.work == kind for pause in window.pauses)]
        newest = windows[-1]
        steps = [pause.step for pause in self._pauses(rank, kind)]
        if len(struck) < WINDOWS_TO_NAME and WORK[kind] not in MEANT:
            return False
        if not struck or struck[-1] == newest.number:
            return bool(struck)
        between = max((after - before for before, after in pairwise(steps)), default=0)
        return newest.last_step - steps[-1] <= _LATE * between


def _evidence(places: Mapping[int, RankPlace], place: str, members: Sequence[RankPauses]) -> str:
    cause, excess_ms = members[0].cause, [member.excess_ns / 1e6 for member in members]
    if len(members) > 1:
        return several_pause_longer(places, place, cause, [member.rank for member in members], excess_ms)
    where = format_rank(places, members[0].rank)
    return f"{one_pauses_longer(where, cause, members[0].mean_ns / 1e6, excess_ms[0])}."


def _cost_per_step(lost_ns: Sequence[tuple[int, float]], steps: int) -> float:
    """Return the cost of pauses per step: up to the next one, of a single one over all ``steps``.

    ``lost_ns`` has the steps with a pause, ascending, and the time lost in each.
    """
    if len(lost_ns) == 1:
        return lost_ns[0][1] / max(steps, 1)
    between = lost_ns[-1][0] - lost_ns[0][0]
    return sum(ns for _, ns in lost_ns[1:]) / max(between, 1)
