"""Open MPI's mpirun over ssh to another node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, execute, recipe
from tests.e2e.launchers.runs import ALLOWED, assert_live, live_environment, on_nodes, recorded

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun missing: apt-get install openmpi-bin"),
    pytest.mark.usefixtures("sshd"),
]


def test_commtrace_run_behind_mpirun(two_nodes: list[Node], tmp_path: Path) -> None:
    _train("mpirun", two_nodes, tmp_path, "")


@pytest.mark.long
def test_commtrace_run_before_mpirun(two_nodes: list[Node], tmp_path: Path) -> None:
    _train("mpirun-before", two_nodes, tmp_path, "")


@pytest.mark.long
def test_an_import_in_the_script(two_nodes: list[Node], tmp_path: Path) -> None:
    _train("mpirun-import", two_nodes, tmp_path, "--auto")


def _train(name: str, nodes: list[Node], tmp_path: Path, option: str) -> None:
    live = live_environment(tmp_path)
    forwarded = " ".join(f"-x {variable}" for variable in live)
    script = recipe(
        "launchers.md",
        name,
        {
            "node0:8,node1:8": f"node0:2,node1:1 {forwarded}",
            "/shared/runs/gpt": tmp_path / "run",
            "train.py": f"{FEW_STEPS} {option} --targets {tmp_path / 'targets'}",
        },
    )
    completed = execute(nodes[0], script, tmp_path, {**ALLOWED, **live})
    assert completed.returncode == 0, completed.stdout

    run = recorded(tmp_path / "run")
    assert (run.attempt, run.places) == (0, on_nodes(2, 1))
    assert_live(tmp_path, run)
