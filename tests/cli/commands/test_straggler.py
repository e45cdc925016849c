"""The commands ``straggler`` and ``pipeline`` on a job whose answers are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.clocks.time_of_day import iso_utc
from commtrace.cli.main import app
from commtrace.synth import Fault, Job, synthesize, write
from tests.factory import make_run, span
from tests.findings.reading import in_json
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()

KEYS = {"S", "S_by_operation", "S_by_stage", "S_by_dp_rank", "S_by_worker", "M_W", "M_S", "launch_slowdown", "findings"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_run(tmp_path, PipelineJob(2, 4, steps=6).run())


def test_straggler_tells_the_slowdown_as_json(recorded: Path) -> None:
    result = runner.invoke(app, ["straggler", str(recorded), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert set(answer) >= KEYS
    assert answer["S"] == pytest.approx(1.0)
    assert set(answer["S_by_stage"]) == {"0", "1"}
    assert in_json(answer) == []


def test_straggler_says_in_words_when_there_is_nothing_to_compare(recorded: Path) -> None:
    result = runner.invoke(app, ["straggler", str(recorded), "--details"])
    assert result.exit_code == 0, result.output
    assert "S = 1.000" in result.output
    assert result.output.index("Not judged") < result.output.index("S = 1.000")
    assert "Not judged: Ranks were not compared" in result.output


def test_pipeline_prints_the_same_as_its_json(recorded: Path) -> None:
    answer = json.loads(runner.invoke(app, ["pipeline", str(recorded), "--json"]).output)
    assert (answer["schedule"], answer["stages"], answer["microbatches"]) == ("1f1b", 2, 4)
    shown = runner.invoke(app, ["pipeline", str(recorded)]).output
    assert "Pipeline: 1f1b, 2 stages, 4 microbatches; idle" in shown
    assert "(theoretical 1f1b bubble 20%)" in " ".join(shown.split())


def test_a_run_without_a_pipeline_says_so(tmp_path: Path) -> None:
    run = make_run({0: [span("step", 0, 10, step=0)]})
    result = runner.invoke(app, ["pipeline", str(write_run(tmp_path, run))])
    assert result.exit_code == 0, result.output
    assert "has no pipeline" in result.output


def test_a_run_without_steps_cannot_be_compared(tmp_path: Path) -> None:
    run = make_run({0: [span("forward", 0, 10, step=0)]})
    result = runner.invoke(app, ["straggler", str(write_run(tmp_path, run))])
    assert result.exit_code == 2
    assert "No step was recorded in full" in result.output


def _synthesized(path: Path, *faults: str, num_steps: int = 20) -> str:
    options = [part for fault in faults for part in ("--fault", fault)]
    result = runner.invoke(app, ["synth", "-o", str(path), "--dp", "8", "--num-steps", str(num_steps), *options])
    assert result.exit_code == 0, result.output
    return str(path)


@pytest.mark.parametrize("command", ["summary", "straggler"])
def test_there_is_one_cause_and_one_advice(tmp_path: Path, command: str) -> None:
    run = _synthesized(tmp_path / "run", "slow-rank=1:1.5")

    shown = " ".join(runner.invoke(app, [command, run]).output.split())

    assert "Waited for most: rank 1 (100% of all waiting), named above." in shown
    assert "Balance the ranks" not in shown
    assert "Look at the device" in shown


def test_a_cost_and_a_slowdown_against_the_mean_are_told_apart(tmp_path: Path) -> None:
    """The mean of the same work has the slow rank in it, so the others are below it."""
    job = Job(pp=4, dp=2, steps=20)
    write(synthesize(replace(job, faults=(Fault.parse("slow-rank=3:1.3"),))), tmp_path / "slow")
    write(synthesize(job), tmp_path / "well")
    runs = (str(tmp_path / name) for name in ("slow", "well"))
    of_slow, of_well = (" ".join(runner.invoke(app, ["straggler", run, "--details"]).output.split()) for run in runs)
    said = "Ideal is the mean of the same work, slow ranks included; a cost compares with the other ranks only."

    assert f"mean of 19 steps {said} Ideal durations on the slowest, rank 3, would recover 11" in of_slow
    assert "More than 100%: the others keep what they have below the mean." in of_slow
    assert said not in of_well
    assert "More than 100%" not in of_well


def test_the_advice_on_several_ranks_is_in_the_plural(tmp_path: Path) -> None:
    run = _synthesized(tmp_path / "run", "slow-rank=1:1.5", "slow-rank=6:1.5")

    (verdict,) = in_json(json.loads(runner.invoke(app, ["straggler", run, "--json"]).output))

    assert len(verdict["members"]) == 2
    assert verdict["advice"].startswith("Look at the devices of these ranks while the job runs")


def test_a_run_in_which_the_job_was_well_tells_who_is_slow_where_most_ranks_are(tmp_path: Path) -> None:
    slow = _synthesized(tmp_path / "slow", *(f"slow-rank={rank}:1.3" for rank in range(5)))
    well = _synthesized(tmp_path / "well")

    alone = json.loads(runner.invoke(app, ["straggler", slow, "--json"]).output)
    compared = json.loads(runner.invoke(app, ["straggler", slow, "--baseline", well, "--json"]).output)

    assert in_json(alone) == []
    (verdict,) = in_json(compared)
    assert verdict["who"] == "ranks 0–4 on node0"
    assert verdict["cost_ns"] == compared["together_ns"] == pytest.approx(28.8e6, rel=0.05)


def test_the_first_slow_step_is_named_although_too_few_come_before_it_to_be_a_stretch(tmp_path: Path) -> None:
    late = runner.invoke(app, ["straggler", _synthesized(tmp_path / "late", "slow-rank=3:1.5@4:12", num_steps=12)])
    always = runner.invoke(app, ["straggler", _synthesized(tmp_path / "always", "slow-rank=3:1.5", num_steps=12)])

    assert "Since step 4, 2023-11-14" in late.output
    assert "Since the first step that was compared." in always.output


def test_since_when_a_rank_is_slow_is_printed(tmp_path: Path) -> None:
    run = _synthesized(tmp_path / "run", "slow-rank=3:1.5@10:20")

    shown = " ".join(runner.invoke(app, ["straggler", run]).output.split())
    assert "In steps 10–19, 2023-11-14 22:13:22–22:13:24 UTC (49" in shown
    assert "ms of each)." in shown
    answer = in_json(json.loads(runner.invoke(app, ["straggler", run, "--json"]).output))[0]
    (stretch,) = answer["stretches"]
    assert (answer["since_step"], answer["since_ns"]) == (10, stretch["since_ns"])
    assert iso_utc(stretch["since_ns"]).startswith("2023-11-14T22:13:22.")
    assert stretch["until_ns"] > stretch["since_ns"]


def test_the_share_of_each_of_several_slow_ranks_is_printed(tmp_path: Path) -> None:
    shown = runner.invoke(
        app, ["straggler", _synthesized(tmp_path / "run", "slow-rank=3:1.5", "slow-rank=1:1.4")]
    ).output
    shown = " ".join(shown.split())

    assert "1. ranks 1, 3 on node0, compute: 49" in shown
    assert "Cost of each rank in ms per step if the others are fixed (saved if only it is): rank 3 4" in shown
