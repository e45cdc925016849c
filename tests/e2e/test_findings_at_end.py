"""Rank 0 of a job that only imports commtrace.auto says at its end what was found, and never ends otherwise for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.launch import REPOSITORY, Completed, fork, launch, run

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "says_findings.py"
STEPS = 20
PATIENT = "60"
"""The machine of these tests may be busy."""


def train(directory: Path, how: str, *, seconds: str = PATIENT, steps: int = STEPS, ranks: int = 2) -> Completed:
    env = {"COMMTRACE_DIR": str(directory), "COMMTRACE_FINDINGS_SECONDS": seconds}
    return fork([PROGRAM, how, str(steps)], ranks, env, timeout=120)


def said(completed: Completed) -> Sequence[str]:
    """What was printed, without the first line of commtrace's and the program's own lines."""
    lines = completed.stdout.splitlines()
    assert len([line for line in lines if "recording to" in line]) == 1
    return [line for line in lines if "recording to" not in line and line != "loss 1.0"]


def assert_tells_of_the_late_rank(lines: Sequence[str], ranks: int, state: str = "ended") -> None:
    assert len(lines) in (3, 4), lines
    assert lines[0].startswith("commtrace: Run ")
    assert f" · {state} · {ranks} ranks on " in lines[0]
    assert f" · {STEPS - 1} steps of " in lines[0]
    assert lines[1].startswith("1. rank 1 on ")
    assert lines[-1].startswith("Next: ")
    assert " summary /" in lines[-1]


@pytest.mark.parametrize("how", ["returns", "sys_exit", "os_exit", "leaves_a_child"])
def test_rank_0_says_its_findings_however_it_ends_well(tmp_path: Path, how: str) -> None:
    completed = train(tmp_path / "run", how)

    assert completed.returncode == 0, completed.stdout
    assert completed.stdout.count("loss 1.0") == 2
    assert_tells_of_the_late_rank(said(completed), ranks=2)


def test_below_torchrun_and_with_four_ranks(tmp_path: Path) -> None:
    env = {"COMMTRACE_DIR": str(tmp_path / "run"), "COMMTRACE_FINDINGS_SECONDS": PATIENT}
    completed = launch([PROGRAM, "returns", str(STEPS)], 4, env)

    assert completed.returncode == 0, completed.stdout
    lines = [
        line for line in completed.stdout.splitlines() if line.startswith(("commtrace: Run ", "1. ", "2. ", "Nex"))
    ]
    assert_tells_of_the_late_rank(lines, ranks=4)


def test_of_ranks_that_go_on_it_is_said_that_they_have_not_ended(tmp_path: Path) -> None:
    completed = train(tmp_path / "run", "others_go_on", ranks=3)

    assert completed.returncode == 0, completed.stdout
    title, *found = said(completed)
    assert " · ended on 1 of 3 ranks so far · 3 ranks on " in title
    assert found[0].startswith("1. ")


@pytest.mark.parametrize(
    ("how", "returncode"),
    [("raises", 1), ("another_fails", 1), ("terminated", 1), ("closes_stderr", 0), ("replaces_stderr", 0)],
)
def test_of_a_job_that_fails_and_where_nobody_reads_nothing_is_said(tmp_path: Path, how: str, returncode: int) -> None:
    completed = train(tmp_path / "run", how)

    assert completed.returncode == returncode, completed.stdout
    assert "commtrace: Run " not in completed.stdout


@pytest.mark.parametrize(("seconds", "steps"), [("0", STEPS), (PATIENT, 5)])
def test_nothing_is_said_if_it_is_switched_off_or_the_job_was_short(tmp_path: Path, seconds: str, steps: int) -> None:
    completed = train(tmp_path / "run", "returns", seconds=seconds, steps=steps)

    assert completed.returncode == 0, completed.stdout
    assert said(completed) == []


def test_below_commtrace_run_it_is_said_once(tmp_path: Path) -> None:
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    command = [sys.executable, "-m", "commtrace", "run", "-o", str(tmp_path / "run"), "--", *job, "returns", "20"]
    completed = run(command, {"COMMTRACE_FINDINGS_SECONDS": PATIENT})

    assert completed.returncode == 0, completed.stdout
    assert completed.stdout.count("Next: ") == 1


def test_findings_at_the_end_hang_no_job(tmp_path: Path) -> None:
    """Jobs that end in all ways, with the usual patience: each ends as it does without the findings."""
    ways = ("returns", "sys_exit", "os_exit", "leaves_a_child", "others_go_on", "closes_stderr")
    for number in range(2 * len(ways)):
        completed = train(tmp_path / str(number), ways[number % len(ways)], seconds="3")

        assert not completed.timed_out, completed.stdout
        assert completed.returncode == 0, completed.stdout
        assert completed.stdout.count("loss 1.0") == 2
