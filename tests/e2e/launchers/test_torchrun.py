"""torchrun on one node and on two: static and c10d rendezvous, a restart, and disks that are not shared."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from commtrace.trace.files.reader import load_run
from tests.e2e.launch import run
from tests.e2e.launchers.nodes import Node
from tests.e2e.launchers.recipes import FEW_STEPS, PATH, execute, execute_on_all, recipe
from tests.e2e.launchers.runs import Recorded, assert_live, live_environment, on_nodes, recorded

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

KNOWS_NOTHING_OF_COMMTRACE = """
import torch
import torch.distributed

torch.distributed.init_process_group("gloo")
for _ in range(3):
    torch.distributed.all_reduce(torch.ones(1000))
torch.distributed.destroy_process_group()
"""


def test_one_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KNOWS_NOTHING_OF_COMMTRACE)
    script = recipe("launchers.md", "torchrun-one-node", {"8": "2"})
    began = time.time_ns()
    completed = run(["bash", "-e", "-c", f"cd {tmp_path}\n{script}"], {"PATH": PATH})
    assert completed.returncode == 0, completed.stdout

    (directory,) = (tmp_path / "commtrace-runs").glob("2*")
    told = completed.stdout.partition(f"commtrace: recorded 2 ranks in {directory}\n")[2]
    *_, following = told.strip().splitlines()
    assert following == f"Next: commtrace summary {directory}"
    made = load_run(directory)
    assert made.problems == ()
    assert (list(made.ranks), made.world_size, made.any_metadata.run_id) == ([0, 1], 2, directory.name)
    for rank, trace in made.ranks.items():
        assert (trace.metadata.host, trace.metadata.local_rank) == (socket.gethostname(), rank)
        communication = trace.spans.bytes[trace.spans.bytes >= 0]
        assert communication.tolist().count(4000) == 3
        assert trace.metadata.session > began
    # One file per rank: the launcher, which imports torch too, wrote none.
    assert sorted(str(path.relative_to(directory)) for path in directory.glob("*/*")) == [
        "rank-00000/spans-0000.arrows",
        "rank-00001/spans-0000.arrows",
    ]


def test_rendezvous_by_c10d_names_the_run_and_a_restart_is_an_attempt_of_all_nodes(
    two_nodes: list[Node], tmp_path: Path
) -> None:
    """The rank of the second node fails."""
    targets = tmp_path / "targets"
    own = {
        "--nproc-per-node 8": "--nproc-per-node 1 --max-restarts 2",
        "/shared/runs/gpt": tmp_path / "run",
        "train.py": f"{FEW_STEPS} --fail-once {tmp_path / 'failed'} --targets {targets}",
    }
    # The agents' store outlives the attempt, and gloo finds the addresses of the attempt before in it.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **live_environment(tmp_path)}
    completed = execute_on_all(two_nodes, recipe("launchers.md", "torchrun-c10d", own), tmp_path, environment)

    assert all(f"commtrace: recorded 1 rank in {tmp_path / 'run'}\n" in one.stdout for one in completed)
    found = recorded(tmp_path / "run", earlier_attempts=True)
    assert found == Recorded("gpt", 1, on_nodes(1, 1))
    assert_live(tmp_path, found)


def test_a_static_rendezvous_on_disks_of_their_own(two_nodes: list[Node], sshd: None, tmp_path: Path) -> None:
    local = two_nodes[0].disk / "static"
    own = {
        "--nproc-per-node 8": "--nproc-per-node 1",
        "/shared/runs/gpt": local / "{run_id}",
        "train.py": f"{FEW_STEPS} --targets {tmp_path / 'targets'}",
    }
    script = recipe("launchers.md", "torchrun-static", own)
    completed = execute_on_all(two_nodes, script, tmp_path, live_environment(tmp_path))

    made = local / two_nodes[0].check(["readlink", local / "latest"]).strip()
    collect = recipe("slurm.md", "collect-rsync", {"/local/runs/gpt": made})
    collected = execute(two_nodes[0], collect, tmp_path)
    assert collected.returncode == 0, collected.stdout
    found = recorded(tmp_path / "gpt")
    assert found == Recorded(made.name, 0, on_nodes(1, 1))
    assert all(f"commtrace: recorded 1 rank in {made}\n" in one.stdout for one in completed)
    assert_live(tmp_path, found)
