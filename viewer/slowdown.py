"""What the replay says of a run: the resource ``slowdown.json`` of the page."""

from __future__ import annotations

from commtrace.analysis.stragglers.report import slowdown_of
from commtrace.analysis.stragglers.search import MeasuredWork
from commtrace.analysis.whatif_traces.trace import is_whatif_run
from commtrace.analysis.windows.run import LargeRun, WholeRun
from commtrace.viewer.data import Resources, encode_json


def slowdown_resources(run: WholeRun | LargeRun, work: MeasuredWork) -> Resources:
    """Return the resource, or nothing where steps cannot be replayed, or would have to be read again for it."""
    steps = work.steps
    if isinstance(run, LargeRun) or not run.steps.used:
        return {}
    if not is_whatif_run(run.recorded) and (steps is None or not steps.measured_ns.any()):
        return {}
    slowdown = slowdown_of(run, work, run.replay(steps) if steps else None)
    return {"slowdown.json": encode_json(slowdown.to_json())}
