"""Find how far a job has got, from the newest files of its ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.clocks.time_of_day import wall_clock_ns
from commtrace.trace import schema
from commtrace.trace.run import RankTrace, Run
from commtrace.trace.selection import StepRange

_LATEST_REPORT_NS: Final = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a job."""

    latest: int  # step of the foremost rank, extrapolated from its last report; −1 if unknown
    step_ns: float | None  # median duration of a step; None if unknown
    age_ns: int  # age of the newest report of a step
    closed: bool  # every rank has ended cleanly


def find_progress(run: Run, now_ns: int | None = None) -> Progress:
    """Return the progress of a run, from its newest part; ``now_ns`` is epoch ns, now if None."""
    now = time.time_ns() if now_ns is None else now_ns
    closed = all(trace.closed for trace in run.ranks.values())
    durations = [_durations(trace) for trace in run.ranks.values()]
    known = np.concatenate(durations) if durations else np.empty(0)
    step_ns = float(np.median(known)) if len(known) else None
    reports = [report for trace in run.ranks.values() if (report := _last_report(trace)) is not None]
    if not reports:
        return Progress(-1, step_ns, 0, closed)
    age = max(0, now - max(at for _, at in reports))
    latest = max(step + _steps_since(now - at, step_ns) for step, at in reports)
    return Progress(latest, step_ns, age, closed)


def _steps_since(since_ns: int, step_ns: float | None) -> int:
    """Return the steps since a report; bounded, as a job that runs reports every step."""
    if not step_ns or since_ns <= 0:
        return 0
    return int(min(since_ns, step_ns + _LATEST_REPORT_NS) / step_ns)


def _durations(trace: RankTrace) -> np.ndarray:
    rows = trace.spans.kind == schema.STEP
    if rows.any():
        return np.asarray(trace.spans.end[rows] - trace.spans.start[rows], np.float64)
    advances = _advances(trace)
    # When the first of them began is not known: only of two steps or more is it no great error.
    first_is_long = len(advances) > 1 and advances[1].step - advances[0].step > 1
    pairs = pairwise(advances if first_is_long else advances[1:])
    return np.array([(b.at - a.at) / (b.step - a.step) for a, b in pairs if b.step > a.step], np.float64)


class _Advance(NamedTuple):
    at: int  # ns of the rank's own clock
    step: int


def _advances(trace: RankTrace) -> list[_Advance]:
    """Return the steps that the rank is known to have come to, in order of time, each when that was first reported.

    These are the reports of steps that are not recorded, which come again while a step lasts, and the step after the
    last recorded one.
    """
    reports = [_Advance(at, step) for step, at in trace.progress]
    rows = np.flatnonzero(trace.spans.kind == schema.STEP)
    if len(rows):
        last = rows[np.argmax(trace.spans.end[rows])]
        ended, ended_at = int(trace.spans.step[last]), int(trace.spans.end[last])
        # Until the next step begins, the one that has ended is reported.
        reports = [report for report in reports if report.step != ended or report.at < ended_at]
        reports.append(_Advance(ended_at, ended + 1))
    return [next(same) for _, same in groupby(sorted(reports), key=lambda report: report.step)]


def _last_report(trace: RankTrace) -> tuple[int, int] | None:
    """Return the rank's latest step, after a rollback a lower one than before, and its last report, epoch ns."""
    advances = _advances(trace)
    if not advances:
        return None
    latest_ns = max([advances[-1].at, *(at for _, at in trace.progress)])
    return advances[-1].step, wall_clock_ns(trace, latest_ns)


def last_advance_ns(trace: RankTrace) -> int | None:
    """Return when the rank was last known to come to another step, epoch ns; None without any step."""
    advances = _advances(trace)
    return wall_clock_ns(trace, advances[-1].at) if advances else None


def last_ended_step(trace: RankTrace) -> int:
    """Return the last step that the rank ended, whether recorded or not; −1 if none is known."""
    advances = _advances(trace)
    return advances[-1].step - 1 if advances else -1


def unreached_steps(run: Run) -> str | None:
    """Return a sentence if no step was recorded because the job did not reach the chosen ones; else None."""
    asked = {str(options["steps"]) for trace in run.ranks.values() if "steps" in (options := trace.recording)}
    recorded = any((trace.spans.kind == schema.STEP).any() for trace in run.ranks.values())
    latest = max((step for trace in run.ranks.values() for step, _ in trace.progress), default=-1)
    if recorded or len(asked) != 1:
        return None
    (steps,) = asked
    if latest >= StepRange.parse(steps).first:
        return None
    ended = all(trace.closed for trace in run.ranks.values())
    got = "has begun none" if latest < 0 else f"{'got' if ended else 'has got'} as far as step {latest}"
    return (
        f"Only steps {steps} were to be recorded (COMMTRACE_STEPS, --steps), and the job {got}"
        f"{'' if ended else ' so far'}: no step was recorded."
    )
