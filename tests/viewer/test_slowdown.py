from __future__ import annotations

import json

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.report import report_of_steps
from commtrace.analysis.stragglers.search import measure_work
from commtrace.analysis.windows.run import WholeRun
from commtrace.trace.run import Run
from commtrace.viewer.slowdown import slowdown_resources
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob


def views(run: Run) -> dict[str, bytes]:
    analysis = analyse(run)
    return dict(slowdown_resources(WholeRun(analysis), measure_work(analysis)))


def test_the_numbers_are_those_of_the_straggler_command() -> None:
    run = PipelineJob(stages=2, microbatches=4, data_parallel=2, extra_forward_ns={3: 300_000}, steps=4).run()

    printed = report_of_steps(WholeRun(analyse(run))).to_json()

    slowdown = json.loads(views(run)["slowdown.json"])
    assert slowdown["S"] > 1
    assert {name: printed[name] for name in slowdown} == slowdown


def test_steps_without_length_have_no_slowdown() -> None:
    assert views(make_run({0: [span("step", 5, 5, step=step) for step in range(3)]})) == {}


def test_a_run_without_steps_has_no_slowdown() -> None:
    assert views(make_run({0: []})) == {}
