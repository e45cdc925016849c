"""What the monitor says of a running job: its state, as in ``monitor.json``, and its events, as in ``monitor.jsonl``.

The records are the same where they are made, on the wire, in files and where they are read, with their bounds.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from commtrace.findings.finding import Finding
from commtrace.findings.own_cost import OwnCost
from commtrace.trace.bounds import Count, Size, Step, Time, Word

FOUND: Final = "found"
CHANGED: Final = "changed"
CLEARED: Final = "recovered"

MOST_MEANS: Final = 16
"""Limit of the kinds of work, and of the roles, with a mean."""

_Means = Annotated[dict[Annotated[str, Meta(max_length=1_024)], Time], Meta(max_length=MOST_MEANS)]


class LiveEvent(Struct, frozen=True):
    """A message for the person on call."""

    kind: Literal["found", "changed", "recovered"]  # changed: other ranks, now a host, longer input, or more is known
    time_ns: Time  # epoch
    finding: Finding
    sentence: Word


class JobMeans(Struct, frozen=True):
    """Means over the ranks of the job in one window of their mean steps; ns per step."""

    step: Step  # the newest that a rank reported
    ranks: Size  # that ended steps in the window
    step_ns: Time
    work_ns: _Means  # by window.WORK
    exposed_ns: _Means  # by role; bubble as pp


class MonitorStatus(Struct, frozen=True, kw_only=True):
    """The present state of a job."""

    time_ns: Time  # epoch
    world_size: Size = 0
    ranks_heard: Size = 0  # that have ever reported
    step_ns: Count = 0  # median of the ranks' mean step in the newest windows
    last_step: Step = -1  # the newest that a rank reported; −1 before the first
    peers_missing: bool = False  # a rank has no peer that does the same work
    findings: tuple[Finding, ...] = ()  # that hold now, in the order of findings.ranked
    means: JobMeans | None = None  # None before the first steps
    own_cost: OwnCost | None = None  # of recording, from the steps of one rank; None before there are enough


class JobView(Struct, frozen=True):
    """The job as a rank sees it through its monitor: findings that hold, and the newest events, oldest first."""

    findings: tuple[Finding, ...] = ()
    events: tuple[LiveEvent, ...] = ()
    means: JobMeans | None = None
