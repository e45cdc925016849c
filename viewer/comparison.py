"""Another run beside the one of a report: the differences, and the typical step of the other run."""

from __future__ import annotations

from typing import Final

from commtrace.analysis.comparison.compare import compare, step_series
from commtrace.analysis.timeline import Timeline, step_durations
from commtrace.analysis.windows.run import OpenedRun
from commtrace.errors import ConfigurationError
from commtrace.viewer.choice import ranks_to_draw, steps_to_draw
from commtrace.viewer.data import Resources, box_tables, encode_json, outline_json, ranks_table, step_json

MOST_BOXES: Final = 100_000
"""Of the step of the other run: about 1.3 MB."""


def comparison_resources(before: OpenedRun, after: OpenedRun) -> Resources:
    """Return the differences of the run of a report, ``after``, from another one, and a step of the latter.

    Raises:
        ConfigurationError: a run has no step that counts, or both are the same run.
    """
    if before.recorded.path.resolve() == after.recorded.path.resolve():
        raise ConfigurationError(f"{after.recorded.path} is to be compared with itself: name another run.")
    for run in (before, after):
        if not run.steps.used:
            raise ConfigurationError(f"{run.recorded.path}: no step was recorded in full, so nothing can be compared.")
    comparison = compare([before.measure(step_series)], [after.measure(step_series)])
    described = {
        "run_before": before.recorded.any_metadata.run_id,
        "run_after": after.recorded.any_metadata.run_id,
        **comparison.to_json(),
    }
    return {"comparison.json": encode_json(described), **step_under(before, "other")}


def step_under(run: OpenedRun, name: str) -> Resources:
    """Return the typical step of a run, to be drawn under those of another one."""
    step = steps_to_draw(step_durations(run.aligned, run.steps.used))[0]
    timeline = Timeline.of_analysis(run.analyse_steps([step]))
    ranks = ranks_to_draw(timeline, [step], (), MOST_BOXES)
    return {
        f"{name}.json": encode_json(step_json(timeline, step, f"{name}/outline.json")),
        f"{name}/outline.json": encode_json(outline_json(timeline.outline())),
        f"{name}/ranks": ranks_table(timeline.bounds(step), ranks),
        **box_tables(timeline.step(step, ranks), name),
    }
