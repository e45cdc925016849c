"""Find how far a job has got, from the newest files of its ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

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
    reports = trace.progress
    pairs = [(b, a) for a, b in pairwise(reports) if b[0] > a[0]]
    return np.array([(b[1] - a[1]) / (b[0] - a[0]) for b, a in pairs], np.float64)


def _last_report(trace: RankTrace) -> tuple[int, int] | None:
    """Return the rank's latest step, and the time of that, epoch ns."""
    rows = np.flatnonzero(trace.spans.kind == schema.STEP)
    reported = list(trace.progress)
    if len(rows):
        last = rows[np.argmax(trace.spans.step[rows])]
        reported.append((int(trace.spans.step[last]) + 1, int(trace.spans.end[last])))
    if not reported:
        return None
    step, at = max(reported)
    anchor = (trace.metadata.anchor, *trace.anchors)[-1]
    return step, at - anchor.monotonic_ns + anchor.realtime_ns


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
