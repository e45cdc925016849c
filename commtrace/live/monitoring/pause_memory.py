"""What ranks did in single steps of the last minute: saving, evaluating, collecting garbage, waiting for input.

Such a pause is in few windows, and a window that holds one tells nothing of how often it comes. So pauses are
remembered, and ranks are compared by what they lost to them in all windows that are.

>>> memory = PauseMemory()                                      # doctest: +SKIP
>>> [one.rank for one in memory.take(reports)]                  # doctest: +SKIP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.occurrence import Occurrence
from commtrace.analysis.stragglers.limits import LIVE_PAUSES, Thresholds
from commtrace.analysis.stragglers.normal import Float64, Work, judge
from commtrace.analysis.stragglers.slow_ranks import MEANT
from commtrace.live.monitoring.window import PAUSES, WORK, Pause, WindowReport
from commtrace.trace.spans import Int64

_WINDOWS: Final = 15
"""A minute, with windows of the usual length."""

_WINDOWS_TO_NAME: Final = 3
"""So many must have pauses that nobody meant: a busy machine holds up single steps of a rank."""

_LATE: Final = 1.5
"""Pauses are over when the next one is late by so much of what usually lies between two."""


class RankPauses(NamedTuple):
    """A rank that pauses more than its peers do.

    Attributes:
        rank: which.
        cause: one of ``PAUSES``.
        cost_ns: per step.
        steps: over how many that is the mean.
        mean_ns, normal_ns: what the rank and its peers lose per step of the windows that are remembered.
        when: the pauses.
        windows: how many the first pause and all that came after it lie in.
    """

    rank: int
    cause: str
    cost_ns: float
    steps: int
    mean_ns: float
    normal_ns: float
    when: Occurrence
    windows: int


class _Window(NamedTuple):
    number: int
    steps: int
    last_step: int
    pauses: tuple[Pause, ...]


class PauseMemory:
    """The pauses of all ranks. Not for several threads at a time."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[_Window]] = {}

    def take(self, reports: Sequence[WindowReport]) -> list[RankPauses]:
        """Take new windows; who pauses more than others that do the same work, and has not stopped.

        Args:
            reports: with steps, at most one per rank.
        """
        for one in reports:
            own = self._windows.setdefault(one.rank, deque(maxlen=_WINDOWS))
            own.append(_Window(one.window, one.steps, one.last_step, one.pauses))
        return [found for kind in map(WORK.index, PAUSES) for found in self._judge(reports, kind)]

    def _judge(self, reports: Sequence[WindowReport], kind: int) -> Iterator[RankPauses]:
        if not any(pause.work == kind for one in reports for own in self._windows[one.rank] for pause in own.pauses):
            return
        steps = np.array([sum(own.steps for own in self._windows[one.rank]) for one in reports])
        stage = np.array([one.stage for one in reports], np.int64)
        lost = [sum(pause.ns for pause in self._pauses(one.rank, kind)) for one in reports]
        squares = np.array([sum(float(pause.ns) ** 2 for pause in self._pauses(one.rank, kind)) for one in reports])
        _, host = np.unique([one.host for one in reports], return_inverse=True)
        duration = np.array([one.duration_ns for one in reports], np.float64)
        mean = np.array(lost) / np.maximum(steps, 1)
        judged = judge(
            Work(
                rank=np.array([one.rank for one in reports], np.int64),
                peers=stage,
                host=host.reshape(-1).astype(np.int64),
                total_ns=mean,
                error_ns=np.zeros(len(mean)) if WORK[kind] in MEANT else _error_of_mean(squares, steps, stage),
                scale_ns=duration,
            ),
            LIVE_PAUSES,
        )
        limits = Thresholds()
        for at in np.flatnonzero(judged.is_slow).tolist():
            rank, normal_ns = int(judged.rank[at]), float(judged.normal_ns[at])
            if not self._lasts(rank, kind):
                continue
            pauses = self._pauses(rank, kind)
            cost_ns, spread = _cost(pauses, int(steps[at]))
            cost_ns *= 1 - normal_ns / float(mean[at])
            if cost_ns >= max(limits.cost_ms * 1e6, limits.share_of_step * duration[at]):
                when = Occurrence(tuple(one.step for one in pauses), sum(one.ns for one in pauses), int(steps[at]))
                windows = self._windows_since_first(rank, kind)
                yield RankPauses(rank, WORK[kind], cost_ns, spread, float(mean[at]), normal_ns, when, windows)

    def _pauses(self, rank: int, kind: int) -> list[Pause]:
        return [pause for own in self._windows[rank] for pause in own.pauses if pause.work == kind]

    def _windows_since_first(self, rank: int, kind: int) -> int:
        own = self._windows[rank]
        first = next(one.number for one in own if any(pause.work == kind for pause in one.pauses))
        return own[-1].number - first + 1

    def _lasts(self, rank: int, kind: int) -> bool:
        """Whether pauses are more than chance, and the next one is not late."""
        windows = self._windows[rank]
        struck = [own.number for own in windows if any(pause.work == kind for pause in own.pauses)]
        newest = windows[-1]
        steps = [pause.step for pause in self._pauses(rank, kind)]
        if len(struck) < _WINDOWS_TO_NAME and WORK[kind] not in MEANT:
            return False
        if not struck or struck[-1] == newest.number:
            return bool(struck)
        between = max((after - before for before, after in pairwise(steps)), default=0)
        return newest.last_step - steps[-1] <= _LATE * between


def _error_of_mean(squares: Float64, steps: Int64, peers: Int64) -> Float64:
    """By rank: the standard error of what it loses per step, if all ranks of its class are struck equally often."""
    error = np.zeros(len(squares))
    for one in np.unique(peers):
        own = peers == one
        error[own] = np.sqrt(squares[own].mean()) / np.maximum(steps[own], 1)
    return error


def _cost(pauses: Sequence[Pause], steps: int) -> tuple[float, int]:
    """Per step, and over how many steps that is the mean.

    Of several pauses, the steps from the first one to the last count, and of the pauses all but the first: the mean
    then does not depend on where the windows begin and end.
    """
    if len(pauses) == 1:
        return pauses[0].ns / max(steps, 1), steps
    between = pauses[-1].step - pauses[0].step
    return sum(one.ns for one in pauses[1:]) / max(between, 1), between
