"""The list of findings of a job: its parts add up, and every command names the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.stragglers.list_of_findings import with_lost_time
from commtrace.cli.main import app
from commtrace.synth import Fault, Job
from tests.analysis.stragglers.analysed_jobs import analysed

FAULTS = {
    "nothing": (),
    "slow ranks": ("slow-rank=1:1.3", "data=6:20"),
    "stage": ("uneven-stage=1:1.5",),
    "sequences": ("sequence-imbalance",),
    "pauses": ("gc=2:60", "checkpoint=0:500@6:7"),
    "link": ("slow-link=2-6:6",),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_the_parts_add_up_to_the_time_beyond_the_ideal(faults: tuple[str, ...]) -> None:
    job = analysed(Job(pp=4, dp=2, steps=16, microbatches=8, faults=tuple(map(Fault.parse, faults))))
    lost = job.lost(job.slow)
    findings = with_lost_time(job.judgement, lost)

    parts = [round((one.part_ns or 0.0) * lost.num_steps) for one in findings]
    assert sum(parts) == pytest.approx(lost.steps_ns - lost.ideal_ns, abs=len(parts))
    assert sorted(one.kind for one in findings) == ["lost"] * 5 + ["slow"] * len(job.slow)
    assert all(part <= cost for one in findings if (part := one.part_ns or 0) and (cost := (one.cost_ns or 0.0) + 1))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every command answers of two jobs: one with a slow rank, one with a slow link."""
    return {
        "rank": _answers(tmp_path_factory.mktemp("rank") / "run", "slow-forward=3:1.6"),
        "link": _answers(tmp_path_factory.mktemp("link") / "run", "slow-send=2-4:8"),
    }


def _answers(path: Path, fault: str) -> dict[str, Any]:
    job = ["--pp", "2", "--dp", "4", "--num-steps", "24"] if "forward" in fault else ["--pp", "4", "--dp", "2"]
    hosts = ["--num-steps", "24", "--gpus-per-host", "2"]
    assert CliRunner().invoke(app, ["synth", "-o", str(path), *job, *hosts, "--fault", fault]).exit_code == 0
    commands = ("summary", "straggler", "bandwidth", "pipeline")
    return {name: json.loads(CliRunner().invoke(app, [name, str(path), "--json"]).stdout) for name in commands}


@pytest.mark.parametrize(("fault", "who"), [("rank", "rank 3 on node1"), ("link", "link from rank 2 on node1 to")])
def test_every_command_names_the_same_with_the_same_cost(
    answers: dict[str, dict[str, Any]], fault: str, who: str
) -> None:
    named = [
        [(one["id"], one["who"], one["cost_ns"], one["share"]) for one in answer["findings"] if one["kind"] == "slow"]
        for answer in answers[fault].values()
    ]
    assert named[0] == named[1] == named[2] == named[3]
    assert len(named[0]) == 1
    assert named[0][0][1].startswith(who)


@pytest.mark.parametrize("fault", ["rank", "link"])
def test_every_command_divides_the_lost_time_alike(answers: dict[str, dict[str, Any]], fault: str) -> None:
    parts = [
        {one["id"]: (one["part_ns"], one["share"]) for one in answer["findings"] if one["kind"] in ("slow", "lost")}
        for answer in answers[fault].values()
    ]
    assert parts[0] == parts[1] == parts[2] == parts[3]
    assert len(parts[0]) == 6
    assert all(part is not None for part, _ in parts[0].values())


def test_effects_name_their_cause(answers: dict[str, dict[str, Any]]) -> None:
    answer = answers["rank"]
    (found,) = (one for one in answer["summary"]["findings"] if one["kind"] == "slow")
    waited_for = answer["summary"]["awaited"][0]
    assert (waited_for["rank"], waited_for["because"], waited_for["next_step"]) == (3, found["id"], found["advice"])
    assert answer["bandwidth"]["because"] == found["id"]
    assert "most of that because of rank 3 on node1, slow forward." in answer["bandwidth"]["verdict"]


def test_a_slow_link_that_bandwidth_alone_does_not_show_is_named_by_its_command(
    answers: dict[str, dict[str, Any]],
) -> None:
    verdict = answers["link"]["bandwidth"]["verdict"]
    assert verdict.startswith("Link from rank 2 on node1 to rank 4 on node2 slows communication: ")
    assert "No slow link" not in verdict
