"""Schedules of torch.distributed.pipelining, trained for real: every action is a span, in the order of torch's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import fork
from tests.e2e.traces import role_of, rows
from tests.pipeline_factory import one_forward_one_backward

pytestmark = pytest.mark.e2e

PROGRAM = "tests/e2e/programs/pipelining.py"
ITERATIONS, MICROBATCHES = 3, 8
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


class Schedule(NamedTuple):
    """A class of torch's, how many chunks a rank has under it, and what commtrace calls it."""

    class_name: str
    chunks: int
    recognised: str


def test_actions_are_spans_in_the_order_of_the_plan(tmp_path: Path) -> None:
    schedules = [
        Schedule("ScheduleGPipe", 1, "gpipe"),
        Schedule("Schedule1F1B", 1, "1f1b"),
        Schedule("ScheduleInterleaved1F1B", 2, "interleaved_1f1b"),
        Schedule("ScheduleInterleavedZeroBubble", 2, "interleaved_zero_bubble"),
        Schedule("ScheduleDualPipeV", 2, "dualpipev"),
    ]
    without_optimizer = "ScheduleGPipe:none"

    runs = train([*(f"{schedule.class_name}:sgd" for schedule in schedules), without_optimizer], 2, tmp_path)

    for schedule, run in zip(schedules, runs, strict=False):
        assert_follows_its_plan(run, schedule, 2, tmp_path)
    assert_each_call_of_the_schedule_is_a_step(runs[-1])


def test_a_zero_bubble_schedule_in_the_shape_of_a_v(tmp_path: Path) -> None:
    schedule = Schedule("ScheduleZBVZeroBubble", 2, "zbv")

    (run,) = train([f"{schedule.class_name}:sgd"], 4, tmp_path)

    assert_follows_its_plan(run, schedule, 4, tmp_path)


def assert_follows_its_plan(run: Run, schedule: Schedule, ranks: int, directory: Path) -> None:
    name, chunks, _ = schedule
    for rank, trace in run.ranks.items():
        assert trace.coordinates == {"pp": rank}
        assert trace.parallel == {"pp": ranks}
        assert (trace.topology["chunks"], trace.topology["microbatches"]) == (chunks, MICROBATCHES), name
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(ITERATIONS)), name
        for step in range(ITERATIONS):
            assert actions(run, rank, step) == plan(name, rank, ranks, directory), name
        repeated = [
            (row["microbatch"], row["chunk"], row["stage"]) for row in rows(run, rank, schema.RECOMPUTE, step=1)
        ]
        assert repeated == [(microbatch, 0, rank) for microbatch in range(MICROBATCHES if chunks == 1 else 0)], name
        messages = list(rows(run, rank, schema.P2P, step=1))
        assert messages, name
        assert {role_of(trace, row["group"], row["peer"]) for row in messages} == {"pp"}, name
    analysis = analyse(run)
    pipeline = find_pipeline(OpenedRun.of(analysis))
    assert pipeline is not None, name
    assert (pipeline.schedule, pipeline.stages, pipeline.chunks, pipeline.microbatches) == (
        schedule.recognised, ranks, chunks, MICROBATCHES,
    )  # fmt: skip


def assert_each_call_of_the_schedule_is_a_step(run: Run) -> None:
    for rank in run.ranks:
        # The last one has no end that anybody could see: the program evaluates and goes.
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(ITERATIONS - 1))
        assert len(actions(run, rank, 1)) == 2 * MICROBATCHES


def train(names: list[str], ranks: int, directory: Path) -> list[Run]:
    """The runs of one job that trains with one schedule after the other."""
    completed = fork([PROGRAM, directory, *names], ranks, timeout=240)
    assert completed.returncode == 0, completed.stdout
    runs = [load_run(directory / name) for name in names]
    for run in runs:
        assert run.problems == ()
        assert sorted(run.ranks) == list(range(ranks))
    return runs


def actions(run: Run, rank: int, step: int) -> list[str]:
    """What the spans of a step say, in torch's notation: stage among all, letter, microbatch."""
    stages = run.ranks[rank].topology["stage_indices"]
    spans = rows(run, rank, schema.FORWARD, schema.BACKWARD, step=step)
    return [f"{stages[row['chunk']]}{LETTERS[row['name']]}{row['microbatch']}" for row in spans]


def plan(schedule: str, rank: int, ranks: int, directory: Path) -> list[str]:
    if schedule == "Schedule1F1B":  # torch 2.13 numbers the forwards of its own plan wrongly; it does not run by it
        order = one_forward_one_backward(rank, ranks, MICROBATCHES)
        return [f"{rank}{kind[0].upper()}{microbatch}" for kind, microbatch in order]
    planned: list[str] = json.loads((directory / f"{schedule}-plan-{rank}.json").read_text())
    return planned
