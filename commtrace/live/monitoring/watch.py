"""Compare the windows of all ranks, and name those that are slow.

A rank is suspected if its own work, without waiting, is beyond normal at its stage, so a victim never is.

>>> events = Watch(world_size=8, seconds=4.0).join(reports, now)  # doctest: +SKIP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.analysis.matching.stages import Flow, classes_of, not_told
from commtrace.analysis.stragglers.evidence import (
    DeviceEvidence,
    compare_devices,
    one_pauses_longer,
    several_pause_longer,
)
from commtrace.analysis.stragglers.late_hosts import LaunchLateness
from commtrace.analysis.stragglers.limits import (
    CLEARED_BELOW,
    LIVE,
    LIVE_LASTING,
    WINDOWS_OF_LASTING,
    WINDOWS_TO_CLEAR,
    WINDOWS_TO_NAME,
    Thresholds,
)
from commtrace.analysis.stragglers.normal import MAJORITY, PAST, Judged, Work, judge
from commtrace.analysis.stragglers.places import RankPlace, format_place
from commtrace.analysis.stragglers.search import NO_PEERS
from commtrace.analysis.stragglers.verdict import NamedRank, Verdict
from commtrace.findings.causes import advice
from commtrace.live.monitoring.findings import BACK, SILENT, LiveEvent, LiveStraggler, Since, StandingFindings
from commtrace.live.monitoring.past import JobPast, PauseMemory, SlowPauses
from commtrace.live.monitoring.sampled_replay import Price, Priced, SampledReplay, price
from commtrace.live.monitoring.slow_now import MOST_MEMBERS, SlowNow, rank_and_host, sets_now, straggler_of
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.work_history import WorkHistory
from commtrace.live.rank import MOST_READINGS
from commtrace.trace.metadata import DeviceState

Float64 = npt.NDArray[np.float64]

SILENT_WINDOWS: Final = 3.0

_TOGETHER: Final = WINDOWS_OF_LASTING + WINDOWS_TO_NAME
"""Ranks with one cause are one finding if they became slow within this number of windows, as the least slow one stands
out only over several."""

_WINDOWS_TO_DATE: Final = WINDOWS_OF_LASTING + WINDOWS_TO_NAME
"""Windows in a row in which a rank is slow until it is no longer looked up since when."""


@dataclass(slots=True)
class _Record:
    """The memory of a rank between windows."""

    host: str
    heard_at: float
    window: int = -1
    steps: int = 0  # that it has reported
    suspected: int = 0  # windows in a row in which it was beyond normal, or was named and is not clear yet
    unsuspected: int = 0
    slow: SlowNow | None = None  # the newest observation; None while it is not suspected
    price: Price | None = None  # its cost, if steps were replayed since
    phase: str = ""  # the only slow phase in the newest replay; else empty
    phases: str = ""  # the longer phases with numbers, from the same replay
    launches_late: bool = False  # most of its excess there lies before its phases
    launches: LaunchLateness | None = None  # of its work in the newest replay; None if not known
    long_inputs: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOWS_OF_LASTING))
    is_named: bool = False
    healthy_ns: float = np.nan  # its work when that was last normal
    # its work in the last few windows, with the standard error
    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS_OF_LASTING))
    device_model: str = ""
    device_states: deque[tuple[float, DeviceState]] = field(default_factory=lambda: deque(maxlen=MOST_READINGS))
    is_silent: bool = False
    has_ended: bool = False

    @property
    def long_input(self) -> str | None:
        # A single replay may be wrong in the noise of few steps: most must agree.
        seen = [microbatches for microbatches in self.long_inputs if microbatches is not None]
        return seen[-1] if 2 * len(seen) > len(self.long_inputs) else None


@dataclass(slots=True)
class _Undecided:
    """Abstentions of the newest window, and the number of windows in a row with any."""

    sentences: tuple[str, ...] = ()
    windows: int = 0

    def see(self, sentences: tuple[str, ...], windows: int = 1) -> None:
        self.sentences, self.windows = sentences, self.windows + windows if sentences else 0

    @property
    def lasting(self) -> tuple[str, ...]:
        return self.sentences if self.windows >= WINDOWS_TO_NAME else ()


class Watch:
    """Compares the windows of a job's ranks; a window lasts ``seconds``."""

    def __init__(self, world_size: int, seconds: float) -> None:
        self.step_ns = 0  # typical step in the newest window; 0 before the first
        self.window = -1  # the newest one; −1 before the first
        self.work_ns: Mapping[int, float] = {}  # typical per step in it, by stage with several ranks
        self.peers_missing = False  # a rank is alone at its stage
        self.classes: Mapping[int, int] = {}  # of the work of ranks, in a pipeline whose stages nobody told
        self._flows: dict[int, Flow] = {}
        self._world_size = world_size
        self._seconds = seconds
        self._records: dict[int, _Record] = {}
        self._places: dict[int, RankPlace] = {}
        self._replica_of: Mapping[int, int] = {}
        self._undecided = _Undecided()
        self._undecided_of_steps = _Undecided()
        self._history = WorkHistory(world_size)
        self._ranks = StandingFindings(windows_to_name=1, are_dated=True)
        self._memory = PauseMemory()
        self._pauses = StandingFindings(windows_to_name=1)
        self._replay = SampledReplay(world_size)
        self._past = JobPast()
        self._job_wide = StandingFindings(WINDOWS_TO_NAME)

    @property
    def stragglers(self) -> list[LiveStraggler]:
        """Return the findings that hold now, costliest first."""
        named = [*self._ranks.named, *self._pauses.named, *self._job_wide.named]
        return sorted(named, key=lambda one: (-one.cost_ms_per_step, one.rank))

    @property
    def abstentions(self) -> tuple[str, ...]:
        """Return the reasons why it is not known which ranks are slow, if they last."""
        return tuple(dict.fromkeys((*self._undecided.lasting, *self._undecided_of_steps.lasting)))

    @property
    def silent(self) -> list[int]:
        return sorted(rank for rank, record in self._records.items() if record.is_silent)

    @property
    def heard(self) -> int:
        """Return the number of ranks that have ever reported."""
        return len(self._records)

    def join(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        """Take the newest report of every rank, at ``now`` in epoch seconds, and return the changes.

        A report that was taken before is ignored.
        """
        news = [report for report in reports if self._is_new(report)]
        for report in news:
            record = self._records.setdefault(report.rank, _Record(report.host, now))
            record.window, record.heard_at, record.has_ended = report.window, now, report.ended
            record.steps += report.steps
            record.device_model = report.device_model or record.device_model
            record.device_states.extend((now, state) for state in report.device_states)
            self._history.add(report)
        stepping = self._with_classes([report for report in news if report.steps and not report.ended])
        events = self._judge(stepping, now) if stepping else []
        return [*events, *self._listen(now)]

    def _with_classes(self, reports: Sequence[WindowReport]) -> Sequence[WindowReport]:
        """Return the reports with the class of each rank's work as its stage, if messages show one."""
        self._flows.update((report.rank, report.flow) for report in reports)
        self.classes = classes_of(self._flows)
        if not self.classes:
            return reports
        return [replace(report, stage=self.classes[report.rank]) for report in reports]

    def _is_new(self, report: WindowReport) -> bool:
        known = self._records.get(report.rank)
        return known is None or report.window != known.window

    def _judge(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        table = self._table(reports)
        self.step_ns = int(np.median(table.duration))
        self.window, self.work_ns = max(report.window for report in reports), table.typical_work_ns
        self.peers_missing = table.peers_missing
        for place in np.flatnonzero(table.is_normal).tolist():
            self._records[reports[place].rank].healthy_ns = float(table.total[place])
        no_peers = not table.has_peers and len(reports) == self._world_size > 1
        why = (not_told(self.classes),) if self.classes else (NO_PEERS,) if no_peers else ()
        self._undecided.see((*why, *table.judged.undecided))
        for index, report in enumerate(reports):
            self._places[report.rank] = RankPlace(report.host, report.tensor_group)
            if table.is_known[index]:  # else it has no peer: the last judgement stands
                self._suspect(self._records[report.rank], table, index, report, now)
        self._date(table)
        priced = self._replayed(reports, table, now)
        device = "GPU" if any(report.on_gpu for report in reports) else "rank"
        # Of fewer steps, the noise between them is not known, as in a recording.
        are_enough = min(self._records[report.rank].steps for report in reports) >= Thresholds().fewest_steps
        events = self._ranks.join(self._slow_sets() if are_enough else [], now, device)
        pauses = [self._paused(one) for one in self._memory.take(reports) if are_enough]
        events += self._pauses.join(pauses, now, device)
        if priced is not None:
            self._undecided_of_steps.see(priced.undecided, self._replay.windows)
            job_wide = [self._of_verdict(verdict, reports, now) for verdict in priced.verdicts]
            windows = self._replay.windows
            events += self._job_wide.join(job_wide, now, device, kept=priced.not_looked_for, windows=windows)
        return events

    def _table(self, reports: Sequence[WindowReport]) -> _WindowTable:
        """Return the window, and mark the ranks that stand out only over several."""
        records = [self._records[report.rank] for report in reports]
        work = np.array([report.steady_ns for report in reports], np.float64)
        error = np.array([report.error_ns for report in reports], np.float64)
        for record, total, own in zip(records, work.sum(axis=1).tolist(), error.tolist(), strict=True):
            record.windows.append((total, own))
        table = _WindowTable.of(reports, work, error, [record.healthy_ns for record in records])
        if any(len(record.windows) < WINDOWS_OF_LASTING for record in records):
            return table
        windows = np.array([record.windows for record in records])
        error = _error_of_several(windows, table.stage)
        total = windows[:, :, 0].mean(axis=1)
        lasting = judge(replace(table.compared, total_ns=total, error_ns=error, scale_ns=total), LIVE_LASTING)
        return replace(table, judged=_either(table.judged, lasting))

    def _suspect(self, record: _Record, table: _WindowTable, index: int, report: WindowReport, now: float) -> None:
        if table.judged.is_slow[index]:
            since = self._in_window(report, now) if record.slow is None else record.slow.since
            record.slow = replace(
                table.slow(index, since), long_input=record.long_input, phases=record.phases, launches=record.launches
            )
            record.suspected, record.unsuspected = record.suspected + 1, 0
        elif table.is_clear[index] or not record.is_named:
            record.unsuspected += 1
            if not record.is_named or record.unsuspected >= WINDOWS_TO_CLEAR:
                record.suspected, record.slow, record.price, record.phase, record.is_named = 0, None, None, "", False
                record.long_inputs.clear()
                record.phases, record.launches = "", None

    def _in_window(self, report: WindowReport, now: float) -> Since:
        """Return the first step of a window, in one of whose steps something began."""
        begin = self._history.begin_of(report.first_step)
        known = Since(report.first_step, now - self._seconds) if begin is None else begin
        return known._replace(within=report.steps)

    def _date(self, table: _WindowTable) -> None:
        """Look up since when ranks are slow that became so a few windows ago; later, more steps tell no more."""
        new = {
            int(rank): record
            for rank in table.compared.rank
            if (record := self._records[int(rank)]).slow is not None and record.suspected <= _WINDOWS_TO_DATE
        }
        for rank, since in self._history.since(table.compared, new.keys(), self._seconds).items():
            record = new[rank]
            assert record.slow is not None
            record.slow = replace(record.slow, since=since)

    def _replayed(self, reports: Sequence[WindowReport], table: _WindowTable, now: float) -> Priced | None:
        """Replay sampled steps: find the cost of slow ranks, and other causes."""
        steps = self._replay.newest(reports, now)
        if steps is None:
            return None
        slow = {rank: record.slow for rank, record in self._records.items() if record.slow is not None}
        sets = [frozenset(one.rank for one in members) for _, members in self._together(is_due=True)]
        sets += [frozenset(one.rank for one in members) for _, members in self._together(is_due=False)]
        normal = [rank for rank in table.judged.normal_ranks.tolist() if rank not in slow]
        priced = price(steps, sets, np.array(normal, np.int64), self._past)
        self._replica_of = priced.replica_of
        long_input = {rank: one.microbatches for one in priced.longer_inputs for rank in one.ranks}
        for rank, one in slow.items():
            record = self._records[rank]
            record.long_inputs.append(long_input.get(rank))
            record.phases = priced.phase_texts.get(rank, "")
            record.launches = priced.launches[rank]
            record.slow = replace(one, long_input=record.long_input, phases=record.phases, launches=record.launches)
            record.price = priced.price(rank, one.excess_ns) or record.price
            record.phase, record.launches_late = priced.phases[rank], rank in priced.late
        return priced

    def _together(self, *, is_due: bool) -> Iterator[tuple[str, list[SlowNow]]]:
        """Yield the sets of slow ranks that have been slow long enough to be named, or the others."""
        slow = [
            record.slow
            for record in self._records.values()
            if record.slow is not None and (record.is_named or record.suspected >= WINDOWS_TO_NAME) == is_due
        ]
        yield from sets_now(self._places, slow, _TOGETHER * self._seconds)

    def _slow_sets(self) -> list[LiveStraggler]:
        """Return the sets of slow ranks to name; a new one must cost enough."""
        prices = {rank: record.price for rank, record in self._records.items() if record.price is not None}
        found = []
        for place, members in self._together(is_due=True):
            slowest = self._records[members[0].rank]
            straggler = straggler_of(
                self._places,
                place,
                members,
                prices,
                slowest.phase,
                self._world_size,
                replica_of=self._replica_of,
                devices=[self._device(one) for one in members[:MOST_MEMBERS]],
                late=slowest.launches_late,
            )
            own = [self._records[one.rank] for one in members]
            if any(record.is_named for record in own) or _is_worth_naming(straggler, members[0].duration_ns):
                found.append(straggler)
                for record in own:
                    record.is_named = True
        return found

    def _device(self, slow: SlowNow) -> DeviceEvidence | None:
        def readings(record: _Record) -> list[DeviceState]:
            return [state for at, state in record.device_states if at > slow.since.time]

        own = self._records[slow.rank]
        others = (one for one in self._records.values() if one is not own and one.device_model == own.device_model)
        return compare_devices(readings(own), [readings(one) for one in others])

    def _paused(self, one: SlowPauses) -> LiveStraggler:
        ranks, first = sorted(member.rank for member in one.members), one.members[0]
        members = [NamedRank(each.rank, self._places[each.rank].host, each.excess_ns / 1e6) for each in one.members]
        return LiveStraggler(
            rank=first.rank,
            host=self._places[first.rank].host,
            who=format_place(self._places, one.place, ranks),
            place=one.place,
            cause=one.cause,
            since=one.since.time,
            cost_ms_per_step=one.cost_ns / 1e6,
            gpu_hours_per_day=one.cost_ns / max(self.step_ns, 1) * 24 * self._world_size,
            evidence=self._why_paused(one),
            next_step=advice(one.cause, len(ranks), one.place),
            occurrence=one.when.describe(),
            steps=one.steps,
            ranks=tuple(ranks),
            since_step=one.since.step,
            members=tuple(members[:MOST_MEMBERS]),
        )

    def _why_paused(self, one: SlowPauses) -> str:
        if len(one.members) > 1:
            ranks, excess_ms = zip(*((member.rank, member.excess_ns / 1e6) for member in one.members), strict=True)
            return several_pause_longer(self._places, one.place, one.cause, ranks, excess_ms)
        (member,) = one.members
        where = rank_and_host(self._places, member.rank)
        return f"{one_pauses_longer(where, one.cause, member.mean_ns / 1e6, member.excess_ns / 1e6)}."

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
            members=verdict.members[:MOST_MEMBERS],
            cost_is_bound=verdict.cost_is_bound,
        ).beginning(self._in_window(min(reports, key=lambda report: report.first_step), now))

    def _listen(self, now: float) -> list[LiveEvent]:
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
class _WindowTable:
    """The reports of a window in columns; times in ns per step, pauses left out of the work."""

    work: Float64
    waiting: Float64
    compared: Work
    judged: Judged

    @classmethod
    def of(
        cls, reports: Sequence[WindowReport], work: Float64, error: Float64, healthy_ns: Sequence[float]
    ) -> _WindowTable:
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
        return cls(work, waiting, compared, judge(compared, LIVE))

    @property
    def stage(self) -> npt.NDArray[np.int64]:
        return self.compared.peers

    @property
    def total(self) -> Float64:
        return self.compared.total_ns

    @property
    def duration(self) -> Float64:
        return self.compared.scale_ns

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.judged.normal_ns)

    @property
    def is_clear(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.nan_to_num(self.judged.excess_ns) < CLEARED_BELOW * self.judged.limit_ns)

    @property
    def is_normal(self) -> npt.NDArray[np.bool_]:
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

    def _waits(self, index: int) -> npt.NDArray[np.bool_]:
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
            norm_source=self.judged.norm_source[index],
            waited_ns=float(np.median(self.waiting[self._waits(index)])),
            duration_ns=float(self.duration[index]),
        )

    def _excess_by_work(self, index: int) -> tuple[float, ...]:
        own = self.judged.is_normal & (self.stage == self.stage[index])
        return tuple((self.work[index] - np.median(self.work[own], axis=0)).tolist())


def _error_of_several(windows: Float64, peers: npt.NDArray[np.int64]) -> Float64:
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


def _is_worth_naming(straggler: LiveStraggler, step_ns: float) -> bool:
    limits = Thresholds()
    return straggler.cost_ms_per_step >= max(limits.cost_ms, limits.share_of_step * step_ns / 1e6)
