"""From what ranks in a hang say of themselves to who did not arrive where."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.rank_state import own_frame
from commtrace.analysis.hangs.story import FROM_REPORTS, MOST_ROOTS, hang_findings, hang_sentences, silence_findings
from commtrace.analysis.rank_words import ranks_in_words
from commtrace.exporters.monitor.messages import (
    MOST_BYTES,
    MOST_GROUPS,
    MOST_IN_FLIGHT,
    HangReport,
    Job,
    MessageError,
    Process,
    Report,
)
from commtrace.exporters.monitor.store import MonitorStore
from commtrace.live.monitoring.findings import LiveEvent
from commtrace.live.monitoring.watch import SILENT_WINDOWS
from commtrace.live.monitoring.wire_types import MOST_TEXT, GroupMembers, regular_range
from commtrace.trace.metadata import ClockAnchor, Group, RankMetadata
from commtrace.trace.processes import AskProcess, process_state, unknown_process
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.spans import Spans

_logger = logging.getLogger("commtrace")

HUNG = "hang"
_GATHER_SECONDS = 1.5
"""So long ranks that notice later have to say so: each looks once a second, and the monitor too."""

_ROUNDS_SECONDS: Final = 1.5
"""A rank that lives reports by so long after the end of a window."""

_STACK_SECONDS: Final = 5.0
_MOST_ASKED: Final = 4
"""Silent ranks that are told of by themselves, and how long after they were it is looked for their stacks."""

_MOST_PLACES = 3
_MOST_REPORT_BYTES: Final = MOST_BYTES - 4_096
"""Leaves room for what is around a report in its message."""

_MEMBERS_PER_RANK: Final = 64
_MEMBERS_OF_ANY_JOB: Final = 4_096
"""So many members do the groups of a job have, all of them together: each of its few sorts of groups has every rank
once."""


def hang_report(told: Mapping[str, Any]) -> HangReport:
    """Return what a rank sends of the report that it has written: without the stacks of its other threads.

    Args:
        told: see :class:`commtrace.capture.hangs.hang_watch.HangWatch`.

    Raises:
        MessageError: it does not fit the schema.
    """
    metadata, activity = told["metadata"], told["activity"]
    groups = [{**group, **_members(group["ranks"])} for group in told["groups"][:MOST_GROUPS]]
    report = {
        **{name: metadata[name] for name in ("rank", "node", "boot_id", "backend")},
        **{name: told[name] for name in ("time", "monotonic_ns", "quiet_ns")},
        **{name: told["topology"].get(name, {}) for name in ("coordinates", "parallel")},
        "groups": groups,
        "activity": activity,
        "in_flight": told["in_flight"][:MOST_IN_FLIGHT],
    }
    without_groups = {**report, "groups": [], "activity": {**activity, "collectives": {}, "p2p": []}}
    try:
        for shorter in (report, without_groups):
            declared = msgspec.convert(_as_unicode(shorter), HangReport)
            if len(msgspec.json.encode(declared)) <= _MOST_REPORT_BYTES:
                return declared
    except msgspec.ValidationError as error:
        raise MessageError(f"what the rank is in does not fit a message: {error}") from error
    raise MessageError("what the rank is in is too long for a message")


def _as_unicode(value: object) -> object:
    """The same with texts that can be encoded: paths may hold any bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()[:MOST_TEXT]
    if isinstance(value, Mapping):
        return {name: _as_unicode(one) for name, one in value.items()}
    return [_as_unicode(one) for one in value] if isinstance(value, (list, tuple)) else value


def _members(ranks: Sequence[int]) -> dict[str, object]:
    """Every rank tells its groups: of many ranks, as a range where that says the same."""
    regular = regular_range(ranks)
    return (
        {"regular": None, "members": list(ranks)}
        if regular is None
        else {"regular": msgspec.structs.astuple(regular), "members": []}
    )


class _Groups:
    """The groups of a job, of which every member tells: the members of each are kept once.

    Args:
        world_size: ranks of the job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left = _MEMBERS_OF_ANY_JOB + _MEMBERS_PER_RANK * world_size
        self._known: dict[Any, tuple[int, ...]] = {}

    def group(self, told: GroupMembers) -> Group:
        """Return a group as it is recorded.

        Raises:
            MessageError: it has ranks that the job has not, or all groups together have too many.
        """
        key = told.regular or told.members
        if key not in self._known:
            ranks = told.ranks
            if len(ranks) > self._left or (ranks and max(ranks[0], ranks[-1]) >= self._world_size):
                raise MessageError("groups with ranks that the job does not have")
            self._left -= len(ranks)
            self._known[key] = tuple(ranks)
        return Group(told.id, self._known[key], told.ordinal, told.role, told.name, told.description, told.backend)


class Others(NamedTuple):
    """Ranks that have said nothing of a hang.

    Attributes:
        silent: those of which nothing is heard any more, with their last sign of life.
        going_on: those whose windows still come.
        ended: those that have ended, some with an exception that nobody caught.
        busy: those of them that go on and are in something in which no step ends: a checkpoint, an evaluation.
    """

    silent: Sequence[RankTrace] = ()
    going_on: Collection[int] = ()
    ended: Sequence[RankTrace] = ()
    busy: Collection[int] = ()

    @property
    def raised(self) -> Mapping[int, str]:
        """Return those that have ended with an exception, with its type."""
        return {trace.rank: trace.exception for trace in self.ended if trace.exception}


_NOBODY: Final = Others()


FindStack = Callable[[int, int], tuple[str, ...]]
"""Returns where a rank was, by its number and session, when it could say no more."""


def no_stack(rank: int, session: int) -> tuple[str, ...]:
    """Return none: the files of the ranks are not here."""
    return ()


def others_of(
    reports: Sequence[Report],
    stopped: Collection[int],
    stopped_at: float,
    now: float,
    find_stack: FindStack = no_stack,
) -> Others:
    """Return what the windows of ranks say that have said nothing of a hang.

    A rank goes on if its newest window is as new as that of one that lives, and ended after the others had stopped.

    Args:
        reports: the newest one of each rank.
        stopped: ranks that have said that training has stopped.
        stopped_at: since when, in epoch seconds.
        now: epoch seconds.
        find_stack: of a silent rank.
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
    """Return a rank of which nothing is known but that it lived then."""
    job, window = report.job, report.window
    process = report.process or Process(window.host, "", 0, 0)
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
        # It has had its time to say something: whatever is later than this is silence.
        activity={"at": [window.last_step, -1, -1, -1], "again_within_ns": 0},
        activity_ns=at_ns,
        last_written_ns=at_ns,
        closed=False,
    )


def hang_event(
    traces: Sequence[RankTrace],
    world_size: int,
    now: float,
    unreadable: Collection[int] = (),
    others: Others = _NOBODY,
    ask: AskProcess = unknown_process,
) -> LiveEvent:
    """Return what the ranks, put together, say: the same analysis that reads the files of a hung job.

    Args:
        traces: of the ranks that say something, one at least.
        world_size: ranks of the job.
        now: epoch seconds.
        unreadable: ranks that have said something that is not understood; they are not silent.
        others: what is known of ranks that have said nothing of a hang.
        ask: for the process of a silent rank.
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
    # Every rank that speaks has stood still for longer than is usual: judged like a job that will not go on.
    told = examine(run, now_ns=round(now * 1e9), ask=ask, goes_on=False, silent=[*silent, *ended])
    roots = [root.rank for root in told.hang.chains.roots]
    going_on = sorted(others.going_on)
    in_order = sorted(trace.rank for trace in others.ended if not trace.exception)
    sentences = [
        f"Training has stopped: {len(run.ranks)} of {world_size} ranks say so.",
        *hang_findings(told),
        *silence_findings(told, besides=roots[:MOST_ROOTS]),
        *([f"No word from {ranks_in_words(unheard)}, ever: not started, or cut off."] if unheard else []),
        *([f"{ranks_in_words(in_order).capitalize()} ended in order."] if in_order else []),
        *_exceptions(others.raised),
        *([f"{ranks_in_words(going_on).capitalize()}: something still moves there."] if going_on else []),
        *([f"What {ranks_in_words(unreadable)} says cannot be read, and is left out."] if unreadable else []),
        *(hang_sentences(told, FROM_REPORTS) or _places(traces)),
    ]
    roots = [rank for rank in roots if rank not in unreadable] or roots
    suspects = [*roots, *sorted(others.raised), *(trace.rank for trace in silent), *unheard, *going_on, *in_order]
    rank = next(iter(suspects), -1)
    hosts = {trace.rank: trace.metadata.node for trace in (*run.ranks.values(), *silent)}
    return LiveEvent(HUNG, now, rank, hosts.get(rank, ""), " ".join(sentence.strip() for sentence in sentences))


def _exceptions(raised: Mapping[int, str]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(raised):
        ranks.setdefault(raised[rank], []).append(rank)
    return [
        f"{ranks_in_words(own).capitalize()} ended with an uncaught exception, {exception}."
        for exception, own in ranks.items()
    ]


def _places(traces: Sequence[RankTrace]) -> list[str]:
    """Where ranks are that stand still, though none waits in a communication for another one."""
    ranks: dict[str, list[int]] = {}
    for trace in traces:
        frames = trace.activity["frames"]
        place = own_frame(frames) or next(iter(frames), "a place that is not known")
        ranks.setdefault(place, []).append(trace.rank)
    return [
        f"{ranks_in_words(own).capitalize()} in no communication, at {place}."
        for place, own in sorted(ranks.items(), key=lambda item: -len(item[1]))[:_MOST_PLACES]
    ]


def trace_of(report: HangReport, job: Job, groups: _Groups) -> RankTrace:
    """Return one rank without rows, with what it was doing.

    Raises:
        MessageError: the report tells of ranks that the job does not have.
    """
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
        in_flight=tuple(msgspec.to_builtins(report.in_flight)),
        activity={**msgspec.to_builtins(report.activity), "quiet_ns": report.quiet_ns},
        activity_ns=report.monotonic_ns,
        last_written_ns=report.monotonic_ns,
        closed=False,
    )


class HangAggregator:
    """Puts together what the ranks of a hung job say, once they have had time to say it.

    A rank that says nothing is the most interesting one, so nobody is waited for: the finding is told after a few
    seconds, and again when more ranks have spoken.

    Args:
        job: that is watched.
        ask: for the process of a silent rank.
        find_stack: of a silent rank.

    Attributes:
        sentence: what was last told of the hang that the job is in; empty while it goes on.
    """

    def __init__(self, job: Job, ask: AskProcess = process_state, find_stack: FindStack = no_stack) -> None:
        self.sentence = ""
        self._ask = ask
        self._find_stack = find_stack
        self._stopped_at = 0.0
        self._job = job
        self._first_heard = 0.0
        self._reported_at = 0.0
        self._num_reported = 0
        self._without_stack: Sequence[RankTrace] = ()
        self._num_messages = 0
        self._stopped: frozenset[int] = frozenset()
        self._traces: Mapping[int, RankTrace] = {}

    def look(self, store: MonitorStore, now: float) -> list[LiveEvent]:
        """Return who is in a hang, if that is news.

        While a rank that does not hang saves a checkpoint or evaluates, the others wait for it in good order.

        Args:
            store: what ranks say.
            now: epoch seconds.
        """
        self._read(store)
        stopped, traces = self._stopped, self._traces
        if not traces:
            self._first_heard, self._num_reported, self.sentence = 0.0, 0, ""
            return []
        self._first_heard = self._first_heard or now
        is_news = len(stopped) > self._num_reported or self._have_left_stacks(now)
        has_waited = now - (self._reported_at if self._num_reported else self._first_heard) >= _GATHER_SECONDS
        # A rank that goes on shows it by the end of its window.
        has_waited = has_waited and now - self._stopped_at >= self._job.seconds + _ROUNDS_SECONDS
        if not (is_news and (has_waited or len(stopped) == self._job.world_size)):
            return []
        others = others_of(store.reports(), stopped, self._stopped_at, now, self._find_stack)
        if others.busy:
            return []
        if others.ended and not others.raised and not any(trace.in_flight for trace in traces.values()):
            return []  # the job comes to its end, and somebody has something left to do
        self._reported_at, self._num_reported = now, len(stopped)
        self._without_stack = [trace for trace in others.silent if not trace.stack][:_MOST_ASKED]
        unreadable = sorted(stopped.difference(traces))
        event = hang_event(list(traces.values()), self._job.world_size, now, unreadable, others, self._ask)
        self.sentence = event.sentence
        return [event]

    def _have_left_stacks(self, now: float) -> bool:
        """Whether a silent rank has written where it is since it was told of: that is later than others notice."""
        if not self._num_reported or now - self._reported_at > _STACK_SECONDS:
            return False
        return any(self._find_stack(trace.rank, trace.metadata.session) for trace in self._without_stack)

    def _read(self, store: MonitorStore) -> None:
        """Read what ranks say, if any has said something since: of thousands, that takes seconds."""
        num_messages = store.num_hang_messages
        if num_messages != self._num_messages:
            reports, groups = store.hangs(), _Groups(self._job.world_size)
            traces = {}
            for rank, report in reports.items():
                try:
                    if report is not None:
                        traces[rank] = trace_of(report, self._job, groups)
                except MessageError as error:  # it must not hide the others
                    _logger.warning("commtrace: what rank %d says of a hang is left out: %s", rank, error)
            self._num_messages, self._stopped, self._traces = num_messages, frozenset(reports), traces
            since = [report.time - report.quiet_ns / 1e9 for report in reports.values() if report is not None]
            self._stopped_at = max(since, default=0.0)
