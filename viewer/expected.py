"""What a run should hold and send by the sizes that it recorded, beside what it sent: ``expected.json`` of the page."""

from __future__ import annotations

from typing import Final

from commtrace.analysis.chain import Analysis
from commtrace.analysis.memory import peak_memory
from commtrace.errors import ConfigurationError
from commtrace.planning.call_counts import CallCounts, count_calls
from commtrace.planning.comparison import ExpectedTraffic, compare_plan, expected_of
from commtrace.planning.plan import Plan, plan_job
from commtrace.planning.recorded_job import has_sizes, recorded_job, recorded_zero_job
from commtrace.planning.zero import zero_traffic
from commtrace.trace.json_values import JsonObject, to_json
from commtrace.trace.run import Run
from commtrace.viewer.data import Resources, encode_json

_NOT_COUNTED: Final = CallCounts({}, 0, 0)


def count_planned(analysis: Analysis) -> CallCounts:
    """Count what ranks sent, if the run has a plan to put beside it; else nothing, which costs no time."""
    return count_calls(analysis) if _has_plan(analysis.run) else _NOT_COUNTED


def expected_resources(run: Run, sent: CallCounts) -> Resources:
    """Return the plan of a run's own sizes beside it; nothing of a run that recorded no sizes or no step."""
    try:
        if not sent.ranks or not _has_plan(run):
            return {}
        expected = _expected(run, sent)
    except ConfigurationError as error:  # sizes that contradict one another: all else of the page can be shown
        expected = {"problem": str(error)}
    return {"expected.json": encode_json(expected)}


def _has_plan(run: Run) -> bool:
    """Return whether the sizes of a model of Megatron-core or of one under ZeRO were recorded."""
    return has_sizes(run) or any(
        "parameter_elements" in trace.topology and trace.parallel.get("dp") == trace.metadata.world_size
        for trace in run.ranks.values()
    )


def _expected(run: Run, sent: CallCounts) -> JsonObject:
    zero = recorded_zero_job(run)
    plan: Plan | None = None
    if zero is not None:
        expected, notes = [ExpectedTraffic(zero.ranks, zero_traffic(zero.job))], zero.notes
    else:
        plan = plan_job(recorded_job(run))
        expected, notes = expected_of(plan), plan.notes
    comparison = compare_plan(expected, sent, (*notes, *run.problems), peak_memory(run))
    return {
        **comparison.to_json(),
        "parameters": None if plan is None else plan.parameters,
        "bubble": None if plan is None else to_json(plan.bubble),
        "stages": []
        if plan is None
        else [
            {"stage": stage.stage, "ranks": list(stage.ranks), "memory": stage.memory.to_json()}
            for stage in plan.stages
        ],
    }
