"""cli/ended_command.py: what ``commtrace run`` says once its command has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.cli.ended_command import EndedCommand, tell
from commtrace.cli.ending import ending_lines
from commtrace.synth import Fault, Job, synthesize, write
from tests.trace.rows import steps, write_rank


@pytest.mark.parametrize(("exit_code", "following"), [(0, "summary"), (1, "doctor"), (137, "doctor")])
def test_after_a_command_that_failed_the_doctor_is_next(tmp_path: Path, exit_code: int, following: str) -> None:
    run = tmp_path / "gpt"
    write_rank(run, steps(0, 4))
    ended = EndedCommand({run / "rank-00000": False}, 0, {"COMMTRACE_DIR": str(run)}, exit_code)

    lines = tell(ended)
    last = lines[-1]

    assert [line for line in lines if line.startswith("Run r1 · ")]
    assert last.startswith("Next: ")
    assert last.endswith(f"commtrace {following} {run}")


@pytest.mark.parametrize(("fault", "first"), [("slow-rank=1:2", "rank 1 on node0, compute: "), ("", "exposed comm")])
def test_a_job_that_ended_says_its_findings_in_three_lines(fault: str, first: str, tmp_path: Path) -> None:
    run = tmp_path / "gpt"
    job = Job(dp=4, steps=20, faults=(Fault.parse(fault),) if fault else ())
    write(synthesize(job), run)

    lines = ending_lines(run, seconds=60)

    assert len(lines) <= 3
    assert lines[0].startswith("Run gpt · ended · 4 ranks on node0 · 19 steps of ")
    assert lines[1].startswith(f"1. {first}")


def test_of_a_long_job_the_newest_steps_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commtrace.cli.newest_steps._STEPS_OF_RANKS", 60)
    write(synthesize(Job(dp=4, steps=40, faults=(Fault.parse("slow-rank=1:2@0:20"),))), tmp_path / "gpt")

    title, *found = ending_lines(tmp_path / "gpt", seconds=60)

    assert " · 15 steps of " in title
    assert not any("rank 1" in line for line in found)


def test_a_job_whose_findings_take_long_and_one_that_cannot_be_read_end_without_them(tmp_path: Path) -> None:
    write(synthesize(Job(dp=4, steps=20)), tmp_path / "gpt")

    assert ending_lines(tmp_path / "gpt", seconds=0) == []
    assert ending_lines(tmp_path / "nothing") == []
