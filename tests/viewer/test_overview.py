"""The resources of the overview, read as the page reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from commtrace.analysis.breakdown.critical_path import KINDS
from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.step_totals import SummedSteps
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.timeline import Timeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace.run import Run
from commtrace.viewer.overview import MOST_BLOCKS, critical_tables, overview_resources, part_tables
from tests.factory import make_run, span
from tests.pipeline_factory import PipelineJob

MS = 1_000_000
JOB = PipelineJob(2, 3, data_parallel=2, transfer_ns=100_000, all_reduce_ns=MS, optimizer_ns=MS, steps=5)


def decoded(stream: bytes) -> dict[str, list[int]]:
    stored = pa.ipc.open_stream(stream).read_all()
    return {
        field.name: np.cumsum(values).tolist() if field.metadata == {b"encoding": b"delta"} else values.tolist()
        for field, values in zip(stored.schema, (column.to_numpy() for column in stored.columns), strict=True)
    }


def resources(run: Run) -> tuple[Any, dict[str, dict[str, list[int]]], Analysis]:
    analysis = analyse(run)
    written = overview_resources(summarise_steps(OpenedRun.of(analysis)))
    described = json.loads(written.pop("overview.json"))
    return described, {name: decoded(table) for name, table in written.items()}, analysis


def test_every_step_is_there_with_the_time_that_the_timeline_gives_it() -> None:
    described, tables, analysis = resources(JOB.run())
    timeline = Timeline.of_analysis(analysis)

    assert tables["steps"]["step"] == [0, 1, 2, 3, 4]
    assert tables["steps"]["duration"][1:] == [timeline.duration_ns(step) for step in (1, 2, 3, 4)]
    assert tables["steps"]["reason"] == [0, -1, -1, -1, -1]
    assert described["reasons"] == ["warm-up"]
    assert described["begin_utc"] == "2023-11-14T22:13:20.000+00:00"


def test_evaluations_and_checkpoints_are_events() -> None:
    rows = [span("step", 100 * step, 100 * step + 90, step=step) for step in range(5)]
    described, tables, _ = resources(make_run({0: [*rows, span("checkpoint", 290, 300), span("evaluation", 400, 450)]}))

    kinds = [described["events"][kind] for kind in tables["events"]["kind"]]
    assert list(zip(kinds, tables["events"]["start"], tables["events"]["duration"], strict=True)) == [
        ("checkpoint", 290, 10),
        ("evaluation", 400, 50),
    ]


def test_the_parts_of_the_steps_add_up_to_those_of_the_ranks() -> None:
    described, tables, analysis = resources(JOB.run())
    summary, blocks = summarise_steps(OpenedRun.of(analysis)), tables["blocks"]

    assert sorted(set(blocks["first"])) == [1, 2, 3, 4]
    assert set(blocks["rank_steps"]) == {4}
    computed = sum(
        ns
        for state, ns in zip(blocks["state"], blocks["ns"], strict=True)
        if described["states"][state]["kind"] == "compute"
    )
    assert computed == 4 * sum(rank.part("compute") for rank in summary.ranks)
    assert sum(blocks["ns"]) == 4 * sum(rank.wall_ns for rank in summary.ranks)


def test_many_steps_are_few_blocks() -> None:
    analysis = analyse(JOB.run())
    summary = summarise_steps(OpenedRun.of(analysis))
    steps = summary.totals.steps
    many = SummedSteps(steps.states, np.arange(1_001), np.ones((1_001, len(steps.states)), np.int64), 4)
    written = overview_resources(replace(summary, totals=replace(summary.totals, parts=(many,))))
    blocks = decoded(written["blocks"])

    bounds = sorted(set(zip(blocks["first"], blocks["last"], blocks["rank_steps"], strict=True)))
    assert bounds[:2] == [(0, 5, 24), (6, 11, 24)]
    assert bounds[-1] == (996, 1_000, 20)
    assert len(bounds) <= MOST_BLOCKS
    assert sum(blocks["ns"]) == 1_001 * len(steps.states)


def test_bandwidth_is_that_of_the_summary() -> None:
    described, tables, analysis = resources(JOB.run())
    rows = tables["bandwidth"]
    at = described["operations"].index("all_reduce")
    (of_reduce,) = (
        index
        for index, (operation, role) in enumerate(zip(rows["operation"], rows["role"], strict=True))
        if operation == at and described["roles"][role] == "dp"
    )
    (row,) = (
        row
        for row in summarise_steps(OpenedRun.of(analysis)).communication
        if (row.role, row.operation) == ("dp", "all_reduce")
    )

    assert rows["calls"][of_reduce] == row.count
    assert row.busbw_gbps is not None
    assert rows["median"][of_reduce] == rows["best"][of_reduce] == round(row.busbw_gbps * 1e9)


def test_the_critical_path_of_a_step_has_the_length_of_the_job_step() -> None:
    run = JOB.run()
    analysis = analyse(run)
    tables = dict(critical_tables(analysis, Timeline.of_analysis(analysis), [2, 3]))
    path = decoded(tables["step/2/critical"])

    assert list(tables) == ["step/2/critical", "step/3/critical"]
    assert path["start"][0] == 0
    ends = [start + ns for start, ns in zip(path["start"], path["duration"], strict=True)]
    assert path["start"][1:] == ends[:-1]
    assert ends[-1] == Timeline.of_analysis(analysis).duration_ns(2)
    assert {KINDS[kind] for kind in path["kind"]} >= {"forward", "backward", "transfer"}
    assert set(path["rank"]) <= set(range(4))


def test_the_parts_of_a_step_add_up_to_the_time_of_each_rank() -> None:
    analysis = analyse(JOB.run())
    tables = dict(part_tables(analysis, Timeline.of_analysis(analysis), [2, 3]))
    parts = decoded(tables["step/2/parts"])
    times = analysis.partition
    rows = times.step == 2

    assert list(tables) == ["step/2/parts", "step/3/parts"]
    assert parts.pop("rank") == [0, 1, 2, 3]
    assert set(parts) >= {"compute/forward", "compute/backward", "bubble/"}
    assert [sum(of_rank) for of_rank in zip(*parts.values(), strict=True)] == times.wall_ns[rows].tolist()
    assert parts["compute/forward"] == times.total("compute", "forward")[rows].tolist()


def test_a_run_without_steps_has_empty_tables() -> None:
    described, tables, _ = resources(make_run({0: [span("forward", 0, 10)]}))

    assert described["begin_utc"] is None
    assert tables["steps"]["step"] == []
    assert tables["bandwidth"]["calls"] == []
