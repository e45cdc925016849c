from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.comparison.compare import compare, step_series
from commtrace.analysis.windows.run import OpenedRun
from commtrace.errors import ConfigurationError
from commtrace.viewer.comparison import comparison_resources
from tests.factory import make_run
from tests.pipeline_factory import PipelineJob

JOB = PipelineJob(stages=2, microbatches=4, data_parallel=2, steps=7)


def whole(job: PipelineJob, name: str) -> OpenedRun:
    return OpenedRun.of(analyse(replace(job.run(), path=Path(name))))


def test_the_differences_are_those_of_compare() -> None:
    before, after = whole(JOB, "old"), whole(replace(JOB, forward_ns=1_200_000), "new")

    resources = comparison_resources(before, after)

    shown = json.loads(resources["comparison.json"])
    expected = compare([before.measure(step_series)], [after.measure(step_series)]).to_json()
    assert shown == {"run_before": "made-run", "run_after": "made-run", **json.loads(json.dumps(expected))}
    assert shown["wall_ns"]["difference"] == 1_000_000.0  # 5 of 6 forwards are in the way


def test_the_other_run_comes_with_its_typical_step() -> None:
    resources = comparison_resources(whole(JOB, "old"), whole(JOB, "new"))

    assert json.loads(resources["other.json"]) == {
        "step": 3,
        "duration_ns": JOB.step_ns,
        "outline": "other/outline.json",
    }
    assert [name for name in resources if name.startswith("other/")] == [
        "other/outline.json",
        "other/ranks",
        "other/work",
        "other/stalls",
        "other/host",
        "other/communication",
    ]


def test_a_run_is_not_compared_with_itself() -> None:
    run = whole(JOB, "old")

    with pytest.raises(ConfigurationError, match="compared with itself"):
        comparison_resources(run, run)


def test_a_run_without_steps_cannot_be_compared() -> None:
    empty = OpenedRun.of(analyse(replace(make_run({0: []}), path=Path("empty"))))

    with pytest.raises(ConfigurationError, match="empty: no step was recorded"):
        comparison_resources(empty, whole(JOB, "new"))
