"""Whether a running job makes no progress by what its ranks recorded: one rule for all commands that read files.

>>> quiet = find_quiet(run, now_ns=time.time_ns())     # doctest: +SKIP
>>> quiet is not None and not quiet.pauses             # doctest: +SKIP
True
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commtrace.analysis.clocks.time_of_day import FIRST_DATE_NS
from commtrace.analysis.matching.arrivals import reports_activity
from commtrace.analysis.steps.progress import find_progress, last_advance_ns, last_ended_step
from commtrace.findings.finding import Finding
from commtrace.findings.formatting import format_ranks
from commtrace.findings.progress import no_progress, stalled_after_ns
from commtrace.trace.run import Run

_PAUSES: Final = {"checkpoint": "a checkpoint is saved or loaded", "evaluation": "evaluation"}
"""Phases in which no step ends."""


class Quiet(NamedTuple):
    """No step of any rank has ended for longer than usual."""

    since_ns: int  # epoch
    step_ns: int  # length of a usual step
    pauses: str  # ``a checkpoint is saved or loaded on rank 0``; if empty, the job makes no progress


def find_quiet(run: Run, now_ns: int, step_ns: int | None = None) -> Quiet | None:
    """Return since when no step has ended, whether recorded or not; None if not for longer than usual, or unknown.

    Args:
        run: its newest part.
        now_ns: epoch ns.
        step_ns: the length of a usual step; None to take it from this part.
    """
    usual_ns = step_ns or find_progress(run, now_ns).step_ns
    since_ns = latest_advance_ns(run)
    if usual_ns is None or since_ns is None or now_ns - since_ns <= stalled_after_ns(usual_ns):
        return None
    return Quiet(since_ns, round(usual_ns), _pauses(run))


def latest_advance_ns(run: Run) -> int | None:
    """Return when any rank was last known to come to another step, epoch ns; None if unknown."""
    advances = [at_ns for trace in run.ranks.values() if (at_ns := last_advance_ns(trace)) is not None]
    return max(advances) if advances and min(advances) > FIRST_DATE_NS else None


def _pauses(run: Run) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, trace in run.ranks.items():
        open_kinds = (
            {phase.kind for phase in trace.activity.open} if trace.activity and reports_activity(trace) else set()
        )
        for kind, words in _PAUSES.items():
            if kind in open_kinds:
                ranks.setdefault(words, []).append(rank)
    return ", ".join(f"{words} on {format_ranks(own)}" for words, own in ranks.items())


def find_no_progress(run: Run, now_ns: int) -> Finding | None:
    """Return that no step of a running job ends, if none has for unusually long and no pause explains it."""
    quiet = find_quiet(run, now_ns)
    if quiet is None or quiet.pauses:
        return None
    last_steps = {rank: step for rank, trace in run.ranks.items() if (step := last_ended_step(trace)) >= 0}
    return no_progress(quiet.since_ns, now_ns - quiet.since_ns, quiet.step_ns, last_steps, str(run.path))
