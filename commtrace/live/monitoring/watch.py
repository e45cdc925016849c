"""Joins the windows of all ranks and says who is slow, since when, why, and what it costs.

A rank is suspected when its own work, without waiting for anybody, is beyond what is normal at its pipeline stage, by
the rule that judges recorded runs. So a victim, which only waits, never is. It is named when that lasts, and cleared
when it is over.

>>> watch = Watch(world_size=8, seconds=4.0)                    # doctest: +SKIP
>>> for event in watch.join(reports, now):                      # doctest: +SKIP
...     print(event.sentence)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.rank_words import ranks_in_words
from commtrace.analysis.stragglers.limits import (
    CLEARED_BELOW,
    LIVE,
    LIVE_LASTING,
    SHARE_OF_HOST,
    WINDOWS_OF_LASTING,
    WINDOWS_TO_CLEAR,
    WINDOWS_TO_NAME,
    Thresholds,
)
from commtrace.analysis.stragglers.normal import FASTEST, MAJORITY, PAST, Judged, Work, judge
from commtrace.analysis.stragglers.verdict import ACTIVITY, HOST, ONLY_PHASE, PHASES, RANKS, Verdict, next_step
from commtrace.live.monitoring.findings import BACK, SILENT, LiveEvent, LiveStraggler, cleared, found
from commtrace.live.monitoring.pause_memory import PauseMemory, RankPauses
from commtrace.live.monitoring.sampled_replay import Priced, SampledReplay, price
from commtrace.live.monitoring.standing import StandingFindings
from commtrace.live.monitoring.window import WORK, WindowReport

Float64 = npt.NDArray[np.float64]

SILENT_WINDOWS: Final = 3.0

_COMPARED_WITH: Final = {
    PAST: "the ranks of its stage that work as long as before",
    FASTEST: "the fastest ranks of its stage",
}


@dataclass(slots=True)
class _Record:
    """What is remembered of a rank between windows.

    Attributes:
        well_ns: its work when that was last known to be normal.
        cost_ns: what it costs per step, as far as steps were replayed since it is suspected.
        phase: the one in which alone it is slow, as the newest replayed steps tell; else empty.
        windows: its work in the last few, and the standard error of it.
    """

    host: str
    heard_at: float
    window: int = -1
    suspected: int = 0
    unsuspected: int = 0
    since: float = 0.0
    since_step: int = -1
    named: LiveStraggler | None = None
    well_ns: float = np.nan
    cost_ns: float | None = None
    phase: str = ""
    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS_OF_LASTING))
    is_silent: bool = False
    has_ended: bool = False


class Watch:
    """The memory of the join.

    Args:
        world_size: ranks of the job.
        seconds: length of a window.

    Attributes:
        step_ns: typical step in the newest window; 0 before the first.
        window: the newest one; −1 before the first.
        work_ns: what a rank typically worked per step in it, by stage; without the stages of a single rank.
        peers_missing: True when some rank has nobody at its stage to be compared with.
    """

    def __init__(self, world_size: int, seconds: float) -> None:
        self.step_ns = 0
        self.window = -1
        self.work_ns: Mapping[int, float] = {}
        self.peers_missing = False
        self._world_size = world_size
        self._seconds = seconds
        self._records: dict[int, _Record] = {}
        self._memory = PauseMemory()
        self._pauses = StandingFindings(windows_to_name=1)
        self._replay = SampledReplay(world_size)
        self._job_wide = StandingFindings(WINDOWS_TO_NAME)

    @property
    def stragglers(self) -> list[LiveStraggler]:
        """What holds up the job now, dearest first; a host once."""
        named = [record.named for record in self._records.values() if record.named is not None]
        named += [*self._pauses.named, *self._job_wide.named]
        told: dict[tuple[str, str], LiveStraggler] = {}
        for one in sorted(named, key=lambda one: (-one.cost_ms_per_step, one.rank)):
            told.setdefault((HOST, one.host) if one.place == HOST else (one.cause, one.who), one)
        return list(told.values())

    @property
    def silent(self) -> list[int]:
        """Ranks that have stopped reporting."""
        return sorted(rank for rank, record in self._records.items() if record.is_silent)

    @property
    def heard(self) -> int:
        """How many ranks have ever reported."""
        return len(self._records)

    def join(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        """Take the newest report of every rank; what has changed.

        Args:
            reports: at most one per rank; one that was taken before is recognised by its window.
            now: epoch seconds.
        """
        news = [report for report in reports if self._is_new(report)]
        for report in news:
            record = self._records.setdefault(report.rank, _Record(report.host, now))
            record.window, record.heard_at, record.has_ended = report.window, now, report.ended
        stepping = [report for report in news if report.steps and not report.ended]
        events = self._judge(stepping, now) if stepping else []
        return [*events, *self._listen(now)]

    def _is_new(self, report: WindowReport) -> bool:
        known = self._records.get(report.rank)
        return known is None or report.window != known.window

    def _judge(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        table = self._table(reports)
        self.step_ns = int(np.median(table.duration))
        self.window, self.work_ns = max(report.window for report in reports), table.typical_work_ns
        self.peers_missing = table.peers_missing
        for place in np.flatnonzero(table.is_normal).tolist():
            self._records[reports[place].rank].well_ns = float(table.total[place])
        stands_out, is_clear, is_known = table.judged.is_slow, table.is_clear, table.is_known
        slow_host = _slow_hosts(reports, stands_out)
        priced = self._replayed(reports, table, slow_host, now)
        device = "GPU" if any(report.on_gpu for report in reports) else "rank"
        events: list[LiveEvent] = []
        for index, report in enumerate(reports):
            record = self._records[report.rank]
            if not is_known[index]:
                continue  # nobody to compare it with in this window: what was known of it stands
            if stands_out[index]:
                record.suspected, record.unsuspected = record.suspected + 1, 0
                if record.suspected == 1:
                    record.since, record.since_step = now - self._seconds, report.first_step
                straggler = self._straggler(reports, table, index, record, slow_host, priced)
                if record.named is not None:
                    record.named = straggler
                elif record.suspected >= WINDOWS_TO_NAME and _is_worth_naming(straggler, table.duration[index]):
                    record.named = straggler
                    events.append(found(straggler, now, device))
            elif is_clear[index] or record.named is None:
                record.suspected, record.unsuspected, record.cost_ns = 0, record.unsuspected + 1, None
                if record.named is not None and record.unsuspected >= WINDOWS_TO_CLEAR:
                    events.append(cleared(record.named, now))
                    record.named = None
        events = _one_per_host(events)
        pauses = [self._paused(one, reports, now) for one in self._memory.take(reports)]
        events += self._pauses.join(pauses, now, device)
        if priced is not None:
            job_wide = [self._of_verdict(verdict, reports, now) for verdict in priced.verdicts]
            windows = self._replay.windows
            events += self._job_wide.join(job_wide, now, device, kept=priced.not_looked_for, windows=windows)
        return events

    def _table(self, reports: Sequence[WindowReport]) -> _Table:
        """The window, with the ranks that stand out only over several windows."""
        records = [self._records[report.rank] for report in reports]
        work = np.array([report.steady_ns for report in reports], np.float64)
        error = np.array([report.error_ns for report in reports], np.float64)
        for record, total, own in zip(records, work.sum(axis=1).tolist(), error.tolist(), strict=True):
            record.windows.append((total, own))
        table = _Table.of(reports, work, error, [record.well_ns for record in records])
        if any(len(record.windows) < WINDOWS_OF_LASTING for record in records):
            return table
        windows = np.array([record.windows for record in records])
        error = _error_of_several(windows, table.stage)
        total = windows[:, :, 0].mean(axis=1)
        lasting = judge(replace(table.compared, total_ns=total, error_ns=error, scale_ns=total), LIVE_LASTING)
        return replace(table, judged=_either(table.judged, lasting))

    def _replayed(
        self, reports: Sequence[WindowReport], table: _Table, slow_host: Mapping[int, str], now: float
    ) -> Priced | None:
        """What sampled steps tell of who is slow, and of what else is."""
        bench = self._replay.newest(reports, now)
        if bench is None:
            return None
        named = [report.rank for report in reports if self._records[report.rank].named is not None]
        slow = {*(report.rank for report, out in zip(reports, table.judged.is_slow, strict=True) if out), *named}
        sets: dict[str, set[int]] = {}
        for rank in sorted(slow):
            sets.setdefault(f"host {slow_host[rank]}" if rank in slow_host else f"rank {rank}", set()).add(rank)
        normal = [rank for rank in table.judged.normal_ranks.tolist() if rank not in slow]
        return price(bench, [frozenset(one) for one in sets.values()], np.array(normal, np.int64))

    def _straggler(
        self,
        reports: Sequence[WindowReport],
        table: _Table,
        index: int,
        record: _Record,
        slow_host: Mapping[int, str],
        priced: Priced | None,
    ) -> LiveStraggler:
        report, excess, normal = reports[index], float(table.judged.excess_ns[index]), table.judged.normal_ns[index]
        who, place, cause, slow_ranks = (
            f"rank {report.rank} on {report.host}",
            RANKS,
            table.cause([index]),
            [report.rank],
        )
        if report.rank in slow_host:
            slow_ranks = sorted(rank for rank, host in slow_host.items() if host == report.host)
            who, place = f"host {report.host} ({ranks_in_words(slow_ranks)})", HOST
            cause = table.cause([at for at, other in enumerate(reports) if other.rank in slow_ranks])
        if priced is not None:
            record.phase = priced.slow_phase(report.rank)
        if cause == "compute" and record.phase:
            cause = record.phase
        waited_ns = float(np.median(table.waiting[table.waits(index)]))
        cost_ns = min(excess, waited_ns) if record.cost_ns is None else record.cost_ns
        replayed_ns = None if priced is None else priced.cost_ns(report.rank, excess)
        if replayed_ns is not None:
            cost_ns = record.cost_ns = replayed_ns
        share = cost_ns / max(report.duration_ns, 1)
        return LiveStraggler(
            rank=report.rank,
            host=report.host,
            who=who,
            place=place,
            cause=cause,
            since=record.since,
            cost_ms_per_step=cost_ns / 1e6,
            gpu_hours_per_day=share * 24 * self._world_size,
            evidence=(
                f"Rank {report.rank} works {(normal + excess) / 1e6:.1f} ms per step: {excess / 1e6:.1f} ms more "
                f"than {_COMPARED_WITH.get(table.judged.told_by[index], 'the ranks of its stage')}, which work "
                f"{normal / 1e6:.1f} ms. The others stand still for {waited_ns / 1e6:.1f} ms."
                + (f" {ONLY_PHASE.format(phase=PHASES[cause])}" if cause in PHASES else "")
            ),
            next_step=next_step(cause, len(slow_ranks), place),
            ranks=tuple(slow_ranks),
            since_step=record.since_step,
        )

    def _paused(self, one: RankPauses, reports: Sequence[WindowReport], now: float) -> LiveStraggler:
        (report,) = (report for report in reports if report.rank == one.rank)
        how_often = one.when.in_words()
        return LiveStraggler(
            rank=one.rank,
            host=report.host,
            who=f"rank {one.rank} on {report.host}",
            place=RANKS,
            cause=one.cause,
            since=now - one.windows * self._seconds,
            cost_ms_per_step=one.cost_ns / 1e6,
            gpu_hours_per_day=one.cost_ns / max(report.duration_ns, 1) * 24 * self._world_size,
            evidence=(
                f"Rank {one.rank} needs {one.mean_ns / 1e6:.1f} ms per step for {ACTIVITY[one.cause]} (mean of "
                f"{one.when.num_steps} steps), the other ranks of its stage {one.normal_ns / 1e6:.1f} ms."
            ),
            next_step=next_step(one.cause, 1),
            occurrence=how_often,
            steps=one.steps,
            ranks=(one.rank,),
            since_step=one.when.steps[0],
        )

    def _of_verdict(self, verdict: Verdict, reports: Sequence[WindowReport], now: float) -> LiveStraggler:
        return LiveStraggler(
            rank=verdict.rank,
            host=verdict.host,
            who=verdict.who,
            place=verdict.place,
            cause=verdict.cause,
            since=now - self._seconds,
            cost_ms_per_step=verdict.cost_ms_per_step,
            gpu_hours_per_day=verdict.gpu_hours_per_day,
            evidence=verdict.evidence,
            next_step=verdict.next_step,
            ranks=verdict.ranks,
            since_step=min(report.first_step for report in reports),
        )

    def _listen(self, now: float) -> list[LiveEvent]:
        """Who has stopped reporting, and who is back."""
        events = []
        for rank, record in sorted(self._records.items()):
            quiet = now - record.heard_at
            is_silent = quiet > SILENT_WINDOWS * self._seconds and not record.has_ended
            if is_silent and not record.is_silent:
                sentence = f"Rank {rank} on {record.host} has not reported for {quiet:.0f} s: dead, stuck or cut off."
                events.append(LiveEvent(SILENT, now, rank, record.host, sentence))
            elif record.is_silent and not is_silent:
                events.append(LiveEvent(BACK, now, rank, record.host, f"Rank {rank} on {record.host} reports again."))
            record.is_silent = is_silent
        return events


@dataclass(frozen=True, slots=True)
class _Table:
    """The reports of a window in columns; times in ns per step, pauses left out of the work."""

    work: Float64
    waiting: Float64
    compared: Work
    judged: Judged

    @classmethod
    def of(cls, reports: Sequence[WindowReport], work: Float64, error: Float64, well_ns: Sequence[float]) -> _Table:
        _, host = np.unique([report.host for report in reports], return_inverse=True)
        compared = Work(
            rank=np.array([report.rank for report in reports], np.int64),
            peers=np.array([report.stage for report in reports], np.int64),
            host=host.reshape(-1).astype(np.int64),
            total_ns=work.sum(axis=1),
            error_ns=error,
            scale_ns=np.array([report.duration_ns for report in reports], np.float64),
            before_ns=np.array(well_ns),
        )
        waiting = np.array([report.waiting_ns for report in reports], np.float64)
        return cls(work, waiting, compared, judge(compared, LIVE))

    @property
    def stage(self) -> npt.NDArray[np.int64]:
        return self.compared.peers

    @property
    def total(self) -> Float64:
        return self.compared.total_ns

    @property
    def duration(self) -> Float64:
        """Of a step."""
        return self.compared.scale_ns

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether it could be compared."""
        return np.isfinite(self.judged.normal_ns)

    @property
    def is_clear(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.nan_to_num(self.judged.excess_ns) < CLEARED_BELOW * self.judged.limit_ns)

    @property
    def is_normal(self) -> npt.NDArray[np.bool_]:
        """Whose work may be remembered: it is that of most ranks, or what it was. The fastest may be out of order."""
        return np.asarray(self.judged.is_normal & np.isin(self.judged.told_by, (MAJORITY, PAST)))

    @property
    def peers_missing(self) -> bool:
        """Whether a rank is alone at its stage."""
        return bool((np.unique(self.stage, return_counts=True)[1] == 1).any())

    @property
    def typical_work_ns(self) -> dict[int, float]:
        """By stage with several ranks: what is normal there; the median where that cannot be told."""
        typical: dict[int, float] = {}
        for stage in np.unique(self.stage).tolist():
            own = self.stage == stage
            if own.sum() > 1:
                normal = float(self.judged.normal_ns[own][0])
                typical[stage] = normal if np.isfinite(normal) else float(np.median(self.total[own]))
        return typical

    def waits(self, index: int) -> npt.NDArray[np.bool_]:
        """The ranks that stand still for a slow one: those that are not slow themselves, as far as there are any."""
        others = np.arange(len(self.total)) != index
        quick = others & ~self.judged.is_slow
        return np.asarray(quick if quick.any() else others)

    def cause(self, indices: Sequence[int]) -> str:
        """The work of which ranks do most beyond what is normal."""
        excess = np.zeros(len(WORK))
        for index in indices:
            own = self.judged.is_normal & (self.stage == self.stage[index])
            excess += self.work[index] - np.median(self.work[own], axis=0)
        return WORK[int(np.argmax(excess))]


def _error_of_several(windows: Float64, peers: npt.NDArray[np.int64]) -> Float64:
    """Standard error of the mean over several windows, of each rank.

    The work of healthy ranks may drift for seconds, as that of devices whose clocks go up and down. By what windows
    scatter more than their steps explain, their mean is wrong as well, however many there are.

    Args:
        windows: work of each rank in each window, and its standard error; shape (ranks, windows, 2).
        peers: class of each rank.
    """
    of_steps = (windows[:, :, 1] ** 2).mean(axis=1)
    more = windows[:, :, 0].var(axis=1, ddof=1) - of_steps
    drift = np.zeros(len(more))
    for one in np.unique(peers):
        drift[peers == one] = max(float(more[peers == one].mean()), 0.0)
    return np.asarray(np.sqrt(of_steps / windows.shape[1] + drift))


def _either(window: Judged, lasting: Judged) -> Judged:
    """The judgement of a window; of ranks that stand out over several and not in it alone, that of the several.

    What has ended stands out over several windows for a while: in the newest one it must be there as well.
    """
    is_there = np.nan_to_num(window.excess_ns) > CLEARED_BELOW * lasting.limit_ns
    only_lasting = lasting.is_slow & is_there & ~window.is_slow
    return replace(
        window,
        normal_ns=np.where(only_lasting, lasting.normal_ns, window.normal_ns),
        excess_ns=np.where(only_lasting, lasting.excess_ns, window.excess_ns),
        limit_ns=np.where(lasting.is_slow, np.minimum(lasting.limit_ns, window.limit_ns), window.limit_ns),
        is_normal=window.is_normal & ~only_lasting,
        told_by=tuple(
            other if is_other else own
            for own, other, is_other in zip(window.told_by, lasting.told_by, only_lasting.tolist(), strict=True)
        ),
    )


def _is_worth_naming(straggler: LiveStraggler, step_ns: float) -> bool:
    limits = Thresholds()
    return straggler.cost_ms_per_step >= max(limits.cost_ms, limits.share_of_step * step_ns / 1e6)


def _slow_hosts(reports: Sequence[WindowReport], stands_out: npt.NDArray[np.bool_]) -> dict[int, str]:
    """By rank: its host, where nearly all ranks of a host stand out, and it is not the only one."""
    ranks: dict[str, list[int]] = {}
    slow: dict[str, list[int]] = {}
    for report, is_slow in zip(reports, stands_out.tolist(), strict=True):
        ranks.setdefault(report.host, []).append(report.rank)
        if is_slow:
            slow.setdefault(report.host, []).append(report.rank)
    whole = {host: own for host, own in slow.items() if len(own) >= max(2, SHARE_OF_HOST * len(ranks[host]))}
    if len(ranks) < 2:
        return {}
    return {rank: host for host, own in whole.items() for rank in own}


def _one_per_host(events: Sequence[LiveEvent]) -> list[LiveEvent]:
    """Of the ranks of one slow host, the dearest is told."""
    told: dict[Any, LiveEvent] = {}
    for event in events:
        is_host = event.straggler is not None and event.straggler.place == HOST
        key = (event.kind, event.host) if is_host else (event.kind, event.rank, event.time)
        known = told.get(key)
        if known is None or _cost(event) > _cost(known):
            told[key] = event
    return list(told.values())


def _cost(event: LiveEvent) -> float:
    return event.straggler.cost_ms_per_step if event.straggler else 0.0
