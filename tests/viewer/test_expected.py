from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.windows.run import open_run
from commtrace.cli.main import app
from commtrace.planning.plan import plan_job
from commtrace.planning.recorded_job import recorded_job
from commtrace.trace.run import Run
from commtrace.trace.topology import Topology
from commtrace.viewer.expected import count_planned, expected_resources
from commtrace.viewer.whole_run import summarise_with_views
from tests.cli.planned_runs import LAYOUT, MODEL, recorded
from tests.pipeline_factory import PipelineJob


def two_stages(**facts: Any) -> Run:
    run = PipelineJob(stages=2, microbatches=4).run()
    ranks = {
        rank: replace(
            trace,
            parallel={"tp": 1, "pp": 2, "dp": 1, "cp": 1, "ep": 1},
            topology=cast(Topology, {**trace.topology, "microbatches": 4, "chunks": 1, **facts}),
        )
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def resources(run: Run) -> dict[str, bytes]:
    return dict(expected_resources(run, count_planned(analyse(run))))


def test_communication_is_that_of_the_command(tmp_path: Path) -> None:
    path = recorded(tmp_path, missing="all_gather", model=MODEL, layout=LAYOUT)
    printed = json.loads(CliRunner().invoke(app, ["plan", "--against", path, "--json"]).stdout)

    views = summarise_with_views(open_run(path), is_whole=True).views

    shown = json.loads(views["expected.json"])
    assert printed["differences"] == 1
    assert {name: shown[name] for name in printed if name != "run"} == {
        name: value for name, value in printed.items() if name != "run"
    }


def test_memory_and_the_bubble_are_those_of_the_plan() -> None:
    run = two_stages(model=MODEL, layout=LAYOUT)
    plan = plan_job(recorded_job(run))

    shown = json.loads(resources(run)["expected.json"])

    assert [stage["memory"]["peak_bytes"] for stage in shown["stages"]] == [
        stage.memory.peak_bytes for stage in plan.stages
    ]
    assert [stage["ranks"] for stage in shown["stages"]] == [[0], [1]]
    assert shown["bubble"]["fraction_of_step"] == 1 / 5
    assert shown["parameters"] == plan.parameters


def test_a_run_without_sizes_has_no_plan() -> None:
    assert resources(PipelineJob(stages=2, microbatches=4).run()) == {}


def test_sizes_that_contradict_one_another_are_reported() -> None:
    shown = json.loads(resources(two_stages(model={**MODEL, "layers": 0}, layout=LAYOUT))["expected.json"])

    assert "layers is 0" in shown["problem"]


def test_zero_has_communication_alone() -> None:
    run = PipelineJob(stages=1, microbatches=1, data_parallel=2, all_reduce_ns=1000).run()
    facts = cast(Topology, {"parameter_elements": [256], "zero_stage": 1, "microbatches": 1, "zero": {}})
    ranks = {rank: replace(trace, parallel={"dp": 2}, topology=facts) for rank, trace in run.ranks.items()}

    shown = json.loads(resources(replace(run, ranks=ranks))["expected.json"])

    assert shown["rows"]
    assert (shown["stages"], shown["bubble"], shown["parameters"]) == ([], None, None)
