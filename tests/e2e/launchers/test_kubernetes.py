"""A Kubeflow PyTorchJob, as far as its processes can tell: pods with the variables that the training operator sets.

They are those of pkg/controller.v1/pytorch (envvar.go, master.go, elastic.go) of kubeflow/training-operator 1.8.
"""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, PATH, recipe
from tests.e2e.launchers.runs import Recorded, assert_live, live_environment, on_nodes, recorded

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_a_torchrun_in_every_pod(two_nodes: list[Node], tmp_path: Path) -> None:
    _run_pods(two_nodes, tmp_path, "pytorchjob", 2)

    run = recorded(tmp_path / "runs" / "gpt")
    assert run == Recorded("gpt", 0, on_nodes(2, 2))
    assert_live(tmp_path, run)


def test_a_process_in_every_pod(two_nodes: list[Node], tmp_path: Path) -> None:
    _run_pods(two_nodes, tmp_path, "pytorchjob-python", 1)

    run = recorded(tmp_path / "runs" / "gpt")
    assert run == Recorded("gpt", 0, on_nodes(1, 1))
    assert_live(tmp_path, run)


def _run_pods(nodes: list[Node], tmp_path: Path, name: str, processes: int) -> None:
    yaml = pytest.importorskip("yaml")
    own = {"/runs": tmp_path / "runs", "train.py": f'{FEW_STEPS}", "--targets", "{tmp_path / "targets"}'}
    manifest = yaml.safe_load(recipe("kubernetes.md", name, own))
    if "spec" in manifest:
        replicas = manifest["spec"]["pytorchReplicaSpecs"]
        commands = [replicas[kind]["template"]["spec"]["containers"][0]["command"] for kind in ("Master", "Worker")]
    else:
        commands = [manifest["command"]] * 2
    with ThreadPoolExecutor(len(nodes)) as pool:
        environments = [_operators_variables(index, len(nodes), processes) for index in range(len(nodes))]
        running = [
            pool.submit(node.run, command, {**live_environment(tmp_path), **variables}, 240.0)
            for node, command, variables in zip(nodes, commands, environments, strict=True)
        ]
        completed = [job.result() for job in running]
    for one, command in zip(completed, commands, strict=True):
        assert one.returncode == 0, f"{shlex.join(command)}\n" + "\n".join(other.stdout for other in completed)


def _operators_variables(index: int, pods: int, processes: int) -> dict[str, str]:
    """Of one pod: rank and world size are those of the pods where each has one process, and torchrun's are beside."""
    return {
        "PATH": PATH,
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "23456",
        "RANK": str(index),
        "WORLD_SIZE": str(pods * processes),
        "PET_MASTER_ADDR": "node0",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": str(processes),
        "PET_NNODES": str(pods),
        "PET_NODE_RANK": str(index),
    }
