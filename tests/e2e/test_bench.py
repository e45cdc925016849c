"""The self-test of what recording costs, on a job that does not know of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.comparison.overhead import Measured
from commtrace.cli.commands.bench_overhead import _with_recording
from commtrace.cli.main import app
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY
from tests.two_ranks import write_two_ranks

pytestmark = pytest.mark.e2e

PROGRAM = str(REPOSITORY / "tests" / "e2e" / "programs" / "small_training.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]


def test_a_job_is_run_with_and_without_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("COMMTRACE_ENABLED", "0")  # a user's own switch is not the bench's
    result = CliRunner().invoke(app, ["bench", "overhead", "--pairs", "1", "--json", "--", *TORCHRUN, PROGRAM])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)

    assert (told["clock"], told["pairs"]) == ("optimizer", 1)
    assert told["step_time"]["with"] > 0
    assert told["step_time"]["ratio"]["median"] == pytest.approx(
        told["step_time"]["with"] / told["step_time"]["without"], 0.01
    )
    recorded = told["recorded"]
    assert recorded["steps"] >= 20
    assert recorded["spans_per_step"] >= 4
    assert recorded["bytes_per_span"] > 0
    assert recorded["dropped"] == {}
    assert told["memory_bytes"]["max"] > 0
    assert list(tmp_path.iterdir()) == []


def test_recorded_spans_and_bytes_of_all_ranks_are_added_up(tmp_path: Path) -> None:
    run = write_two_ranks(tmp_path, steps=3)

    measured = _with_recording(Measured(0, 0, []), run)

    assert measured.steps == 2 * 3
    assert measured.spans == sum(len(trace.spans) for trace in load_run(run).ranks.values())
    assert measured.num_bytes == sum(path.stat().st_size for path in run.glob("rank-*/*"))


def test_a_command_that_fails_is_said_with_its_last_words() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such data')"]
    result = CliRunner().invoke(app, ["bench", "overhead", "--pairs", "1", "--", *command])

    assert result.exit_code == 2
    assert "the command ended with 1" in result.output
    assert "no such data" in result.output
