"""Loops without a line for commtrace, started by ``commtrace run``: steps, phases and roles are found all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commtrace.analysis.breakdown.states import State
from commtrace.analysis.summary import summarise
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, run
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = "tests/e2e/programs/plain_loop.py"
ITERATIONS = 4


def record(loop: str, directory: Path, *arguments: Path) -> Run:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"COMMTRACE_DIR": str(directory), "PYTHONPATH": str(REPOSITORY)}
    completed = run(
        [sys.executable, "-m", "commtrace", "run", "--", *torchrun, PROGRAM, loop, *map(str, arguments)], environment
    )
    assert completed.returncode == 0, completed.stdout
    recorded = load_run(directory)
    assert recorded.problems == ()
    assert sorted(recorded.ranks) == [0, 1]
    return recorded


def test_a_ddp_loop(tmp_path: Path) -> None:
    recorded = record("ddp", tmp_path)

    for rank, trace in recorded.ranks.items():
        assert {group.role for group in trace.groups.values()} == {"dp"}
        steps = list(rows(recorded, rank, schema.STEP))
        assert [step["step"] for step in steps] == list(range(ITERATIONS))
        for step in range(ITERATIONS):
            for kind in (schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER):
                assert len(list(rows(recorded, rank, kind, step=step))) == 1
        mode, forward = rows(recorded, rank, schema.EVALUATION)
        assert (mode["name"], forward["name"]) == ("eval() to train()", "evaluation")
        between = list(rows(recorded, rank, schema.BETWEEN))
        assert {row["step"] for row in between} == {2}
        assert steps[1]["end"] == steps[2]["start"] == between[0]["start"] <= mode["start"] < forward["start"]
        assert forward["end"] < mode["end"] <= between[-1]["end"] < steps[2]["end"]
        set_up = [row["name"] for row in rows(recorded, rank, schema.COLLECTIVE, step=-1)]
        assert set_up[0] == "barrier"
    summary = summarise(recorded)
    assert summary.run.framework
    assert summary.run.framework["name"] == "DDP"
    for mean in summary.ranks:
        assert all(mean.of_state[State("compute", phase)] > 0 for phase in ("forward", "backward", "optimizer"))


def test_a_loop_without_an_optimizer_has_the_steps_that_its_communication_suggests(tmp_path: Path) -> None:
    recorded = record("by_hand", tmp_path)

    assert [step for rank in recorded.ranks for step in rows(recorded, rank, schema.STEP)] == []
    summary = summarise(recorded)
    assert summary.run.steps_inferred
    assert len(summary.run.steps.used) == 2 * ITERATIONS - 1  # the first is the warm-up
    (all_reduce,) = (row for row in summary.communication if row.operation == "all_reduce")
    assert all_reduce.count == 2 * 4 * (2 * ITERATIONS - 1)  # ranks, parameters, steps


def test_a_resumed_loop_in_which_rank_0_alone_evaluates_and_saves(tmp_path: Path) -> None:
    recorded = record("resumed", tmp_path / "run", tmp_path / "saved.pt")

    for rank in recorded.ranks:  # restoring the optimizer steps it, which is no step of the loop
        assert [step["step"] for step in rows(recorded, rank, schema.STEP)] == list(range(10))
    told = summarise(recorded)
    budget = told.run_budget
    assert budget
    assert budget.ranks[0].wall_ns == budget.ranks[1].wall_ns == budget.job.wall_ns
    alone, other = budget.ranks.values()
    assert alone.evaluation_ns > 900_000_000
    assert alone.checkpoint_ns > 0
    assert other.evaluation_ns == other.checkpoint_ns == 0
    longest = told.awaited[0]
    assert longest.rank == 0
    assert longest.activities[0].activity == "evaluation"
    assert longest.activities[0].when.steps == (6,)
    assert "which was evaluating" in longest.describe()
