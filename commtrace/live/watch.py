"""Joins the windows of all ranks and says who is slow, since when, why, and what it costs.

A rank is suspected when its own work, without waiting for anybody, exceeds that of the ranks at its pipeline stage. So
a victim, which only waits, never is. It is named when that lasts, and cleared when it is over.

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

from commtrace.analysis.peers import leave_one_out_median
from commtrace.analysis.rank_words import ranks_in_words, seconds_in_words
from commtrace.analysis.straggler_verdict import NEXT_STEP
from commtrace.live.window import WORK, WindowReport

Float64 = npt.NDArray[np.float64]

SHARE_OF_STEP: Final = 0.05
LEAST_NS: Final = 1_000_000
SIGMAS: Final = 5.0
"""A rank stands out by this share of the step, by this much time, and by so many standard errors."""

WINDOWS_TO_NAME: Final = 2
WINDOWS_TO_CLEAR: Final = 2
_CLEARED_BELOW: Final = 0.5
"""Cleared when the excess is below this share of what names: an excess at the limit must not flicker."""

SILENT_WINDOWS: Final = 3.0
_SHARE_OF_HOST: Final = 0.75
_MAD_TO_SIGMA: Final = 1.4826
_ERROR_OF_MEDIAN: Final = 1.2533
_FEWEST_PEERS_FOR_SCATTER: Final = 3

HOST: Final = "host"
"""The cause where nearly all ranks of a host are slow."""

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
        cost_ms_per_step: the excess over its peers, but no more than the other ranks stood still.
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
    """What is remembered of a rank between windows."""

    host: str
    heard_at: float
    window: int = -1
    suspected: int = 0
    unsuspected: int = 0
    since: float = 0.0
    named: LiveStraggler | None = None
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
        table = _Table.of(reports)
        self.step_ns = int(np.median(table.duration))
        self.window, self.work_ns = max(report.window for report in reports), table.typical_work_ns
        self.peers_missing = bool(np.isnan(table.peers).any())
        stands_out, is_clear, is_known = table.stands_out, table.is_clear, table.is_known
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
        report, excess = reports[index], float(table.excess[index])
        who, cause = f"rank {report.rank} on {report.host}", table.cause(index)
        if report.rank in slow_host:
            slow_ranks = sorted(rank for rank, host in slow_host.items() if host == report.host)
            who, cause = f"host {report.host} ({ranks_in_words(slow_ranks)})", HOST
        waited_ns = float(np.median(np.delete(table.waiting, index)))
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
                f"Rank {report.rank} works {table.work[index].sum() / 1e6:.1f} ms per step: {excess / 1e6:.1f} ms more "
                f"than the ranks of its stage, which work {table.peers[index] / 1e6:.1f} ms. The others stand still "
                f"for {waited_ns / 1e6:.1f} ms."
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
    waiting: Float64
    peers: Float64
    excess: Float64
    excess_of: Float64
    limit: Float64

    @classmethod
    def of(cls, reports: Sequence[WindowReport]) -> _Table:
        stage = np.array([report.stage for report in reports], np.int64)
        work = np.array([report.work_ns for report in reports], np.float64)
        duration = np.array([report.duration_ns for report in reports], np.float64)
        error = np.array([report.error_ns for report in reports], np.float64)
        total = work.sum(axis=1)
        peers = leave_one_out_median(stage, total)
        excess_of = np.stack([column - leave_one_out_median(stage, column) for column in work.T], axis=1)
        noise = np.hypot(error, np.nan_to_num(leave_one_out_median(stage, error)))
        return cls(
            stage=stage,
            duration=duration,
            work=work,
            waiting=np.array([report.waiting_ns for report in reports], np.float64),
            peers=peers,
            excess=total - peers,
            excess_of=excess_of,
            limit=np.maximum.reduce(
                [
                    SHARE_OF_STEP * duration,
                    np.full(len(duration), float(LEAST_NS)),
                    SIGMAS * np.hypot(noise, _scatter_of_others(stage, total)),
                ]
            ),
        )

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether there was somebody to compare it with."""
        return ~np.isnan(self.excess)

    @property
    def stands_out(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.nan_to_num(self.excess) > self.limit)

    @property
    def is_clear(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.nan_to_num(self.excess) < _CLEARED_BELOW * self.limit)

    @property
    def typical_work_ns(self) -> dict[int, float]:
        """By stage the median of its ranks, of two ranks the smaller: the median of two is half the slow one."""
        total = self.work.sum(axis=1)
        ranks = {stage: total[self.stage == stage] for stage in np.unique(self.stage).tolist()}
        return {
            stage: float(own.min() if len(own) == 2 else np.median(own)) for stage, own in ranks.items() if len(own) > 1
        }

    def cause(self, index: int) -> str:
        """The work of which it does most beyond its peers."""
        return WORK[int(np.argmax(np.nan_to_num(self.excess_of[index])))]


def _scatter_of_others(stage: npt.NDArray[np.int64], total: Float64) -> Float64:
    """Of each rank: how far the ranks of its stage are from each other, as a standard deviation; 0 for few ranks."""
    middle = leave_one_out_median(stage, total)
    scatter = _MAD_TO_SIGMA * leave_one_out_median(stage, np.abs(total - middle))
    _, which, count = np.unique(stage, return_inverse=True, return_counts=True)
    return np.where(count[which.reshape(-1)] > _FEWEST_PEERS_FOR_SCATTER, np.nan_to_num(scatter), 0.0)


def _slow_hosts(reports: Sequence[WindowReport], stands_out: npt.NDArray[np.bool_]) -> dict[int, str]:
    """By rank: its host, where nearly all ranks of a host stand out and those of most other hosts do not."""
    ranks: dict[str, list[int]] = {}
    slow: dict[str, list[int]] = {}
    for report, is_slow in zip(reports, stands_out.tolist(), strict=True):
        ranks.setdefault(report.host, []).append(report.rank)
        if is_slow:
            slow.setdefault(report.host, []).append(report.rank)
    whole = {host: own for host, own in slow.items() if len(own) >= max(2, _SHARE_OF_HOST * len(ranks[host]))}
    if not whole or 2 * len(whole) > len(ranks):
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
