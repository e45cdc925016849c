"""The state of each rank at the end of its files, and its last activity.

Times of different hosts are compared by their wall clocks, which is good enough for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.time_of_day import FIRST_DATE_NS, wall_clock_ns
from commtrace.analysis.matching.arrivals import (
    GroupLabel,
    RankArrivals,
    describe_group,
    open_communications,
    reports_activity,
)
from commtrace.analysis.matching.operations import unfinished_rows
from commtrace.trace import schema
from commtrace.trace.metadata import Group
from commtrace.trace.processes import GONE, SUSPENDED, AskProcess, unknown_process
from commtrace.trace.run import OsExit, RankTrace, Run

ENDED: Final = "ended"
RUNNING: Final = "running"
STOPPED: Final = "stopped"
SILENT: Final = "silent"
DUMPED: Final = "dumped"

_BUSY_AGAIN_NS: Final = 3_500_000_000
"""A recording rank writes twice a second; one that falls quiet reports it after two seconds
(capture/hangs/activity.py).
"""

_OLDER_RECORDER_NS: Final = 11_000_000_000
"""Recorders without that report wrote at least a clock anchor every ten seconds."""

_SLACK_NS: Final = 2_000_000_000

_LIBRARIES: Final = ("site-packages/", "dist-packages/", "/lib/python")

_NO_FILE: Final = "<"
"""Prefix of frames without a file: ``<frozen runpy>``, ``<string>``. A module's own code is ``<module>``."""
_WORK: Final = (
    schema.FORWARD,
    schema.BACKWARD,
    schema.RECOMPUTE,
    schema.OPTIMIZER,
    schema.DATA,
    schema.CHECKPOINT,
    schema.EVALUATION,
    schema.MODULE,
    schema.USER,
    schema.PHASE,
    schema.COLLECTIVE,
    schema.P2P,
)
_MOST_IN_FLIGHT: Final = 8

_FROM_OUTSIDE: Final = frozenset({"SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"})
"""Signals of launchers, schedulers and users. SIGALRM, for example, a script sends to itself."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one rank's files.

    ``state`` is ``ended`` (cleanly, or gone after it had left its job in order), ``running``, ``stopped`` (broken off,
    no earlier than others) or ``silent`` (broken off while others still wrote, silent though its process lives, or
    suspended). It is ``dumped`` if it was imported from a dump, which a rank writes while it lives.
    """

    state: str
    last_ns: int | None  # epoch ns of its last write; None if unknown
    behind_ns: int | None  # from then to the last write of any rank, or to now if the run goes on
    process: str | None  # see commtrace.trace.processes; None if unknown
    exception: str = ""  # type of the uncaught exception that ended it; else empty
    launcher: str = ""  # that ended it by killing it, when nothing went on any more; else empty
    exit: OsExit | None = None  # its call of os._exit with another status than 0, unless it was ended from outside

    @property
    def failure(self) -> str:
        """Return ``RuntimeError`` or ``os._exit(1)`` if the rank failed by itself; else an empty string."""
        return self.exception or (self.exit.call if self.exit is not None else "")


def find_endings(
    run: Run, now_ns: int, ask: AskProcess = unknown_process, goes_on: bool | None = None
) -> Mapping[int, Ending]:
    """Return the end of each rank.

    ``ask`` returns the state of a rank's process; ``goes_on`` is None to find out if the job still runs.
    """
    last = {rank: last_write_ns(trace) for rank, trace in run.ranks.items()}
    processes = {
        rank: None if trace.closed else GONE if trace.exit is not None else ask(trace.metadata)
        for rank, trace in run.ranks.items()
    }
    fresh = {
        rank: time is not None and now_ns - time <= _allowed_ns(run.ranks[rank]) + _SLACK_NS
        for rank, time in last.items()
    }
    if goes_on is None:
        goes_on = any(
            not trace.closed
            and not trace.metadata.is_dump
            and (fresh[rank] if processes[rank] is None else processes[rank] != GONE)
            for rank, trace in run.ranks.items()
        )
    latest = max((time for time in last.values() if time is not None), default=None)
    reference = now_ns if goes_on else latest
    endings = {}
    for rank, trace in run.ranks.items():
        time = last[rank]
        behind = None if time is None or reference is None else max(0, reference - time)
        endings[rank] = Ending(
            state=_state(trace, behind, processes[rank], goes_on),
            last_ns=time,
            behind_ns=behind,
            process=processes[rank],
            exception=trace.exception,
            exit=own_exit(trace),
        )
    return {**endings, **_ended_by_launcher(run, endings)}


def _ended_by_launcher(run: Run, endings: Mapping[int, Ending]) -> dict[int, Ending]:
    """Return the ranks whose launcher killed them all together, as it does with a job that is done.

    Ray kills its actors, whatever they have done. One that crashes leaves others behind that wait for it, or fail.
    """
    broken = {rank: ending for rank, ending in endings.items() if ending.state != ENDED}
    are_done = all(
        trace.launcher
        and not (trace.failures or trace.exception or trace.exit or trace.stack or trace.command_failed)
        and not any(open_communications(trace))
        for trace in run.ranks.values()
    )
    if not are_done or any(ending.state != STOPPED for ending in broken.values()):
        return {}
    return {rank: replace(ending, state=ENDED, launcher=run.ranks[rank].launcher) for rank, ending in broken.items()}


def _state(trace: RankTrace, behind: int | None, process: str | None, goes_on: bool) -> str:
    if trace.metadata.is_dump:
        return DUMPED
    if trace.closed:
        return ENDED
    if trace.has_left and process in (GONE, None) and (process == GONE or not goes_on or is_late(trace, behind)):
        return ENDED  # Many a launcher kills what has left, or it ends without closing its files.
    if process == SUSPENDED:
        return SILENT  # Its last write may be recent: no other will come.
    if is_late(trace, behind):
        return SILENT
    if process == GONE:
        # Its last write may be recent and its process gone all the same.
        return SILENT if goes_on else STOPPED
    return RUNNING if goes_on else STOPPED


def own_exit(trace: RankTrace) -> OsExit | None:
    """Return the rank's call of os._exit, if it ended by itself: not in the handler of a signal that others send."""
    exit_ = trace.exit
    is_own = exit_ is not None and exit_.signal not in _FROM_OUTSIDE and exit_.exception != KeyboardInterrupt.__name__
    return exit_ if is_own else None


def is_late(trace: RankTrace, behind: int | None) -> bool:
    """Return whether a healthy rank, at work or waiting, would have written within ``behind`` ns of its last write."""
    return behind is not None and behind > _allowed_ns(trace) + _SLACK_NS


def _allowed_ns(trace: RankTrace) -> int:
    """Return the longest time without a write of a healthy rank."""
    if trace.activity is None or trace.activity_ns is None or trace.last_written_ns is None:
        return _OLDER_RECORDER_NS
    if trace.last_written_ns > trace.activity_ns:
        return _BUSY_AGAIN_NS
    return _OLDER_RECORDER_NS if trace.again_within_ns is None else trace.again_within_ns


def last_write_ns(trace: RankTrace) -> int | None:
    """Return the latest instant in the rank's files, epoch ns; None if they hold none, or imported times begin at 0."""
    if trace.last_written_ns is None:
        return None
    last = wall_clock_ns(trace, trace.last_written_ns)
    return None if trace.metadata.is_imported and last < FIRST_DATE_NS else last


class OpenPhaseAge(NamedTuple):
    """A phase that had begun and not ended, ``for_ns`` ago."""

    kind: str
    name: str
    for_ns: int | None


class LastSpan(NamedTuple):
    """The last work or communication that ended, ``ago_ns`` before its rank's last write."""

    kind: str
    name: str
    step: int | None
    microbatch: int | None
    role: str | None
    seq: int | None
    ago_ns: int | None


class OpenCall(NamedTuple):
    """A communication that was launched and had not ended."""

    operation: str
    group: GroupLabel
    seq: int
    peer: int | None
    bytes: int | None
    dtype: str | None
    for_ns: int  # time in flight
    blocking: bool | None  # training stalls on it; None if unknown
    state: str | None  # on a device, scheduled or started


class LastActivity(NamedTuple):
    """The activity of a rank at its last write; None for unknown parts."""

    step: int | None
    microbatch: int | None
    chunk: int | None
    stage: int | None
    no_progress_ns: int | None  # time without progress
    open: tuple[OpenPhaseAge, ...]  # the innermost first
    at: str | None  # the innermost frame outside of libraries
    frames: tuple[str, ...]  # innermost first
    last: LastSpan | None
    in_flight: tuple[OpenCall, ...]  # the one that blocks training first


def last_activity(run: Run, trace: RankTrace, arrivals: RankArrivals, groups: Mapping[int, Group]) -> LastActivity:
    """Return the activity of a rank at its last write."""
    now = trace.activity if reports_activity(trace) and not trace.closed else None
    frames = now.frames if now else ()
    step, microbatch, chunk, stage = now.at if now else (-1, -1, -1, -1)
    return LastActivity(
        step=step if step >= 0 else _last_step(trace),
        microbatch=microbatch if microbatch >= 0 else None,
        chunk=chunk if chunk >= 0 else None,
        stage=stage if stage >= 0 else None,
        no_progress_ns=arrivals.stalled_ns if now else None,
        open=tuple(
            OpenPhaseAge(phase.kind, phase.name, _age(trace, phase.since)) for phase in (now.open if now else ())
        ),
        at=own_frame(frames),
        frames=frames,
        last=_last_span(run, trace, groups),
        in_flight=tuple(
            OpenCall(
                operation=call.operation,
                group=describe_group(groups.get(call.group), call.group),
                seq=call.number if call.is_p2p and call.seq >= 0 else call.seq,
                peer=call.peer if call.peer >= 0 else None,
                bytes=call.bytes if call.bytes >= 0 else None,
                dtype=call.dtype,
                for_ns=arrivals.age_ns(call),
                blocking=call.blocking,
                state=call.state or None,
            )
            for call in arrivals.in_flight[:_MOST_IN_FLIGHT]
        ),
    )


def own_frame(frames: Sequence[str]) -> str | None:
    """Return the innermost frame outside of libraries, as ``file:line function``."""
    return next(
        (frame for frame in frames if not frame.startswith(_NO_FILE) and not any(part in frame for part in _LIBRARIES)),
        None,
    )


def _age(trace: RankTrace, since: int | None) -> int | None:
    return None if since is None or trace.last_written_ns is None else max(0, trace.last_written_ns - since)


def _last_step(trace: RankTrace) -> int | None:
    steps = trace.spans.step
    return int(steps.max()) if len(steps) and steps.max() >= 0 else None


def _last_span(run: Run, trace: RankTrace, groups: Mapping[int, Group]) -> LastSpan | None:
    spans = trace.spans
    is_work = np.isin(spans.kind, _WORK)
    if trace.metadata.is_dump:  # which has rows of those in flight, too
        is_work &= ~unfinished_rows(trace)
    rows = np.flatnonzero(is_work)
    if not len(rows):
        return None
    rows = rows[spans.end[rows] == spans.end[rows].max()]  # several where ends are only known to lie before a dump
    row = rows[np.argmax(spans.start[rows])]
    group = int(spans.group[row])
    return LastSpan(
        kind=schema.KINDS[spans.kind[row]],
        name=run.names[spans.name[row]] if spans.name[row] >= 0 else "",
        step=int(spans.step[row]) if spans.step[row] >= 0 else None,
        microbatch=int(spans.microbatch[row]) if spans.microbatch[row] >= 0 else None,
        role=groups[group].role if group in groups else None,
        seq=int(spans.seq[row]) if group >= 0 else None,
        ago_ns=None if trace.metadata.is_dump else _age(trace, int(spans.end[row])),
    )
