"""Compare the windows of all ranks, and name those that are slow.

A rank is suspected if its own work, without waiting, is beyond normal at its stage, so a victim never is.

>>> events = Watch(world_size=8, seconds=4.0).join(reports, now)  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from commtrace.analysis.matching.stages import Flow, classes_of, not_told
from commtrace.analysis.stragglers.limits import (
    WINDOWS_OF_LASTING,
    WINDOWS_TO_CLEAR,
    WINDOWS_TO_NAME,
    Thresholds,
)
from commtrace.analysis.stragglers.places import RankPlace
from commtrace.analysis.stragglers.search import NO_PEERS
from commtrace.findings.causes import JOB
from commtrace.findings.finding import MOST_MEMBERS, Finding, not_judged, ranked
from commtrace.findings.status import LiveEvent
from commtrace.live.monitoring.device_readings import DeviceReadings
from commtrace.live.monitoring.drift import MOST_RANKS, WINDOWS_OF_DRIFT, drift_of
from commtrace.live.monitoring.past import JobPast
from commtrace.live.monitoring.pauses import PauseMemory
from commtrace.live.monitoring.reporting import ReportingRanks
from commtrace.live.monitoring.sampled_replay import Priced, ReplayedSamples, SampledReplay, price
from commtrace.live.monitoring.since import Since
from commtrace.live.monitoring.slow_now import SlowNow, finding_of, sets_now
from commtrace.live.monitoring.some_steps import ToldFaults
from commtrace.live.monitoring.standing import StandingFindings
from commtrace.live.monitoring.window import WindowReport
from commtrace.live.monitoring.window_table import Level, WindowTable
from commtrace.live.monitoring.work_history import WorkHistory

_TOGETHER: Final = WINDOWS_OF_LASTING + WINDOWS_TO_NAME
"""Ranks with one cause are one finding if they became slow within this number of windows, as the least slow one stands
out only over several."""

_WINDOWS_TO_DATE: Final = WINDOWS_OF_LASTING + WINDOWS_TO_NAME
"""Windows in a row in which a rank is slow until it is no longer looked up since when."""

_LOST_SECONDS: Final = 20.0
_LOST_FORGOTTEN_SECONDS: Final = 120.0
"""Lost time is divided anew after the first, and no longer known after the second."""


@dataclass(slots=True)
class _RankWork:
    """The work of a rank in earlier windows, ns per step."""

    steps: int = 0  # that it has reported
    healthy_ns: float = np.nan  # when it was last normal
    # of the last few windows, with the standard error
    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS_OF_DRIFT))


class _Suspicion(NamedTuple):
    """A rank that was beyond normal, and is not known to be normal again."""

    slow: SlowNow  # the newest observation
    windows: int = 1  # in a row in which it was beyond normal, or was named and is not clear yet
    clear_windows: int = 0  # in a row, since
    is_named: bool = False
    levels: tuple[Level, ...] = ()  # in the newest windows in which it was slow

    @property
    def is_due(self) -> bool:
        """Whether it has been slow for long enough to be named."""
        fewest = WINDOWS_OF_LASTING if self.slow.may_drift else WINDOWS_TO_NAME
        return self.is_named or self.windows >= fewest


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
        self.reporting = ReportingRanks(seconds)
        self._flows: dict[int, Flow] = {}
        self._world_size = world_size
        self._seconds = seconds
        self._work: defaultdict[int, _RankWork] = defaultdict(_RankWork)
        self._suspicions: dict[int, _Suspicion] = {}
        self._devices = DeviceReadings()
        self._places: dict[int, RankPlace] = {}
        self._replica_of: Mapping[int, int] = {}
        self._undecided = _Undecided()
        self._undecided_of_steps = _Undecided()
        self._history = WorkHistory(world_size)
        self._ranks = StandingFindings(windows_to_name=1, are_dated=True, windows_of_cost=WINDOWS_OF_LASTING)
        self._memory = PauseMemory(world_size)
        self._now_and_then = StandingFindings(windows_to_name=1)
        self._replay = SampledReplay(world_size, seconds)
        self._told = ToldFaults()
        self._past = JobPast()
        self._job_wide = StandingFindings(WINDOWS_TO_NAME)
        self._lost: tuple[Finding, ...] = ()
        self._lost_at = -math.inf

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what holds now, and what could not be judged if that lasts, in the order of ``findings.ranked``."""
        reasons = dict.fromkeys((*self._undecided.lasting, *self._undecided_of_steps.lasting))
        named = [*self._ranks.named, *self._now_and_then.named, *self._job_wide.named]
        return ranked([*self.reporting.findings, *named, *self._lost, *(not_judged(JOB, reason) for reason in reasons)])

    def join(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        """Take the newest report of every rank, at ``now`` in epoch seconds, and return the changes.

        A report that was taken before is ignored.
        """
        news = [report for report in reports if self.reporting.is_new(report)]
        for report in news:
            self.reporting.hear(report, now)
            self._work[report.rank].steps += report.steps
            self._devices.take(report, now)
            self._history.add(report)
        stepping = self._with_classes([report for report in news if report.steps and not report.ended])
        events = self._judge(stepping, now) if stepping else []
        return [*events, *self.reporting.changes(now)]

    def _with_classes(self, reports: Sequence[WindowReport]) -> Sequence[WindowReport]:
        """Return the reports with the class of each rank's work as its stage, if messages show one."""
        self._flows.update((report.rank, report.flow) for report in reports)
        self.classes = classes_of(self._flows)
        if not self.classes:
            return reports
        return [replace(report, stage=self.classes[report.rank]) for report in reports]

    def _judge(self, reports: Sequence[WindowReport], now: float) -> list[LiveEvent]:
        table = self._table(reports)
        self.step_ns = int(np.median(table.duration))
        self.window, self.work_ns = max(report.window for report in reports), table.typical_work_ns
        self.peers_missing = table.peers_missing
        for index in np.flatnonzero(table.is_normal).tolist():
            self._work[reports[index].rank].healthy_ns = float(table.total[index])
        no_peers = not table.has_peers and len(reports) == self._world_size > 1
        why = (not_told(self.classes),) if self.classes else (NO_PEERS,) if no_peers else ()
        self._undecided.see((*why, *table.judged.undecided))
        for index, (report, is_slow) in enumerate(zip(reports, table.is_slow.tolist(), strict=True)):
            self._places[report.rank] = RankPlace(report.host, report.tensor_group)
            if table.is_known[index]:  # else it has no peer: the last judgement stands
                self._suspect(table, index, report, now, is_slow=is_slow)
        self._date(table)
        steps = self._replay.newest(reports, now)
        priced = None if steps is None else self._priced(steps, table)
        device = "GPU" if any(report.on_gpu for report in reports) else "rank"
        # Of fewer steps, the noise between them is not known, as in a recording.
        are_enough = min(self._work[report.rank].steps for report in reports) >= Thresholds().fewest_steps
        events = self._ranks.join(self._slow_sets() if are_enough else [], now, device)
        if priced is not None:
            self._undecided_of_steps.see(priced.undecided, self._replay.windows)
            job_wide = [self._of_replay(finding, reports, now) for finding in priced.of_no_rank]
            windows = self._replay.windows
            events += self._job_wide.join(job_wide, now, device, kept=priced.not_looked_for, windows=windows)
            self._replay.look_for_faults_of_some_steps(now)
        self._told.tell([*self._ranks.named, *self._job_wide.named], max(report.last_step for report in reports))
        pauses = self._memory.take(reports)
        now_and_then = [*pauses, *self._told.new(self._replay.faults_of_some_steps(now), pauses)]
        events += self._now_and_then.join(now_and_then if are_enough else [], now, device)
        self._lose(steps, now)
        return events

    def _table(self, reports: Sequence[WindowReport]) -> WindowTable:
        """Return the window, with the ranks that stand out only over several."""
        memories = [self._work[report.rank] for report in reports]
        work = np.array([report.steady_ns for report in reports], np.float64)
        error = np.array([report.error_ns for report in reports], np.float64)
        for memory, total, error_ns in zip(memories, work.sum(axis=1).tolist(), error.tolist(), strict=True):
            memory.windows.append((total, error_ns))
        healthy_ns = [memory.healthy_ns for memory in memories]
        table = WindowTable.of(reports, work, error, healthy_ns, self._drift(reports))
        if all(len(memory.windows) >= WINDOWS_OF_LASTING for memory in memories):
            newest = [list(memory.windows)[-WINDOWS_OF_LASTING:] for memory in memories]
            table = table.with_lasting(np.array(newest))
        return table.with_known_normal(
            {rank: Level.typical(one.levels) for rank, one in self._suspicions.items() if one.is_named}
        )

    def _drift(self, reports: Sequence[WindowReport]) -> float:
        some = reports[:: -(-len(reports) // MOST_RANKS)]
        windows = [self._work[report.rank].windows for report in some]
        number = min(map(len, windows))
        return drift_of(
            np.array([list(own)[-number:] for own in windows]), np.array([report.stage for report in some], np.int64)
        )

    def _suspect(self, table: WindowTable, index: int, report: WindowReport, now: float, *, is_slow: bool) -> None:
        known = self._suspicions.get(report.rank)
        if is_slow:
            if known is None:
                slow = table.slow(index, self._in_window(report, now))
                self._suspicions[report.rank] = _Suspicion(slow, levels=(Level.of(slow),))
            else:
                slow = table.slow(index, known.slow.since)._replace(replays=known.slow.replays)
                levels = (*known.levels, Level.of(slow))[-WINDOWS_OF_DRIFT:]
                self._suspicions[report.rank] = _Suspicion(slow, known.windows + 1, 0, known.is_named, levels)
        elif known is not None and (table.is_clear[index] or not known.is_named):
            clear = known._replace(clear_windows=known.clear_windows + 1)
            if not known.is_named or clear.clear_windows >= WINDOWS_TO_CLEAR:
                del self._suspicions[report.rank]  # with all that was known of it
            else:
                self._suspicions[report.rank] = clear
        elif known is not None:  # its newest steps are not slow: what it costs is less, or its slow steps are few
            slow = table.slow(index, known.slow.since)._replace(replays=known.slow.replays)
            self._suspicions[report.rank] = known._replace(slow=slow)

    def _in_window(self, report: WindowReport, now: float) -> Since:
        """Return the first step of a window, in one of whose steps something began."""
        begin = self._history.begin_of(report.first_step)
        known = Since(report.first_step, now - self._seconds) if begin is None else begin
        return known._replace(within=report.steps)

    def _date(self, table: WindowTable) -> None:
        """Look up since when ranks are slow that became so a few windows ago; later, more steps tell no more."""
        known = ((int(rank), self._suspicions.get(int(rank))) for rank in table.compared.rank)
        new = {rank: one for rank, one in known if one is not None and one.windows <= _WINDOWS_TO_DATE}
        for rank, since in self._history.since(table.compared, new.keys(), self._seconds).items():
            self._suspicions[rank] = new[rank]._replace(slow=new[rank].slow._replace(since=since))

    def _lose(self, steps: ReplayedSamples | None, now: float) -> None:
        """Say anew, now and then, what steps lose beside what is slow; nothing while no steps are replayed."""
        if steps is not None and now >= self._lost_at + _LOST_SECONDS:
            slow = [*self._ranks.named, *self._job_wide.named]
            self._lost, self._lost_at = self._replay.lost(steps, slow), now
        elif now >= self._lost_at + _LOST_FORGOTTEN_SECONDS:
            self._lost = ()

    def _priced(self, steps: ReplayedSamples, table: WindowTable) -> Priced:
        """Replay sampled steps: find the cost of slow ranks, and other causes."""
        sets = [frozenset(one.rank for one in members) for _, members in self._together(is_due=True)]
        sets += [frozenset(one.rank for one in members) for _, members in self._together(is_due=False)]
        normal = [rank for rank in table.judged.normal_ranks.tolist() if rank not in self._suspicions]
        priced = price(steps, sets, np.array(normal, np.int64), self._past)
        self._replica_of = priced.replica_of
        long_input = {rank: one.microbatches for one in priced.longer_inputs for rank in one.ranks}
        for rank, one in self._suspicions.items():
            replays = one.slow.replays.with_newest(priced, rank, one.slow.excess_ns, long_input.get(rank))
            self._suspicions[rank] = one._replace(slow=one.slow._replace(replays=replays))
        return priced

    def _together(self, *, is_due: bool) -> Iterator[tuple[str, list[SlowNow]]]:
        """Yield the sets of slow ranks that have been slow long enough to be named, or the others."""
        slow = [one.slow for one in self._suspicions.values() if one.is_due == is_due]
        yield from sets_now(self._places, slow, _TOGETHER * self._seconds)

    def _slow_sets(self) -> list[Finding]:
        """Return the sets of slow ranks to name; a new one must cost enough."""
        found = []
        for place, members in self._together(is_due=True):
            finding = finding_of(
                self._places,
                place,
                members,
                self._world_size,
                replica_of=self._replica_of,
                devices=[self._devices.compare(one.rank, one.since.time) for one in members[:MOST_MEMBERS]],
            )
            are_named = any(self._suspicions[one.rank].is_named for one in members)
            if are_named or _is_worth_naming(finding, members[0].duration_ns):
                found.append(finding)
                for one in members:
                    self._suspicions[one.rank] = self._suspicions[one.rank]._replace(is_named=True)
        return found

    def _of_replay(self, finding: Finding, reports: Sequence[WindowReport], now: float) -> Finding:
        """Return what a replay has found, with the window in which it began."""
        share = (finding.cost_ns or 0.0) / max(self.step_ns, 1)
        since = self._in_window(min(reports, key=lambda report: report.first_step), now)
        return since.of(structs.replace(finding, share=share, members=finding.members[:MOST_MEMBERS]))


def _is_worth_naming(finding: Finding, step_ns: float) -> bool:
    limits = Thresholds()
    return (finding.cost_ns or 0.0) >= max(limits.cost_ms * 1e6, limits.share_of_step * step_ns)
