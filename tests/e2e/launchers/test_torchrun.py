"""torchrun on one node and on two: static and c10d rendezvous, a restart, and disks that are not shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, execute, execute_on_all, recipe
from tests.e2e.launchers.runs import (
    Place,
    Recorded,
    assert_live,
    live_environment,
    recorded,
    two_nodes_of_two,
)

pytestmark = pytest.mark.e2e


def test_one_node(two_nodes: list[Node], tmp_path: Path) -> None:
    script = recipe("launchers.md", "torchrun-one-node", {"8": "2", "train.py": FEW_STEPS})
    completed = execute(two_nodes[0], script, tmp_path)
    assert completed.returncode == 0, completed.stdout

    (directory,) = (tmp_path / "commtrace-runs").glob("2*")
    run = recorded(directory)
    assert run.run_id == directory.name
    assert run.places == {0: Place("node0", 0), 1: Place("node0", 1)}


def test_rendezvous_by_c10d_names_the_run_and_a_restart_is_an_attempt(two_nodes: list[Node], tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    own = {
        "--nproc-per-node 8": "--nproc-per-node 2 --max-restarts 1",
        "/shared/runs/gpt": tmp_path / "run",
        "train.py": f"{FEW_STEPS} --fail-once {tmp_path / 'failed'} --targets {targets}",
    }
    # The agents' store outlives the attempt, and gloo finds the addresses of the attempt before in it.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **live_environment(tmp_path)}
    execute_on_all(two_nodes, recipe("launchers.md", "torchrun-c10d", own), tmp_path, environment)

    run = recorded(tmp_path / "run", earlier_attempts=True)
    assert run == Recorded("gpt", 1, two_nodes_of_two())
    assert_live(tmp_path, run)


def test_a_static_rendezvous_on_disks_of_their_own(two_nodes: list[Node], sshd: None, tmp_path: Path) -> None:
    own = {
        "--nproc-per-node 8": "--nproc-per-node 2",
        "/shared/runs/gpt": two_nodes[0].disk / "static",
        "train.py": f"{FEW_STEPS} --targets {tmp_path / 'targets'}",
    }
    script = recipe("launchers.md", "torchrun-static", own)
    execute_on_all(two_nodes, script, tmp_path, live_environment(tmp_path))

    collect = recipe("slurm.md", "collect-rsync", {"/local/runs/gpt": two_nodes[0].disk / "static"})
    completed = execute(two_nodes[0], collect, tmp_path)
    assert completed.returncode == 0, completed.stdout
    run = recorded(tmp_path / "gpt")
    assert run.places == two_nodes_of_two()
    assert_live(tmp_path, run)
