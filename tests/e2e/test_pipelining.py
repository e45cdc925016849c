"""Schedules of torch.distributed.pipelining, trained for real: every action is a span, in the order of torch's plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline import reconstruct_pipeline
from commtrace.trace import schema
from commtrace.trace.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import launch
from tests.e2e.traces import role_of, rows
from tests.pipeline_factory import one_forward_one_backward

pytestmark = pytest.mark.e2e

PROGRAM = "tests/e2e/programs/pipelining.py"
ITERATIONS, MICROBATCHES = 3, 8
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "recognised"),
    [
        ("ScheduleGPipe", 2, 1, "gpipe"),
        ("Schedule1F1B", 2, 1, "1f1b"),
        ("ScheduleInterleaved1F1B", 2, 2, "interleaved_1f1b"),
        ("ScheduleInterleavedZeroBubble", 2, 2, "interleaved_zero_bubble"),
        ("ScheduleZBVZeroBubble", 4, 2, "zbv"),
        ("ScheduleDualPipeV", 2, 2, "dualpipev"),
    ],
)
def test_actions_are_spans_in_the_order_of_the_plan(
    schedule: str, ranks: int, chunks: int, recognised: str, tmp_path: Path
) -> None:
    run = train(schedule, ranks, tmp_path)

    for rank, trace in run.ranks.items():
        assert trace.coordinates == {"pp": rank}
        assert trace.parallel == {"pp": ranks}
        assert (trace.topology["chunks"], trace.topology["microbatches"]) == (chunks, MICROBATCHES)
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(ITERATIONS))
        for step in range(ITERATIONS):
            assert actions(run, rank, step) == plan(schedule, rank, ranks, tmp_path)
        repeated = [
            (row["microbatch"], row["chunk"], row["stage"]) for row in rows(run, rank, schema.RECOMPUTE, step=1)
        ]
        assert repeated == [(microbatch, 0, rank) for microbatch in range(MICROBATCHES if chunks == 1 else 0)]
        messages = list(rows(run, rank, schema.P2P, step=1))
        assert messages
        assert {role_of(trace, row["group"], row["peer"]) for row in messages} == {"pp"}
    analysis = analyse(run)
    pipeline = reconstruct_pipeline(analysis.run, analysis.matches)
    assert pipeline is not None
    assert (pipeline.schedule, pipeline.stages, pipeline.chunks, pipeline.microbatches) == (
        recognised, ranks, chunks, MICROBATCHES,
    )  # fmt: skip


def test_without_an_optimizer_each_call_of_the_schedule_is_a_step(tmp_path: Path) -> None:
    run = train("ScheduleGPipe", 2, tmp_path, optimizer="none")

    for rank in run.ranks:
        # The last one has no end that anybody could see: the program evaluates and goes.
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(ITERATIONS - 1))
        assert len(actions(run, rank, 1)) == 2 * MICROBATCHES


def train(schedule: str, ranks: int, directory: Path, optimizer: str = "sgd") -> Run:
    environment = {"COMMTRACE_DIR": str(directory / "run")}
    completed = launch([PROGRAM, schedule, directory, optimizer], ranks, environment)
    assert completed.returncode == 0, completed.stdout
    run = load_run(directory / "run")
    assert run.problems == ()
    assert sorted(run.ranks) == list(range(ranks))
    return run


def actions(run: Run, rank: int, step: int) -> list[str]:
    """What the spans of a step say, in torch's notation: stage among all, letter, microbatch."""
    stages = run.ranks[rank].topology["stage_indices"]
    spans = rows(run, rank, schema.FORWARD, schema.BACKWARD, step=step)
    return [f"{stages[row['chunk']]}{LETTERS[row['name']]}{row['microbatch']}" for row in spans]


def plan(schedule: str, rank: int, ranks: int, directory: Path) -> list[str]:
    if schedule == "Schedule1F1B":  # torch 2.13 numbers the forwards of its own plan wrongly; it does not run by it
        order = one_forward_one_backward(rank, ranks, MICROBATCHES)
        return [f"{rank}{kind[0].upper()}{microbatch}" for kind, microbatch in order]
    planned: list[str] = json.loads((directory / f"plan-{rank}.json").read_text())
    return planned
