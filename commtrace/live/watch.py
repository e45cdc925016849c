"""Joins the windows of all ranks and says who is slow, since when, why, and what it costs.

A rank is suspected when its own work, without waiting for anybody, is beyond what is normal at its pipeline stage, by
the rule that judges recorded runs. So a victim, which only waits, never is. It is named when that lasts, and cleared
when it is over.

>>> watch = Watch(world_size=8, seconds=4.0)                    # doctest: +SKIP
>>> for event in watch.join(reports, now):                      # doctest: +SKIP
...     print(event.sentence)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.rank_words import ranks_in_words, seconds_in_words
from commtrace.analysis.straggler_verdict import NEXT_STEP
from commtrace.analysis.stragglers.limits import (
    CLEARED_BELOW,
    LIVE,
    SHARE_OF_HOST,
    WINDOWS_TO_CLEAR,
    WINDOWS_TO_NAME,
)
from commtrace.analysis.stragglers.normal import FASTEST, MAJORITY, PAST, Judged, Work, judge
from commtrace.live.window import WORK, WindowReport

Float64 = npt.NDArray[np.float64]

SILENT_WINDOWS: Final = 3.0

HOST: Final = "host"
"""The cause where nearly all ranks of a host are slow."""

_COMPARED_WITH: Final = {
    PAST: "the ranks of its stage that work as long as before",
    FASTEST: "the fastest ranks of its stage",
}

FOUND, CLEARED, SILENT, BACK = "straggler", "recovered", "silent", "back"


@dataclass(frozen=True, slots=True)
class LiveStraggler:
    """A slow rank, or a host all of whose ranks are slow.

    Attributes:
        rank: the slow one, of a host the slowest.
        host: its node.
        who: the same in words, as ``commtrace straggler`` says it: a rank, or a host with its slow ranks.
        cause: ``compute``, ``data``, ``gc``, ``host`` or ``unknown``.
        since: epoch seconds: begin of the first window in which it stood out.
        cost_ms_per_step: the excess over what is normal, but no more than ranks that are not slow stood still. Of
            several slow ranks: what would be lost if all others were as quick as is normal.
        gpu_hours_per_day: the same over all devices of the job, a rank without a GPU counted as one.
        evidence: a sentence with the numbers.
        next_step: a sentence: what to do.
    """

    rank: int
    host: str
    who: str
    cause: str
    since: float
    cost_ms_per_step: float
    gpu_hours_per_day: float
    evidence: str
    next_step: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """Something that the person on call wants to know.

    Attributes:
        kind: ``straggler``, ``recovered``, ``silent`` (a rank stopped reporting) or ``back``.
        time: epoch seconds.
        rank, host: whom it is about.
        sentence: for people.
        straggler: with kind ``straggler`` and ``recovered``.
    """

    kind: str
    time: float
    rank: int
    host: str
    sentence: str
    straggler: LiveStraggler | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Record:
    """What is remembered of a rank between windows; ``well_ns`` is its work when that was last known to be normal."""

    host: str
    heard_at: float
    window: int = -1
    suspected: int = 0
    unsuspected: int = 0
    since: float = 0.0
    named: LiveStraggler | None = None
    well_ns: float = np.nan
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

    @property
    def stragglers(self) -> list[LiveStraggler]:
        """Who is slow now, dearest first; a host once."""
        named = [record.named for record in self._records.values() if record.named is not None]
        told: dict[str, LiveStraggler] = {}
        for one in sorted(named, key=lambda one: (-one.cost_ms_per_step, one.rank)):
            told.setdefault(f"host {one.host}" if one.cause == HOST else one.who, one)
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
        table = _Table.of(reports, [self._records[report.rank].well_ns for report in reports])
        self.step_ns = int(np.median(table.duration))
        self.window, self.work_ns = max(report.window for report in reports), table.typical_work_ns
        self.peers_missing = table.peers_missing
        for place in np.flatnonzero(table.is_normal).tolist():
            self._records[reports[place].rank].well_ns = float(table.total[place])
        stands_out, is_clear, is_known = table.judged.is_slow, table.is_clear, table.is_known
        slow_host = _slow_hosts(reports, stands_out)
        events = []
        for index, report in enumerate(reports):
            record = self._records[report.rank]
            if not is_known[index]:
                continue  # nobody to compare it with in this window: what was known of it stands
            if stands_out[index]:
                record.suspected, record.unsuspected = record.suspected + 1, 0
                record.since = record.since if record.suspected > 1 else now - self._seconds
                straggler = self._straggler(reports, table, index, record, slow_host)
                if record.named is None and record.suspected >= WINDOWS_TO_NAME:
                    record.named = straggler
                    events.append(_found(straggler, now, "GPU" if report.on_gpu else "rank"))
                elif record.named is not None:
                    record.named = straggler
            elif is_clear[index] or record.named is None:
                record.suspected, record.unsuspected = 0, record.unsuspected + 1
                if record.named is not None and record.unsuspected >= WINDOWS_TO_CLEAR:
                    events.append(_cleared(record.named, now))
                    record.named = None
        return _one_per_host(events)

    def _straggler(
        self,
        reports: Sequence[WindowReport],
        table: _Table,
        index: int,
        record: _Record,
        slow_host: Mapping[int, str],
    ) -> LiveStraggler:
        report, excess, normal = reports[index], float(table.judged.excess_ns[index]), table.judged.normal_ns[index]
        who, cause = f"rank {report.rank} on {report.host}", table.cause(index)
        if report.rank in slow_host:
            slow_ranks = sorted(rank for rank, host in slow_host.items() if host == report.host)
            who, cause = f"host {report.host} ({ranks_in_words(slow_ranks)})", HOST
        waited_ns = float(np.median(table.waiting[table.waits(index)]))
        cost_ns = min(excess, waited_ns)
        share = cost_ns / max(report.duration_ns, 1)
        return LiveStraggler(
            rank=report.rank,
            host=report.host,
            who=who,
            cause=cause,
            since=record.since,
            cost_ms_per_step=cost_ns / 1e6,
            gpu_hours_per_day=share * 24 * self._world_size,
            evidence=(
                f"Rank {report.rank} works {table.total[index] / 1e6:.1f} ms per step: {excess / 1e6:.1f} ms more "
                f"than {_COMPARED_WITH.get(table.judged.told_by[index], 'the ranks of its stage')}, which work "
                f"{normal / 1e6:.1f} ms. The others stand still for {waited_ns / 1e6:.1f} ms."
            ),
            next_step=NEXT_STEP[cause],
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
    """The reports of a window in columns; times in ns per step."""

    stage: npt.NDArray[np.int64]
    duration: Float64
    work: Float64
    total: Float64
    waiting: Float64
    judged: Judged

    @classmethod
    def of(cls, reports: Sequence[WindowReport], well_ns: Sequence[float]) -> _Table:
        stage = np.array([report.stage for report in reports], np.int64)
        duration = np.array([report.duration_ns for report in reports], np.float64)
        work = np.array([report.work_ns for report in reports], np.float64)
        total = work.sum(axis=1)
        _, host = np.unique([report.host for report in reports], return_inverse=True)
        judged = judge(
            Work(
                rank=np.array([report.rank for report in reports], np.int64),
                peers=stage,
                host=host.reshape(-1).astype(np.int64),
                total_ns=total,
                error_ns=np.array([report.error_ns for report in reports], np.float64),
                scale_ns=duration,
                before_ns=np.array(well_ns),
            ),
            LIVE,
        )
        waiting = np.array([report.waiting_ns for report in reports], np.float64)
        return cls(stage, duration, work, total, waiting, judged)

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

    def cause(self, index: int) -> str:
        """The work of which it does most beyond what is normal."""
        own = self.judged.is_normal & (self.stage == self.stage[index])
        return WORK[int(np.argmax(self.work[index] - np.median(self.work[own], axis=0)))]


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
        is_host = event.straggler is not None and event.straggler.cause == HOST
        key = (event.kind, event.host) if is_host else (event.kind, event.rank, event.time)
        known = told.get(key)
        if known is None or _cost(event) > _cost(known):
            told[key] = event
    return list(told.values())


def _cost(event: LiveEvent) -> float:
    return event.straggler.cost_ms_per_step if event.straggler else 0.0


def _found(straggler: LiveStraggler, now: float, device: str) -> LiveEvent:
    sentence = (
        f"Straggler: {straggler.who}, {straggler.cause}: costs {straggler.cost_ms_per_step:.1f} ms per step, "
        f"{straggler.gpu_hours_per_day:.3g} {device}-hours per day, for {_lasted(straggler, now)}. "
        f"{straggler.evidence} {straggler.next_step}"
    )
    return LiveEvent(FOUND, now, straggler.rank, straggler.host, sentence, straggler)


def _cleared(straggler: LiveStraggler, now: float) -> LiveEvent:
    who = straggler.who[:1].upper() + straggler.who[1:]
    sentence = f"{who} is as quick as its peers again ({straggler.cause}), after {_lasted(straggler, now)}."
    return LiveEvent(CLEARED, now, straggler.rank, straggler.host, sentence, replace(straggler))


def _lasted(straggler: LiveStraggler, now: float) -> str:
    return seconds_in_words(round(1e9 * (now - straggler.since)))
