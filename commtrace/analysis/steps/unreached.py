"""A run that was to record only some steps and ended before the first of them."""

from __future__ import annotations

from commtrace.trace import schema
from commtrace.trace.run import Run
from commtrace.trace.selection.step_range import StepRange


def unreached_steps(run: Run) -> str | None:
    """Return what to say of a run that recorded no step because the job did not get to those that were asked for.

    Args:
        run: or the newest part of one.

    Returns:
        A sentence; None where steps were recorded, or where nobody asked for particular ones.
    """
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
