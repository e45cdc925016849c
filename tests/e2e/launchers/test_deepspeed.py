"""DeepSpeed's launcher over ssh: by pdsh and by Open MPI."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, execute, recipe
from tests.e2e.launchers.runs import ALLOWED, assert_live, live_environment, on_nodes, recorded

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.usefixtures("sshd")]

CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh missing: apt-get install pdsh")
def test_options_of_commtrace_run_reach_the_other_node_by_pdsh(two_nodes: list[Node], tmp_path: Path) -> None:
    _train("deepspeed-pdsh", two_nodes, tmp_path, "", {})


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun missing: apt-get install openmpi-bin")
def test_an_import_and_the_environment_file_by_open_mpi(two_nodes: list[Node], tmp_path: Path) -> None:
    variables = "".join(f"{name}={value}\n" for name, value in {**CPU, **live_environment(tmp_path)}.items())
    _train(
        "deepspeed-openmpi", two_nodes, tmp_path, "--auto", {"MASTER_PORT=29500\n": f"MASTER_PORT=29500\n{variables}"}
    )


def _train(name: str, nodes: list[Node], tmp_path: Path, option: str, own: dict[str, str]) -> None:
    (tmp_path / "hostfile").write_text(f"{nodes[0].name} slots=2\n{nodes[1].name} slots=1\n")
    places = {
        "/shared/runs/gpt": tmp_path / "run",
        "train.py": f"{FEW_STEPS} {option} --targets {tmp_path / 'targets'}",
    }
    script = recipe("launchers.md", name, {**places, **own})
    completed = execute(nodes[0], script, tmp_path, {**CPU, **ALLOWED, **live_environment(tmp_path)})
    assert completed.returncode == 0, completed.stdout

    run = recorded(tmp_path / "run")
    assert (run.attempt, run.places) == (0, on_nodes(2, 1)), completed.stdout
    assert_live(tmp_path, run)
