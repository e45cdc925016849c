from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa

from commtrace.analysis.chain import analyse
from commtrace.analysis.rank_steps import rank_steps
from commtrace.analysis.replay.step_statistics import StepStatistics
from commtrace.analysis.straggler_report import report_of_steps
from commtrace.analysis.stragglers.search import measure_work
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace.run import Run
from commtrace.viewer.whole_run import map_resources, slowdown_resources
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob

JOB = PipelineJob(stages=2, microbatches=4, data_parallel=3, optimizer_ns=1_000_000, steps=4)


def columns(view: bytes) -> dict[str, list[int]]:
    table: dict[str, list[int]] = pa.ipc.open_stream(view).read_all().to_pydict()
    return table


def of_job(job: PipelineJob) -> tuple[dict[str, list[int]], object, StepStatistics]:
    analysis = analyse(job.run())
    work = measure_work(analysis).steps
    assert work is not None
    views = map_resources(rank_steps(analysis), work)
    return columns(views["map"]), json.loads(views["map.json"]), work


def test_every_rank_has_a_row_per_block() -> None:
    table, outline, _ = of_job(JOB)

    assert outline == {
        "ranks": [0, 1, 2, 3, 4, 5],
        "blocks": [{"first": step, "last": step} for step in (1, 2, 3)],
    }
    assert table["steps"] == [1] * 18
    assert table["compute"] == [4 * 3_000_000 + 1_000_000] * 18


def test_work_is_beside_that_of_the_stage() -> None:
    table, _, _ = of_job(replace(JOB, extra_forward_ns={4: 250_000}))

    of_rank_4 = slice(12, 15)
    assert table["work"][of_rank_4] == [14_000_000] * 3
    assert table["typical_work"] == [13_000_000] * 18


def test_of_two_ranks_the_one_that_a_finding_names_is_not_typical() -> None:
    job = PipelineJob(stages=1, microbatches=4, data_parallel=2, steps=4, extra_forward_ns={1: 1_000_000})
    analysis = analyse(job.run())
    times, work = rank_steps(analysis), measure_work(analysis).steps
    undecided, named = (columns(map_resources(times, work, slow)["map"]) for slow in ((), (1,)))
    own = named["work"][:3]  # of rank 0

    assert named["typical_work"] == own * 2
    assert all(one < typical for one, typical in zip(own, undecided["typical_work"][:3], strict=True))
    assert columns(map_resources(times, work, (0, 1))["map"]) == undecided  # nobody is left to be typical


def test_a_rank_alone_in_its_stage_has_no_typical_work() -> None:
    table, _, _ = of_job(replace(JOB, data_parallel=1))

    assert table["typical_work"] == [-1] * 6


def test_without_a_replay_work_is_not_known() -> None:
    analysis = analyse(JOB.run())

    assert columns(map_resources(rank_steps(analysis), None)["map"])["work"] == [-1] * 18


def slowdown(run: Run) -> dict[str, bytes]:
    analysis = analyse(run)
    return dict(slowdown_resources(OpenedRun.of(analysis), measure_work(analysis)))


def test_the_numbers_are_those_of_the_straggler_command() -> None:
    run = PipelineJob(stages=2, microbatches=4, data_parallel=2, extra_forward_ns={3: 300_000}, steps=4).run()

    printed = report_of_steps(OpenedRun.of(analyse(run))).to_json()

    published = json.loads(slowdown(run)["slowdown.json"])
    assert published["S"] > 1
    assert {name: printed[name] for name in published} == published


def test_steps_without_length_have_no_slowdown() -> None:
    assert slowdown(make_run({0: [span("step", 5, 5, step=step) for step in range(3)]})) == {}


def test_a_run_without_steps_has_no_slowdown() -> None:
    assert slowdown(make_run({0: []})) == {}
