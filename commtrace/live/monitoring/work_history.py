"""The work of all ranks in the last minutes, and the step from which on a rank is slow.

A recording is cut where the work of a rank changes; the same function cuts this history, so the monitor and
``commtrace summary`` give the same step.

>>> history = WorkHistory(world_size=8)
>>> history.add(report)  # doctest: +SKIP
>>> history.since(compared, [3], seconds=4.0)  # doctest: +SKIP
{3: Since(step=30, time=1795425247.0, within=0, is_first=False)}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.statistics import Float64
from commtrace.analysis.stragglers.change_points import (
    EDGE,
    Series,
    error_of_steps,
    find_cuts,
    without_single_steps,
)
from commtrace.analysis.stragglers.limits import RECORDED, Thresholds
from commtrace.analysis.stragglers.normal import Work, judge
from commtrace.live.monitoring.since import Since
from commtrace.live.monitoring.window import WindowReport
from commtrace.trace.spans import Int64

_MOST_SUMS: Final = 1_024
_FEWEST_SUMS: Final = 128
_MOST_SUMS_OF_ALL: Final = 1 << 22
"""Limits of the sums that are kept, of one rank and of all together, which take 128 MiB. The fewest are two reports."""

_MOST_COMPARED: Final = 64
"""Limit of the ranks of a stage that are looked at; the median of so many is that of all."""

_ERROR_OF_PLACE: Final = 11.0
"""The place of a change is known to so many squares of noise over change, in 95 % of the cases (Bai, Estimation of a
change point in multiple regression models, Review of Economics and Statistics 79, 1997)."""


class _ReportSums(NamedTuple):
    """The sums of one report, one row each: first step, number of steps, work, begin of the first step."""

    rows: Int64
    steps_per_sum: int


@dataclass(frozen=True, slots=True)
class _JoinedSums:
    """The sums that all of some ranks have; ``steps_per_sum`` steps each."""

    number: Int64  # of the first step
    begin_ns: Int64  # of that step, on the first rank
    work_ns: Float64  # per step, shape (ranks, sums)
    steps_per_sum: int

    def __len__(self) -> int:
        return len(self.number)


class WorkHistory:
    """Keeps the newest sums of work of every rank. Not thread-safe."""

    def __init__(self, world_size: int) -> None:
        self._most = min(_MOST_SUMS, max(_FEWEST_SUMS, _MOST_SUMS_OF_ALL // world_size))
        self._of_rank: dict[int, deque[_ReportSums]] = {}
        self._first_step: int | None = None

    def add(self, report: WindowReport) -> None:
        """Take the sums of a report. Steps that are done again replace themselves and what came after them."""
        if not report.work_sums:
            return
        rows = _last_repetition(np.array(report.work_sums, np.int64))
        reports = self._of_rank.setdefault(report.rank, deque())
        while reports and reports[-1].rows[-1, 0] >= rows[0, 0]:
            last = reports.pop()
            kept = last.rows[last.rows[:, 0] < rows[0, 0]]
            if len(kept):
                reports.append(last._replace(rows=kept))
        reports.append(_ReportSums(rows, report.steps_per_sum))
        while sum(len(report_sums.rows) for report_sums in reports) > self._most:
            reports.popleft()
        first = int(rows[0, 0])
        self._first_step = first if self._first_step is None else min(self._first_step, first)

    def begin_of(self, step: int) -> Since | None:
        """Return the begin of the sum that holds a step, by the first rank; None if no rank has it any more."""
        begins = [begin for reports in self._of_rank.values() if (begin := _begin_of(reports, step)) is not None]
        return min(begins, key=lambda begin: begin.time, default=None)

    def since(self, compared: Work, slow: Collection[int], seconds: float) -> dict[int, Since]:
        """Return the step from which on each of the ``slow`` ranks has been slow, where the history shows it.

        A rank is slow in a stretch by the rule for a recording. One in which it is not slow is no end if it lasts less
        than a window of ``seconds``, after which the rank would have been cleared.

        Args:
            compared: all ranks, of which ``total_ns`` and ``error_ns`` are not used.
            slow: ranks that are slow now.
            seconds: length of a window.
        """
        since_of_stages: dict[int, Since] = {}
        for stage in np.unique(compared.peers[np.isin(compared.rank, list(slow))]).tolist():
            rows = self._chosen(compared, stage, slow)
            steps = self._steps_of(compared.rank[rows].tolist())
            if steps is not None and len(steps) >= 2 * EDGE:
                since_of_stages |= _since_of_stage(compared, rows, steps, slow, seconds, is_whole=self._is_whole(steps))
        return {rank: self._by_all_ranks(since) for rank, since in since_of_stages.items()}

    def _is_whole(self, steps: _JoinedSums) -> bool:
        """Return whether the steps go back to the first ones of the job."""
        return int(steps.number[0]) <= (self._first_step or 0) + 2 * steps.steps_per_sum

    def _by_all_ranks(self, since: Since) -> Since:
        begin = self.begin_of(since.step)
        return since if begin is None or begin.step != since.step else since._replace(time=begin.time)

    def _chosen(self, compared: Work, stage: int, slow: Collection[int]) -> Int64:
        """Return the rows of slow ranks of a stage and of some others."""
        known = np.isin(compared.rank, list(self._of_rank)) & (compared.peers == stage)
        is_slow = np.isin(compared.rank, list(slow))
        named, compared_with = np.flatnonzero(known & is_slow), np.flatnonzero(known & ~is_slow)
        count = len(named) + len(compared_with)
        if count > _MOST_COMPARED:
            # Their share decides what is normal, unless they are few.
            named = named[: max(_MOST_COMPARED // 4, _MOST_COMPARED * len(named) // count)]
            compared_with = compared_with[
                np.linspace(0, len(compared_with) - 1, _MOST_COMPARED - len(named)).astype(np.int64)
            ]
        return np.sort(np.concatenate([named, compared_with]))

    def _steps_of(self, ranks: Collection[int]) -> _JoinedSums | None:
        """Return the sums that all of these ranks have, without the first step of the job, in which it warms up."""
        if len(ranks) < 2:
            return None
        per_sum = max(report_sums.steps_per_sum for rank in ranks for report_sums in self._of_rank[rank])
        tables = [_joined(self._of_rank[rank], per_sum) for rank in ranks]
        common = reduce(np.intersect1d, (table[:, 0] for table in tables))
        rows = np.stack([table[np.isin(table[:, 0], common)] for table in tables])
        is_alike = (rows[:, :, 1:3] == rows[0, :, 1:3]).all(axis=(0, 2)) & (rows[0, :, 1] > (self._first_step or 0))
        rows = rows[:, is_alike]
        if not rows.shape[1]:
            return None
        return _JoinedSums(rows[0, :, 1], rows[:, :, 4].min(axis=0), rows[:, :, 3] / rows[:, :, 2], per_sum)


def _last_repetition(rows: Int64) -> Int64:
    """Return the rows from the last step on that was done again."""
    again = np.flatnonzero(np.diff(rows[:, 0]) < 0)
    return rows[again[-1] + 1 :] if len(again) else rows


def _begin_of(reports: deque[_ReportSums], step: int) -> Since | None:
    for rows, steps_per_sum in reversed(reports):
        if rows[0, 0] <= step:
            first, steps, _, begin_ns = rows[np.searchsorted(rows[:, 0], step, side="right") - 1].tolist()
            return Since(first, begin_ns / 1e9, steps_per_sum - 1) if step < first + steps else None
    return None


def _joined(reports: Collection[_ReportSums], per_sum: int) -> Int64:
    """Return the sums of a rank over ``per_sum`` steps: their number, and the four columns of ``_ReportSums``."""
    rows = np.concatenate([report_sums.rows for report_sums in reports])
    number = rows[:, 0] // per_sum
    begins = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
    sums = np.add.reduceat(rows[:, 1:3], begins)
    return np.column_stack([number[begins], rows[begins, 0], sums, rows[begins, 3]])


def _since_of_stage(
    compared: Work, rows: Int64, steps: _JoinedSums, slow: Collection[int], seconds: float, *, is_whole: bool
) -> dict[int, Since]:
    level = np.median(steps.work_ns, axis=1)
    of_stage = np.median(steps.work_ns, axis=0)
    beyond = steps.work_ns - of_stage
    smooth, shortest = without_single_steps(beyond), Thresholds().fewest_steps
    error = error_of_steps(beyond, smooth, level, shortest)
    least = np.maximum(RECORDED.share * level, RECORDED.least_ns) / 2
    cuts = find_cuts(Series(smooth, error, least), shortest, goes_on=True)
    bounds = [*pairwise([0, *cuts, len(steps)])]
    judged = [
        judge(
            Work(
                rank=compared.rank[rows],
                peers=compared.peers[rows],
                host=compared.host[rows],
                total_ns=float(of_stage[first:end].mean()) + smooth[:, first:end].mean(axis=1),
                error_ns=error / np.sqrt(end - first),
                scale_ns=level,
                before_ns=None if compared.before_ns is None else compared.before_ns[rows],
            ),
            RECORDED,
        )
        for first, end in bounds
    ]
    since_of_rank: dict[int, Since] = {}
    for row, rank in enumerate(compared.rank[rows].tolist()):
        if rank not in slow:
            continue
        is_slow = [bool(each.is_slow[row]) for each in judged]
        stretch = _first_stretch(is_slow, [int(steps.begin_ns[first]) / 1e9 for first, _ in bounds], seconds)
        if stretch is None:
            continue
        first, end = bounds[stretch]
        excess = smooth[row] - smooth[judged[stretch].is_normal].mean(axis=0)
        mean = float(excess[first:end].mean())
        before = float(excess[slice(*bounds[stretch - 1])].mean()) if stretch else 0.0
        at = first if stretch else int(np.argmax(excess[:end] >= mean / 2))
        if not at and not is_whole:
            continue  # it began before the steps that are kept
        place_error = _ERROR_OF_PLACE * (error[row] / max(mean - before, 1.0)) ** 2 if at else 0.0
        within = int(min(place_error, len(steps))) * steps.steps_per_sum
        within += steps.steps_per_sum if steps.steps_per_sum > 1 else 0
        since_of_rank[rank] = Since(int(steps.number[at]), int(steps.begin_ns[at]) / 1e9, within, at == 0)
    return since_of_rank


def _first_stretch(is_slow: Sequence[bool], begins: Sequence[float], seconds: float) -> int | None:
    """Return the stretch in which it became slow, without an end of ``seconds`` since; None if it is not slow now.

    ``begins`` are those of the stretches.
    """
    first = None
    for stretch in reversed(range(len(is_slow))):
        if is_slow[stretch]:
            first = stretch
        elif first is None or begins[stretch + 1] - begins[stretch] >= seconds:
            break
    return first
