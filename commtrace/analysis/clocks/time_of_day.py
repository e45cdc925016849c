"""The time of day of steps: an engineer on call has a clock and a job's log, but no step numbers.

>>> iso_utc(1_700_000_000_512_000_000)
'2023-11-14T22:13:20.512+00:00'
>>> clock_time(1_700_000_000_512_000_000)
'22:13:20 UTC'
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run

FIRST_DATE_NS: Final = 10**18
"""The year 2001. Imported times before it count from the begin of a trace, or of a host's clock."""


def wall_clock_ns(trace: RankTrace, time_ns: int) -> int:
    """Return an instant of the rank's own clock as epoch ns, by the last anchor before it."""
    anchors = trace.anchors or (trace.metadata.anchor,)
    anchor = max(
        (anchor for anchor in anchors if anchor.monotonic_ns <= time_ns),
        key=lambda anchor: anchor.monotonic_ns,
        default=anchors[0],
    )
    return time_ns + anchor.offset_ns


def step_begin_ns(run: Run, step: int) -> int | None:
    """Return when the first rank began a step, epoch ns; None if unknown."""
    begins = []
    for trace in run.ranks.values():
        rows = (trace.spans.kind == schema.STEP) & (trace.spans.step == step)
        if rows.any():
            begins.append(wall_clock_ns(trace, int(trace.spans.start[rows].min())))
    return min(begins) if begins and min(begins) > FIRST_DATE_NS else None


def step_end_ns(run: Run, step: int) -> int | None:
    """Return when the last rank ended a step, epoch ns; None if unknown."""
    ends = []
    for trace in run.ranks.values():
        rows = (trace.spans.kind == schema.STEP) & (trace.spans.step == step)
        if rows.any():
            ends.append(wall_clock_ns(trace, int(trace.spans.end[rows].max())))
    return max(ends) if ends and min(ends) > FIRST_DATE_NS else None


def iso_utc(epoch_ns: int) -> str:
    """Return an instant by ISO 8601, in UTC, to the millisecond."""
    return _utc(epoch_ns).isoformat(timespec="milliseconds")


def iso_utc_if_known(epoch_ns: int | None) -> str | None:
    return None if epoch_ns is None else iso_utc(epoch_ns)


def clock_time(epoch_ns: int) -> str:
    """Return ``14:03:22 UTC``."""
    return f"{_utc(epoch_ns):%H:%M:%S} UTC"


def date_and_time(epoch_ns: int, until_ns: int | None = None) -> str:
    """Return ``2026-11-23 14:03:22 UTC``, or ``2026-11-23 14:03:22–14:05:09 UTC`` of a period."""
    begin = _utc(epoch_ns)
    if until_ns is None:
        return f"{begin:%Y-%m-%d %H:%M:%S} UTC"
    until = _utc(until_ns)
    end = f"{until:%H:%M:%S}" if until.date() == begin.date() else f"{until:%Y-%m-%d %H:%M:%S}"
    return f"{begin:%Y-%m-%d %H:%M:%S}–{end} UTC"


def _utc(epoch_ns: int) -> datetime:
    return datetime.fromtimestamp(epoch_ns // 1_000_000 / 1000, timezone.utc)
