"""When a running job makes no progress: one rule for the monitor and for ``commtrace top``.

>>> stalled_after_ns(step_ns=2_000_000_000) / 1e9
20.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commtrace.findings.causes import JOB, RANKS
from commtrace.findings.finding import HANG, Finding
from commtrace.findings.formatting import format_duration, format_ranks

LEAST_SECONDS: Final = 15.0
STEPS: Final = 10
"""A job makes no progress if no step ends for this many usual ones, and so many seconds at least."""


def stalled_after_ns(step_ns: float) -> float:
    """Return the time without a step after which a job makes no progress; ``step_ns`` is that of a usual step."""
    return max(LEAST_SECONDS * 1e9, STEPS * step_ns)


def no_progress(
    since_ns: int | None, quiet_ns: int, step_ns: int | None, last_steps: Mapping[int, int], run: str = "RUN"
) -> Finding:
    """Return the finding that no step ends.

    Args:
        since_ns: the end of the last step, epoch; None if unknown.
        quiet_ns: the time since then.
        step_ns: the length of a usual step; None if unknown.
        last_steps: by rank, the last step that ended on it.
        run: the run as ``commtrace doctor`` takes it.
    """
    last = max(last_steps.values(), default=-1)
    behind = tuple(sorted(rank for rank, step in last_steps.items() if step < last))
    usual = f" (a step takes {format_duration(step_ns)})" if step_ns else ""
    evidence = f"No step has ended for {format_duration(quiet_ns)}{usual}."
    if behind:
        first = min(last_steps[rank] for rank in behind)
        evidence += f" The last one is {last}; {format_ranks(behind)} ended none after {first}."
    return Finding(
        id=HANG,
        kind=HANG,
        place=RANKS if behind else JOB,
        who=format_ranks(behind) if behind else "the job",
        ranks=behind,
        since_step=last,
        since_ns=since_ns,
        evidence=evidence,
        advice=f"See where each rank is: commtrace doctor {run}",
    )
