"""The reports of all ranks on one window in columns, and which of them are beyond normal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.limits import CLEARED_BELOW, FEWEST_FOR_SCATTER, LIVE, LIVE_LASTING
from commtrace.analysis.stragglers.normal import MAJORITY, PAST, Judged, Work, judge
from commtrace.live.monitoring.drift import limit_of_drift
from commtrace.live.monitoring.since import Since
from commtrace.live.monitoring.slow_now import SlowNow
from commtrace.live.monitoring.window import WindowReport
from commtrace.trace.spans import Bool, Int64

_STILL: Final = 0.5
"""Share of its excess that a rank must have in the newer half of a window."""


class Level(NamedTuple):
    """The work of a slow rank and of its normal peers, ns per step."""

    own_ns: float
    normal_ns: float

    @classmethod
    def of(cls, slow: SlowNow) -> Level:
        return cls(slow.normal_ns + slow.excess_ns, slow.normal_ns)

    @classmethod
    def typical(cls, levels: Sequence[Level]) -> Level:
        own_ns, normal_ns = np.median(np.array(levels), axis=0).tolist()
        return cls(own_ns, normal_ns)


@dataclass(frozen=True, slots=True)
class WindowTable:
    """The reports of a window in columns; times in ns per step, pauses left out of the work."""

    work: Float64
    newest: Float64  # all work, in the newer half of the steps
    waiting: Float64
    compared: Work
    judged: Judged
    has_lasted: Bool | None = None  # only the mean over several windows stands out; None before there are as many

    @classmethod
    def of(
        cls,
        reports: Sequence[WindowReport],
        work: Float64,
        error: Float64,
        healthy_ns: Sequence[float],
        drift: float = 0.0,
    ) -> WindowTable:
        """Return the table; ``drift`` is the share by which the work of healthy ranks is known to drift."""
        _, host = np.unique([report.host for report in reports], return_inverse=True)
        compared = Work(
            rank=np.array([report.rank for report in reports], np.int64),
            peers=np.array([report.stage for report in reports], np.int64),
            host=host.reshape(-1).astype(np.int64),
            total_ns=work.sum(axis=1),
            error_ns=error,
            scale_ns=np.array([report.duration_ns for report in reports], np.float64),
            before_ns=np.array(healthy_ns),
        )
        waiting = np.array([report.waiting_ns for report in reports], np.float64)
        newest = np.array([report.newest_ns for report in reports], np.float64)
        judged = judge(compared, LIVE)
        known = np.nan_to_num(limit_of_drift(judged.normal_ns, drift))
        return cls(work, newest, waiting, compared, replace(judged, limit_ns=np.maximum(judged.limit_ns, known)))

    def with_lasting(self, windows: Float64) -> WindowTable:
        """Return it with the ranks that stand out only over several windows.

        ``windows`` are the work and its standard error, shape (ranks, windows, 2).
        """
        total = windows[:, :, 0].mean(axis=1)
        error = _error_of_several(windows, self.stage)
        lasting = judge(replace(self.compared, total_ns=total, error_ns=error, scale_ns=total), LIVE_LASTING)
        judged = _either(self.judged, lasting)
        return replace(self, judged=judged, has_lasted=judged.is_slow & ~self.judged.is_slow)

    def with_known_normal(self, slow: Mapping[int, Level]) -> WindowTable:
        """Return it with the normal work of stages whose peers have become slow as well.

        A rank that is as slow as it was when it was named shows that the work is the same. Then so is normal, and what
        was normal has not become the work of slow ranks because there are more of them. ``slow`` is by rank.
        """
        judged = self.judged
        normal, excess, limit = judged.normal_ns.copy(), judged.excess_ns.copy(), judged.limit_ns.copy()
        is_normal, source = judged.is_normal.copy(), list(judged.norm_source)
        least = np.maximum(LIVE.share * self.duration, LIVE.least_ns)
        allowed = np.maximum(least, LIVE.sigmas * self.compared.error_ns)
        for stage in np.unique(self.stage).tolist():
            own = np.flatnonzero(self.stage == stage)
            levels = [(at, slow[rank]) for at in own.tolist() if (rank := int(self.compared.rank[at])) in slow]
            same = [level.normal_ns for at, level in levels if abs(self.total[at] - level.own_ns) <= allowed[at]]
            if len(own) < 2 or not same or normal[own[0]] - (known := float(np.median(same))) <= least[own[0]]:
                continue
            normal[own], excess[own], limit[own] = known, self.total[own] - known, allowed[own]
            is_normal[own] = excess[own] <= least[own]
            for at in own.tolist():
                source[at] = PAST
        return replace(
            self,
            judged=replace(
                judged,
                normal_ns=normal,
                excess_ns=excess,
                limit_ns=limit,
                is_normal=is_normal,
                norm_source=tuple(source),
            ),
        )

    @property
    def stage(self) -> Int64:
        return self.compared.peers

    @property
    def total(self) -> Float64:
        return self.compared.total_ns

    @property
    def duration(self) -> Float64:
        return self.compared.scale_ns

    @property
    def is_known(self) -> Bool:
        return np.isfinite(self.judged.normal_ns)

    @property
    def is_clear(self) -> Bool:
        return np.asarray(np.nan_to_num(self.judged.excess_ns) < CLEARED_BELOW * self.judged.limit_ns)

    @property
    def is_slow(self) -> Bool:
        """Return which ranks are slow, and still so in the newer half of the steps: a few long steps may be over."""
        still = np.zeros(len(self.total))
        for stage in np.unique(self.stage).tolist():
            own = self.stage == stage
            normal = self.newest[own & self.judged.is_normal]
            still[own] = self.newest[own] - (np.median(normal) if len(normal) else 0.0)
        return np.asarray(self.judged.is_slow & (still >= _STILL * np.nan_to_num(self.judged.excess_ns)))

    @property
    def is_normal(self) -> Bool:
        # The work of the fastest is not remembered as normal: it may be faulty.
        return np.asarray(self.judged.is_normal & np.isin(self.judged.norm_source, (MAJORITY, PAST)))

    @property
    def has_peers(self) -> bool:
        return len(self.stage) > len(np.unique(self.stage))

    @property
    def peers_missing(self) -> bool:
        return bool((np.unique(self.stage, return_counts=True)[1] == 1).any())

    @property
    def typical_work_ns(self) -> dict[int, float]:
        """Return the normal work by stage with several ranks; the median if normal is unknown."""
        typical: dict[int, float] = {}
        for stage in np.unique(self.stage).tolist():
            own = self.stage == stage
            if own.sum() > 1:
                normal = float(self.judged.normal_ns[own][0])
                typical[stage] = normal if np.isfinite(normal) else float(np.median(self.total[own]))
        return typical

    def _waits(self, index: int) -> Bool:
        """Return the ranks that wait for a slow one."""
        others = np.arange(len(self.total)) != index
        quick = others & ~self.judged.is_slow
        return np.asarray(quick if quick.any() else others)

    def slow(self, index: int, since: Since) -> SlowNow:
        return SlowNow(
            rank=int(self.compared.rank[index]),
            since=since,
            work_ns_of=tuple(self.work[index].tolist()),
            excess_ns_of=self._excess_by_work(index),
            excess_ns=float(self.judged.excess_ns[index]),
            normal_ns=float(self.judged.normal_ns[index]),
            norm=self.judged.norm_source[index],
            waited_ns=float(np.median(self.waiting[self._waits(index)])),
            duration_ns=float(self.duration[index]),
            may_drift=self._may_drift(index),
        )

    def _may_drift(self, index: int) -> bool:
        if self.has_lasted is not None and self.has_lasted[index]:
            return False
        normal = self.judged.is_normal & (self.stage == self.stage[index])
        most_ns = float(limit_of_drift(self.judged.normal_ns[index : index + 1])[0])
        return int(normal.sum()) < FEWEST_FOR_SCATTER and float(self.judged.excess_ns[index]) <= most_ns

    def _excess_by_work(self, index: int) -> tuple[float, ...]:
        own = self.judged.is_normal & (self.stage == self.stage[index])
        if not own.any():  # what is normal is known of all work only
            return tuple((self.work[index] * self.judged.excess_ns[index] / max(self.total[index], 1.0)).tolist())
        return tuple((self.work[index] - np.median(self.work[own], axis=0)).tolist())


def _error_of_several(windows: Float64, peers: Int64) -> Float64:
    """Return the standard error of each rank's mean over ``windows``, shape (ranks, windows, 2): work and its error."""
    # Healthy ranks may drift for seconds, like the clocks of their devices. If windows scatter more than their steps
    # explain, the mean has that error as well, however many windows there are.
    of_steps = (windows[:, :, 1] ** 2).mean(axis=1)
    more = windows[:, :, 0].var(axis=1, ddof=1) - of_steps
    drift = np.zeros(len(more))
    for one in np.unique(peers):
        drift[peers == one] = max(float(more[peers == one].mean()), 0.0)
    return np.asarray(np.sqrt(of_steps / windows.shape[1] + drift))


def _either(window: Judged, lasting: Judged) -> Judged:
    """Return the judgement of a window, replaced for ranks that stand out only over several windows."""
    # The longer mean stands out for a while after the end: the newest window must show the excess as well.
    is_there = np.nan_to_num(window.excess_ns) > CLEARED_BELOW * lasting.limit_ns
    only_lasting = lasting.is_slow & is_there & ~window.is_slow
    return replace(
        window,
        normal_ns=np.where(only_lasting, lasting.normal_ns, window.normal_ns),
        excess_ns=np.where(only_lasting, lasting.excess_ns, window.excess_ns),
        limit_ns=np.where(lasting.is_slow, np.minimum(lasting.limit_ns, window.limit_ns), window.limit_ns),
        is_normal=window.is_normal & ~only_lasting,
        norm_source=tuple(
            other if is_other else own
            for own, other, is_other in zip(window.norm_source, lasting.norm_source, only_lasting.tolist(), strict=True)
        ),
    )
