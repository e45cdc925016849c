"""How each rank's files end: in order, still being written, or broken off, and how long before the others'.

Times of different hosts are compared by their wall clocks, which is good enough for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from commtrace.analysis.clocks.time_of_day import wall_clock_ns
from commtrace.trace.processes import GONE, SUSPENDED, AskProcess, unknown_process
from commtrace.trace.run import RankTrace, Run

ENDED: Final = "ended"
RUNNING: Final = "running"
STOPPED: Final = "stopped"
SILENT: Final = "silent"

_BUSY_AGAIN_NS: Final = 3_500_000_000
"""A rank that records writes twice a second; one that falls quiet says so after two seconds
(capture/hangs/activity.py)."""

_OLDER_RECORDER_NS: Final = 11_000_000_000
"""Recorders that know no such word wrote at least a clock anchor every ten seconds."""

_SLACK_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rank's files end.

    Attributes:
        state: ``ended`` (in order), ``running``, ``stopped`` (broken off, no earlier than others) or ``silent`` (broken
            off while others still wrote, silent though its process lives, or suspended).
        last_ns: epoch ns of the last thing written; None if nothing tells it.
        behind_ns: how long before the last word of any rank that was; before now for a run that goes on.
        process: what its process is in, see :mod:`commtrace.trace.processes`; None if that cannot be told.
        exception: type of the one that nobody caught, if it ended for one; else empty.
    """

    state: str
    last_ns: int | None
    behind_ns: int | None
    process: str | None
    exception: str = ""


def find_endings(
    run: Run, now_ns: int, ask: AskProcess = unknown_process, goes_on: bool | None = None
) -> Mapping[int, Ending]:
    """By rank.

    Args:
        run: whatever was loaded.
        now_ns: epoch ns.
        ask: for the process of a rank.
        goes_on: whether the job does; None: to be found out.
    """
    last = {rank: last_word_ns(trace) for rank, trace in run.ranks.items()}
    processes = {rank: None if trace.closed else ask(trace.metadata) for rank, trace in run.ranks.items()}
    fresh = {
        rank: time is not None and now_ns - time <= _allowed_ns(run.ranks[rank]) + _SLACK_NS
        for rank, time in last.items()
    }
    if goes_on is None:
        goes_on = any(
            not trace.closed and (fresh[rank] if processes[rank] is None else processes[rank] != GONE)
            for rank, trace in run.ranks.items()
        )
    latest = max((time for time in last.values() if time is not None), default=None)
    reference = now_ns if goes_on else latest
    endings = {}
    for rank, trace in run.ranks.items():
        time = last[rank]
        behind = None if time is None or reference is None else max(0, reference - time)
        endings[rank] = Ending(
            _state(trace, behind, processes[rank], goes_on), time, behind, processes[rank], trace.exception
        )
    return endings


def _state(trace: RankTrace, behind: int | None, process: str | None, goes_on: bool) -> str:
    if trace.closed:
        return ENDED
    if process == SUSPENDED:
        return SILENT  # Its last word may be recent: no other will come.
    if behind is not None and behind > _allowed_ns(trace) + _SLACK_NS:
        return SILENT
    if process == GONE:
        # Its last word may be recent and its process gone all the same.
        return SILENT if goes_on else STOPPED
    return RUNNING if goes_on else STOPPED


def _allowed_ns(trace: RankTrace) -> int:
    """How long this rank may have written nothing and still be well."""
    if not trace.activity or trace.activity_ns is None or trace.last_written_ns is None:
        return _OLDER_RECORDER_NS
    if trace.last_written_ns > trace.activity_ns:
        return _BUSY_AGAIN_NS
    return int(trace.activity.get("again_within_ns", _OLDER_RECORDER_NS))


def last_word_ns(trace: RankTrace) -> int | None:
    """Epoch ns of the latest instant of which the rank's files tell."""
    return None if trace.last_written_ns is None else wall_clock_ns(trace, trace.last_written_ns)
