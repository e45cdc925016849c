"""Every command that prints numbers of a run says what they rest on: the clocks' residual, and what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.cli.commands.test_summary import write_run
from tests.pipeline_factory import Clock, PipelineJob

runner = CliRunner()
COMMANDS = ("straggler", "pipeline", "bandwidth")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    job = PipelineJob(2, 4, nodes={0: "a", 1: "b"}, clocks={"b": Clock(10**9, 30.0)}, steps=10)
    return write_run(tmp_path / "run", job.run())


def words(*arguments: str | Path) -> str:
    return " ".join(runner.invoke(app, [str(one) for one in arguments]).output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_residual_of_the_clocks_stands_above_the_numbers(recorded: Path, command: str) -> None:
    assert "Clocks: collective ends, 10 observations, residual" in words(command, recorded)
    told = json.loads(words(command, recorded, "--json"))
    assert told["alignment"]["residual_ns"]["p99"] < 20_000
    assert told["problems"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_rank_without_files_is_told(tmp_path: Path, command: str) -> None:
    directory = write_run(tmp_path, PipelineJob(2, 4, data_parallel=2, steps=10).run())
    shutil.rmtree(directory / "rank-00003")
    assert "! 1 of 4 ranks have no readable files: 3." in words(command, directory)
    problems = json.loads(words(command, directory, "--json"))["problems"]
    assert [problem for problem in problems if "no readable files: 3" in problem]


def test_compare_tells_it_of_either_side(recorded: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", PipelineJob(2, 4, nodes={0: "a", 1: "b"}, steps=10).run())
    shown = words("compare", recorded, other)
    assert f"{recorded}: Clocks: collective ends" in shown
    assert f"{other}: Clocks: collective ends" in shown
    told = json.loads(words("compare", recorded, other, "--json"))
    assert [side[0]["alignment"]["method"] for side in told["basis"].values()] == ["collective ends"] * 2


def test_export_tells_how_well_the_clocks_agree(recorded: Path, tmp_path: Path) -> None:
    assert "note: the hosts' clocks agree to" in words("export", recorded, "-o", tmp_path / "trace")


@pytest.mark.parametrize("jump_ms", [-600, -300, -190])
def test_a_clock_that_is_stepped_back_by_about_a_step_costs_that_step_at_most(tmp_path: Path, jump_ms: int) -> None:
    """Steps of 183 ms: what was read in the step of the jump may be of either side of it."""
    options = "--pp 4 --dp 4 --num-steps 12 --gpus-per-host 4 --clock-offset 3 --clock-drift 5 --fault slow-rank=3:1.3"
    words("synth", "-o", tmp_path / "run", *options.split(), "--clock-step", f"1={jump_ms}@1")
    told = json.loads(words("summary", tmp_path / "run", "--json"))
    assert told["run"]["steps"]["count"] >= 10
    assert [one["rank"] for one in told["stragglers"]] == [3]
    assert told["alignment"]["residual_ns"]["p99"] < 20_000
