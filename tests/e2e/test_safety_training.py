"""Training computes the same bits whether it is recorded or not; workers, restarts and windows mix nothing up."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork, launch, run
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAMS = REPOSITORY / "tests" / "e2e" / "programs"
TRAINING = PROGRAMS / "seeded_training.py"
FORKED = "fork,fork,fork"
EVERY_WAY = "fork,spawn,forkserver"
"""To start the workers that load data. The last two import torch anew, which takes seconds of a core."""
BROADCASTS = 4
REDUCTIONS = 5
BARRIERS = 1


def digests(output: str) -> dict[int, str]:
    return {int(rank): digest for rank, digest in re.findall(r"rank (\d) computed (\w{64})", output)}


def test_results_are_bitwise_equal_and_a_window_records_exactly_its_steps(tmp_path: Path) -> None:
    plain = fork([TRAINING, "12", FORKED], 2, {"COMMTRACE_ENABLED": "0", "COMMTRACE_DIR": str(tmp_path)}, timeout=120)
    assert plain.returncode == 0, plain.stdout
    assert list(tmp_path.iterdir()) == []

    environment = {"COMMTRACE_STEPS": "3:10:2", "COMMTRACE_DIR": str(tmp_path)}
    recorded = fork([TRAINING, "12", EVERY_WAY], 2, environment, timeout=120)

    assert recorded.returncode == 0, recorded.stdout
    assert sorted(digests(plain.stdout)) == [0, 1]
    assert digests(recorded.stdout) == digests(plain.stdout)
    told = [line for line in recorded.stdout.splitlines() if "commtrace" in line]
    assert [line.partition(" to ")[0] for line in told] == ["commtrace: recording"]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert files == ["rank-00000/spans-0000.arrows", "rank-00001/spans-0000.arrows", "world-0000.json"]
    assert_window_is_recorded(tmp_path)


def assert_window_is_recorded(directory: Path) -> None:
    trace = load_run(directory)
    assert trace.problems == ()
    assert [(each.metadata.node, each.closed) for each in trace.ranks.values()] == [("node-0", True), ("node-1", True)]
    for rank in trace.ranks:
        assert [row["step"] for row in rows(trace, rank, schema.STEP)] == [3, 5, 7, 9]
        collectives = [(row["step"], row["seq"]) for row in rows(trace, rank, schema.COLLECTIVE)]
        assert collectives == [
            (step, BROADCASTS + step * (REDUCTIONS + BARRIERS) + number)
            for step in (3, 5, 7, 9)
            for number in range(REDUCTIONS)
        ]
        assert [row["step"] for row in rows(trace, rank, schema.OPTIMIZER)] == [3, 5, 7, 9]
        assert list(rows(trace, rank, schema.USER)) == []


def test_a_restarted_job_shows_its_newest_attempt_and_keeps_the_killed_one(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]

    completed = run(
        [*torchrun, str(TRAINING), "10", FORKED, "6"], {"COMMTRACE_DIR": str(tmp_path / "run")}, timeout=150
    )

    assert completed.returncode == 0, completed.stdout
    newest = load_run(tmp_path / "run")
    assert newest.any_metadata.attempt == 1
    assert [row["step"] for row in rows(newest, 0, schema.STEP)] == list(range(10))
    assert all(trace.closed for trace in newest.ranks.values())
    assert list(rows(newest, 0, schema.USER)) == []  # the spans of data loading workers, which are no ranks
    (problem,) = newest.problems
    assert problem.startswith("2 segments of other runs or attempts in the same directory were left out")
    assert problem.endswith("attempt 2.")
    assert_killed_attempt_is_readable(tmp_path / "run", tmp_path / "killed")


def assert_killed_attempt_is_readable(directory: Path, copy: Path) -> None:
    for segment in directory.glob("*/spans-0000.arrows"):
        (copy / segment.parent.name).mkdir(parents=True)
        shutil.copy(segment, copy / segment.parent.name)
    killed = load_run(copy)
    assert killed.any_metadata.attempt == 0
    assert sorted(killed.ranks) == [0, 1]
    assert not killed.ranks[1].closed
    assert [row["step"] for row in rows(killed, 1, schema.STEP)] == list(range(6))


def test_a_rank_may_end_while_a_communication_is_under_way(tmp_path: Path) -> None:
    completed = launch([PROGRAMS / "leaves_early.py"], 2, {"COMMTRACE_DIR": str(tmp_path)}, timeout=90)

    assert completed.returncode == 0, completed.stdout
    trace = load_run(tmp_path)
    assert trace.problems == ()
    for rank in (0, 1):
        assert [row["name"] for row in rows(trace, rank, schema.COLLECTIVE)] == ["barrier", "all_reduce"]
        assert trace.ranks[rank].closed
