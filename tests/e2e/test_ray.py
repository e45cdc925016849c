"""Actors of Ray, which ends them by killing them: options that reach them, and how their end is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.e2e.launch import REPOSITORY, Completed, run

pytest.importorskip("ray", reason="ray is not installed")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "ray_actors.py"

pytestmark = pytest.mark.e2e


def trained(*words: object, folder: Path) -> Completed:
    """Run the actors, with ``folder`` as their home; Ray may take a minute to start."""
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "COMMTRACE_DIR": str(folder / "default"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": "/tmp",
    }
    completed = run([sys.executable, str(PROGRAM), *map(str, words)], environment, timeout=150)
    assert completed.returncode == 0, completed.stdout
    return completed


def diagnosed(directory: Path) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["doctor", str(directory), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_actors_that_ray_kills_when_they_are_done_have_not_crashed(how: str, tmp_path: Path) -> None:
    trained(how, tmp_path / "run", folder=tmp_path)

    code, diagnosis = diagnosed(tmp_path / "run")
    assert (code, diagnosis["findings"]) == (0, [])
    assert [(rank["state"], rank["launcher"]) for rank in diagnosis["ranks"]] == [("ended", "ray")] * 2
    assert any(
        note.startswith("The files of ranks 0–1 have no end: Ray kills its actors") for note in diagnosis["notes"]
    )
    assert [rank["collectives"] for rank in diagnosis["ranks"]] == [50, 50]


@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_actors_that_end_by_themselves_write_everything(how: str, tmp_path: Path) -> None:
    trained(how, tmp_path / "run", folder=tmp_path)

    code, diagnosis = diagnosed(tmp_path / "run")
    assert (code, diagnosis["findings"]) == (0, [])
    assert [(rank["launcher"], rank["collectives"]) for rank in diagnosis["ranks"]] == [(None, 50)] * 2


def test_an_actor_that_crashes_is_named(tmp_path: Path) -> None:
    trained("crash", tmp_path / "run", folder=tmp_path)

    code, diagnosis = diagnosed(tmp_path / "run")
    assert code == 1
    assert diagnosis["ranks"][1]["launcher"] is None
    assert "rank 1" in diagnosis["findings"][0]["evidence"]


def test_variables_reach_actors_by_their_runtime_environment(tmp_path: Path) -> None:
    trained("destroy", tmp_path / "run", "runtime_env", folder=tmp_path)

    assert diagnosed(tmp_path / "run")[0] == 0
    assert not (tmp_path / "default").exists()


def test_a_variable_that_is_set_too_late_is_said_to_have_no_effect(tmp_path: Path) -> None:
    completed = trained("destroy", tmp_path / "run", "late", folder=tmp_path)

    assert "COMMTRACE_DIR changed after the options had been read, and has no effect" in completed.stdout
    assert "Variables reach workers of Ray by ray.init(runtime_env=" in completed.stdout
    assert diagnosed(tmp_path / "default")[0] == 0
