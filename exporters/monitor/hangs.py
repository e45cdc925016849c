"""Join the reports of ranks in a hang: find the ranks that did not arrive, and their places."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.explanation import (
    FROM_REPORTS,
    MOST_ROOTS,
    hang_findings,
    hang_sentences,
    silence_findings,
)
from commtrace.analysis.hangs.rank_state import own_frame
from commtrace.exporters.monitor.messages import (
    MOST_BYTES,
    MOST_GROUPS,
    MOST_IN_FLIGHT,
    MessageError,
    Report,
    WatchedJob,
    WireHangReport,
    WireProcess,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.findings.causes import JOB, RANKS
from commtrace.findings.finding import HANG, Finding
from commtrace.findings.formatting import format_ranks
from commtrace.findings.progress import no_progress, stalled_after_ns
from commtrace.findings.status import CHANGED, CLEARED, FOUND, LiveEvent
from commtrace.live.monitoring.reporting import SILENT_WINDOWS
from commtrace.live.monitoring.wire_types import MOST_TEXT, WireGroup, most_group_members, regular_range
from commtrace.trace.hang_report import Activity
from commtrace.trace.metadata import ClockAnchor, Group, RankMetadata
from commtrace.trace.processes import AskProcess, process_state, unknown_process
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

_logger = logging.getLogger("commtrace")

_GATHER_SECONDS = 1.5
"""Time for other ranks to notice and report: each looks once a second, and so does the monitor."""

_ROUNDS_SECONDS: Final = 1.5
"""A live rank reports within this time after the end of a window."""

_STACK_SECONDS: Final = 5.0
_MOST_ASKED: Final = 4
"""Silent ranks whose stacks are looked for, and the seconds to look after they were reported."""

_MOST_PLACES = 3
_MOST_REPORT_BYTES: Final = MOST_BYTES - 4_096
"""Leaves room for the rest of the message."""


def hang_report(record: Mapping[str, Any]) -> WireHangReport:
    """Return the report for a ``HangWatch`` record; raise :class:`MessageError` if it does not fit a message."""
    metadata, activity = record["metadata"], record["activity"]
    groups = [{**group, **_members(group["ranks"])} for group in record["groups"][:MOST_GROUPS]]
    report = {
        **{name: metadata[name] for name in ("rank", "node", "boot_id", "backend")},
        **{name: record[name] for name in ("time", "monotonic_ns", "no_progress_ns")},
        **{name: record["topology"].get(name, {}) for name in ("coordinates", "parallel")},
        "groups": groups,
        "activity": activity,
        "in_flight": record["in_flight"][:MOST_IN_FLIGHT],
    }
    without_groups = {**report, "groups": [], "activity": {**activity, "collectives": {}, "p2p": []}}
    try:
        for shorter in (report, without_groups):
            declared = msgspec.convert(_as_unicode(shorter), WireHangReport)
            if len(msgspec.json.encode(declared)) <= _MOST_REPORT_BYTES:
                return declared
    except msgspec.ValidationError as error:
        raise MessageError(f"the state of the rank does not fit the schema of messages: {error}") from error
    raise MessageError("the state of the rank is too long for a message")


def _as_unicode(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()[:MOST_TEXT]
    if isinstance(value, Mapping):
        return {name: _as_unicode(one) for name, one in value.items()}
    return [_as_unicode(one) for one in value] if isinstance(value, (list, tuple)) else value


def _members(ranks: Sequence[int]) -> dict[str, object]:
    regular = regular_range(ranks)
    return (
        {"regular": None, "members": list(ranks)}
        if regular is None
        else {"regular": msgspec.structs.astuple(regular), "members": []}
    )


class _Groups:
    """The groups of a job; every member reports them, and their members are kept once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left = most_group_members(world_size)
        self._known: dict[object, tuple[int, ...]] = {}

    def group(self, sent: WireGroup) -> Group:
        """Return a group; raise :class:`MessageError` for unknown ranks, or too many in all groups together."""
        key = sent.regular or sent.members
        if key not in self._known:
            ranks = sent.ranks
            if len(ranks) > self._left or max(ranks, default=-1) >= self._world_size:
                raise MessageError("groups with ranks that the job does not have")
            self._left -= len(ranks)
            self._known[key] = tuple(ranks)
        return Group(sent.id, self._known[key], sent.ordinal, sent.role, sent.name, sent.description, sent.backend)


class Others(NamedTuple):
    """Ranks that have not reported the hang."""

    silent: Sequence[RankTrace] = ()  # without recent reports; with their last sign of life
    going_on: Collection[int] = ()  # their windows still come
    ended: Sequence[RankTrace] = ()  # some with an uncaught exception
    busy: Collection[int] = ()  # in a checkpoint or an evaluation, in which no step ends

    @property
    def raised(self) -> Mapping[int, str]:
        """Return the type of the exception that ended a rank, by rank."""
        return {trace.rank: trace.exception for trace in self.ended if trace.exception}


_NOBODY: Final = Others()


FindStack = Callable[[int, int], tuple[str, ...]]
"""Returns the last stack of a rank, by its number and session, if it wrote one before it fell silent."""


def no_stack(rank: int, session: int) -> tuple[str, ...]:
    return ()


def others_of(
    reports: Sequence[Report],
    stopped: Collection[int],
    stopped_at: float,
    now: float,
    find_stack: FindStack = no_stack,
) -> Others:
    """Return the ranks that have not reported the hang, by the state that their windows show.

    A rank goes on if its newest window is recent, and ended after the others had stopped. ``reports`` has the newest
    report of each rank; times are epoch seconds.
    """
    silent, going_on, ended, busy = [], [], [], []
    for report in reports:
        rank, at = report.window.rank, report.window.window * report.job.seconds
        is_new = now - at < report.job.seconds + _ROUNDS_SECONDS
        if report.window.ended:
            ended.append(replace(_last_sign_of(report, at), closed=True, exception=report.window.exception))
        elif rank not in stopped:
            if report.window.phase and now - at < SILENT_WINDOWS * report.job.seconds:
                busy.append(rank)
            if is_new and at > stopped_at:
                going_on.append(rank)
            else:
                last = _last_sign_of(report, at)
                silent.append(replace(last, stack=find_stack(rank, last.metadata.session)))
    return Others(silent, going_on, ended, busy)


def _last_sign_of(report: Report, at: float) -> RankTrace:
    job, window = report.job, report.window
    process = report.process or WireProcess(window.host, "", 0, 0)
    at_ns = round(at * 1e9)
    anchor = ClockAnchor(at_ns, at_ns)
    return RankTrace(
        metadata=RankMetadata(
            run_id=job.run_id,
            attempt=job.attempt,
            session=process.session,
            rank=window.rank,
            local_rank=0,
            world_size=job.world_size,
            host=process.host,
            node=window.host,
            boot_id=process.boot_id,
            pid=process.pid,
            backend="",
            device="",
            device_uuid="",
            anchor=anchor,
        ),
        spans=Spans.empty(),
        anchors=(anchor,),
        # It has had its time to report: from now on it is silent.
        activity=Activity(at=(window.last_step, -1, -1, -1), open=(), collectives={}, p2p=(), frames=()),
        activity_ns=at_ns,
        again_within_ns=0,
        last_written_ns=at_ns,
        closed=False,
    )


def hang_finding(
    traces: Sequence[RankTrace],
    world_size: int,
    now: float,
    unreadable: Collection[int] = (),
    others: Others = _NOBODY,
    ask: AskProcess = unknown_process,
    run_name: str = "RUN",
) -> Finding:
    """Return the finding about a hang, by the analysis that reads the files of a hung job.

    ``traces`` are those of the ranks that have reported, one at least; reports of ``unreadable`` ranks cannot be used.
    ``ask`` returns the state of a silent rank's process, ``run_name`` is the run as ``commtrace doctor`` takes it.
    """
    run = Run(Path("running job"), {trace.rank: trace for trace in sorted(traces, key=lambda trace: trace.rank)}, [])
    silent = [trace for trace in others.silent if trace.rank not in run.ranks]
    ended = [trace for trace in others.ended if trace.rank not in run.ranks]
    named = {
        *run.ranks,
        *unreadable,
        *(trace.rank for trace in others.ended),
        *others.going_on,
        *(trace.rank for trace in silent),
    }
    unheard = sorted(set(range(world_size)) - named)
    # Every rank that reports has made no progress for longer than usual: judged like a job that will not go on.
    diagnosis = examine(run, now_ns=round(now * 1e9), ask=ask, goes_on=False, silent=[*silent, *ended])
    roots = [root.rank for root in diagnosis.hang.chains.roots]
    going_on = sorted(others.going_on)
    ended_cleanly = sorted(trace.rank for trace in others.ended if not trace.exception)
    sentences = [
        f"Training has stopped: {len(run.ranks)} of {world_size} ranks report it.",
        *(statement.sentence for statement in hang_findings(diagnosis)),
        *(statement.sentence for statement in silence_findings(diagnosis, besides=roots[:MOST_ROOTS])),
        *([f"{format_ranks(unheard).capitalize()} never reported: not started, or cut off."] if unheard else []),
        *([f"{format_ranks(ended_cleanly).capitalize()} ended cleanly."] if ended_cleanly else []),
        *_exceptions(others.raised),
        *(
            [f"{format_ranks(going_on).capitalize()} still {'makes' if len(going_on) == 1 else 'make'} progress."]
            if going_on
            else []
        ),
        *([f"Left out, because it cannot be read: the report of {format_ranks(unreadable)}."] if unreadable else []),
        *(hang_sentences(diagnosis, FROM_REPORTS) or _places(traces)),
    ]
    roots = [rank for rank in roots if rank not in unreadable] or roots
    suspects = (roots, sorted(others.raised), [trace.rank for trace in silent], unheard, going_on, ended_cleanly)
    ranks = tuple(next(filter(None, suspects), ()))
    hosts = {trace.rank: trace.metadata.node for trace in (*run.ranks.values(), *silent)}
    return Finding(
        id=HANG,
        kind=HANG,
        place=RANKS if ranks else JOB,
        who=format_ranks(ranks) if ranks else "the job",
        ranks=ranks,
        hosts=tuple(dict.fromkeys(hosts[rank] for rank in ranks if hosts.get(rank))),
        since_ns=max((_stopped_ns(trace) for trace in traces), default=None),
        evidence=" ".join(sentence.strip() for sentence in sentences),
        advice=f"See where each rank is: commtrace doctor {run_name}",
    )


def _exceptions(raised: Mapping[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(raised):
        ranks.setdefault(raised[rank], []).append(rank)
    return [
        f"{format_ranks(own).capitalize()} ended with an uncaught exception, {exception}."
        for exception, own in ranks.items()
    ]


def _places(traces: Sequence[RankTrace]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        frames = trace.activity.frames if trace.activity else ()
        place = own_frame(frames) or next(iter(frames), "an unknown place")
        ranks.setdefault(place, []).append(trace.rank)
    return [
        f"{format_ranks(own).capitalize()} in no communication, at {place}."
        for place, own in sorted(ranks.items(), key=lambda item: -len(item[1]))[:_MOST_PLACES]
    ]


def trace_of(report: WireHangReport, job: WatchedJob, groups: _Groups) -> RankTrace:
    """Return one rank without rows, with its last activity; raise :class:`MessageError` for unknown ranks."""
    anchor = ClockAnchor(report.monotonic_ns, round(report.time * 1e9))
    return RankTrace(
        metadata=RankMetadata(
            run_id=job.run_id,
            attempt=job.attempt,
            session=0,
            rank=report.rank,
            local_rank=0,
            world_size=job.world_size,
            host=report.node,
            node=report.node,
            boot_id=report.boot_id,
            pid=0,
            backend=report.backend,
            device="",
            device_uuid="",
            anchor=anchor,
        ),
        spans=Spans.empty(),
        groups={group.id: groups.group(group) for group in report.groups},
        coordinates=report.coordinates,
        parallel=report.parallel,
        anchors=(anchor,),
        in_flight=report.in_flight,
        activity=report.activity,
        no_progress_ns=report.no_progress_ns,
        activity_ns=report.monotonic_ns,
        last_written_ns=report.monotonic_ns,
        closed=False,
    )


def _stopped_ns(trace: RankTrace) -> int:
    """Return when a rank that has reported made its last progress, epoch ns."""
    return trace.metadata.anchor.realtime_ns - (trace.no_progress_ns or 0)


class _LastSteps(NamedTuple):
    """The last steps of ranks; ``ended_at`` is the end of the newest, epoch seconds."""

    ended_at: float
    of_ranks: Mapping[int, int]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> _LastSteps | None:
        """Return None before the first step."""
        stepped = [report for report in reports if report.window.last_step >= 0]
        if not stepped:
            return None
        ended_at = max(_closed_at(report) - report.window.age_ns / 1e9 for report in stepped)
        return cls(ended_at, {report.window.rank: report.window.last_step for report in stepped})


def _still_reporting(reports: Sequence[Report], now: float) -> list[Report]:
    return [
        report
        for report in reports
        if not report.window.ended and now - _closed_at(report) <= SILENT_WINDOWS * report.job.seconds
    ]


def _have_ended_in_order(reports: Sequence[Report]) -> bool:
    return any(report.window.ended and not report.window.exception for report in reports)


def _closed_at(report: Report) -> float:
    return report.window.window * report.job.seconds


class HangAggregator:
    """Says that a job makes no progress: that no step ends, and what the ranks report that notice it.

    ``finding`` is the newest, None while training goes on. ``run_name`` is the run as ``commtrace doctor`` takes it.
    """

    def __init__(
        self,
        job: WatchedJob,
        ask: AskProcess = process_state,
        find_stack: FindStack = no_stack,
        run_name: str = "RUN",
    ) -> None:
        self.finding: Finding | None = None
        self._ask = ask
        self._find_stack = find_stack
        self._run_name = run_name
        self._stopped_at = 0.0
        self._job = job
        self._first_heard = 0.0
        self._reported_at = 0.0
        self._num_reported = 0
        self._without_stack: Sequence[RankTrace] = ()
        self._num_messages = 0
        self._stopped: frozenset[int] = frozenset()
        self._traces: Mapping[int, RankTrace] = {}
        self._step_at = 0.0
        self._steps_when_found: Mapping[int, int] = {}  # by rank; empty before the first step

    def look(self, store: MonitorStore, now: float, step_ns: int = 0) -> list[LiveEvent]:
        """Return the event of a hang if there is news.

        ``now`` is in epoch seconds; ``step_ns`` is the length of a usual step, 0 if it is not known.
        """
        self._read(store)
        stopped, traces = self._stopped, self._traces
        if not traces:
            self._first_heard, self._num_reported = 0.0, 0
            return self._look_for_steps(store, now, step_ns)
        self._first_heard = self._first_heard or now
        is_news = len(stopped) > self._num_reported or self._have_left_stacks(now)
        has_waited = now - (self._reported_at if self._num_reported else self._first_heard) >= _GATHER_SECONDS
        # A rank that goes on shows it by the end of its window.
        has_waited = has_waited and now - self._stopped_at >= self._job.seconds + _ROUNDS_SECONDS
        if not (is_news and (has_waited or len(stopped) == self._job.world_size)):
            return []
        reports = store.reports()
        others = others_of(reports, stopped, self._stopped_at, now, self._find_stack)
        if others.busy:  # while a rank saves a checkpoint or evaluates, the others wait for it as they should
            return []
        if others.ended and not others.raised and not any(trace.in_flight for trace in traces.values()):
            return []  # the job ends, and some rank still has work to do
        self._reported_at, self._num_reported = now, len(stopped)
        self._without_stack = [trace for trace in others.silent if not trace.stack][:_MOST_ASKED]
        unreadable, size = sorted(stopped.difference(traces)), self._job.world_size
        finding = hang_finding(list(traces.values()), size, now, unreadable, others, self._ask, self._run_name)
        return [self._stopped_event(finding, now, finding.evidence, reports)]

    def _look_for_steps(self, store: MonitorStore, now: float, step_ns: int) -> list[LiveEvent]:
        """Return the event that no step ends any more, or that training goes on."""
        after = max(stalled_after_ns(step_ns) / 1e9, 2 * self._job.seconds)  # a rank may report a phase so late
        if self.finding is None and (not step_ns or now - self._step_at <= after):
            return []
        # Only now: reports of thousands of ranks take time, and this is called every second.
        reports = store.reports()
        reporting = _still_reporting(reports, now)
        is_busy = any(report.window.phase for report in reporting)  # saves a checkpoint or evaluates
        if self.finding is not None:
            return self._cleared_event(now) if is_busy or self._goes_on(reports, now - after) else []
        last = None if is_busy or _have_ended_in_order(reports) else _LastSteps.of(reporting)
        # From when it is not known, or no matter, when a step ends, the time begins anew.
        self._step_at = now if last is None else last.ended_at
        if last is None or now - last.ended_at <= after:
            return []
        quiet_ns, since_ns = round((now - last.ended_at) * 1e9), round(last.ended_at * 1e9)
        finding = no_progress(since_ns, quiet_ns, step_ns, last.of_ranks, self._run_name)
        return [self._stopped_event(finding, now, f"{finding.evidence} {finding.advice}", reports)]

    def _goes_on(self, reports: Sequence[Report], since: float) -> bool:
        """Return whether a step has ended ``since`` that had not when the job was found to make no progress.

        Silence, or the end of a rank, is no progress. Where no step was known, the word of the ranks that had stopped
        is taken.
        """
        if not self._steps_when_found:
            return not self._stopped
        last = _LastSteps.of(reports)  # also of ranks that ended: a job may go on and be over before the next look
        return last is not None and last.ended_at >= since and last.of_ranks != self._steps_when_found

    def _stopped_event(self, finding: Finding, now: float, sentence: str, reports: Sequence[Report]) -> LiveEvent:
        is_new, self.finding = self.finding is None, finding
        if is_new:
            last = _LastSteps.of(reports)
            self._steps_when_found = {} if last is None else last.of_ranks
        return LiveEvent(FOUND if is_new else CHANGED, round(now * 1e9), finding, sentence)

    def _cleared_event(self, now: float) -> list[LiveEvent]:
        over, self.finding = self.finding, None
        sentence = "Training goes on; no rank hangs any more."
        return [] if over is None else [LiveEvent(CLEARED, round(now * 1e9), over, sentence)]

    def _have_left_stacks(self, now: float) -> bool:
        if not self._num_reported or now - self._reported_at > _STACK_SECONDS:
            return False
        return any(self._find_stack(trace.rank, trace.metadata.session) for trace in self._without_stack)

    def _read(self, store: MonitorStore) -> None:
        num_messages = store.num_hang_messages
        if num_messages != self._num_messages:  # of thousands of ranks, reading takes seconds
            reports, groups = store.hangs(), _Groups(self._job.world_size)
            traces = {}
            for rank, report in reports.items():
                try:
                    if report is not None:
                        traces[rank] = trace_of(report, self._job, groups)
                except MessageError as error:  # it must not hide the others
                    _logger.warning("commtrace: the hang report of rank %d is left out: %s", rank, error)
            self._num_messages, self._stopped, self._traces = num_messages, frozenset(reports), traces
            since = [report.time - report.no_progress_ns / 1e9 for report in reports.values() if report is not None]
            self._stopped_at = max(since, default=0.0)
