"""Jobs of two nodes, launched by torchrun in the ways that there are: one run, whatever the nodes were told.

Two torchruns on one machine stand for two nodes. Their ports are free ones; every job has a hard timeout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, descendants
from tests.free_ports import free_port

pytestmark = pytest.mark.e2e

PROGRAM = "tests/e2e/programs/two_nodes.py"
SECONDS = 120.0

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "2"]
COMMTRACE_RUN = [sys.executable, "-m", "commtrace", "run", "--"]


def launch_nodes(
    commands: Sequence[Sequence[str]], folder: Path, variables: Sequence[Mapping[str, str]] | None = None
) -> list[str]:
    """Run a command on each node, below the same folder, and return their outputs. All must end with 0 in time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COMMTRACE_", "PYTHON"))}
    common = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(REPOSITORY)}
    nodes = []
    for number, command in enumerate(commands):
        output = (folder / f"output-{number}").open("w+")
        own = {"COMMTRACE_NODE_ID": f"node-{number}", **((variables or [{}, {}])[number])}
        nodes.append((output, subprocess.Popen(
            command, cwd=folder, env={**common, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )))  # fmt: skip
    try:
        for _, process in nodes:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for _, process in nodes:
            for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
                os.kill(pid, 6)  # faulthandler writes the stacks
    outputs = []
    for output, process in nodes:
        process.wait(10)
        output.seek(0)
        outputs.append(output.read())
        output.close()
    assert [process.returncode for _, process in nodes] == [0, 0], "\n".join(outputs)
    return outputs


def static(node: int, port: int) -> list[str]:
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*TORCHRUN, "--node-rank", str(node), *address]


def c10d(port: int, *options: str) -> list[str]:
    return [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", *options]


def command(way: str, launcher: Sequence[str], *options: str) -> list[str]:
    """Return the program behind its launcher, recorded in one of the ways that there are."""
    scripts = {"import": ["--import"], "import, and no time": ["--import", "--steps", "1"]}
    script = [str(REPOSITORY / PROGRAM), *scripts.get(way, []), *options]
    if way == "run before the launcher":
        return [*COMMTRACE_RUN, *launcher, *script]
    if way == "run behind the launcher":
        return [*launcher, "--no-python", *COMMTRACE_RUN, sys.executable, *script]
    return [*launcher, *script]


def only_run(folder: Path) -> Run:
    runs = [path for path in (folder / "commtrace-runs").iterdir() if path.is_dir()]
    (directory,) = [path for path in runs if not path.is_symlink()]
    assert (folder / "commtrace-runs" / "latest").resolve() == directory.resolve()
    run = load_run(directory)
    assert run.path.name == run.any_metadata.run_id
    return run


def assert_recorded_here(outputs: Sequence[str], run: Run) -> None:
    assert [line for output in outputs for line in output.splitlines() if str(run.path) in line]
    assert "nothing was recorded" not in "".join(outputs)


def assert_is_one_run(run: Run, attempt: int = 0) -> None:
    metadata = [trace.metadata for trace in run.ranks.values()]
    assert run.problems == ()
    assert [one.rank for one in metadata] == [0, 1, 2, 3]
    assert [one.local_rank for one in metadata] == [0, 1, 0, 1]
    assert len({one.run_id for one in metadata}) == 1
    assert {one.attempt for one in metadata} == {attempt}
    assert sorted({one.node for one in metadata}) == ["node-0", "node-1"]


@pytest.mark.parametrize(
    ("way", "rendezvous"),
    [
        ("import, and no time", "c10d"),
        # The other combinations. Below, nodes with `commtrace run` behind the launcher are given two names. Before a
        # static rendezvous, and before one by c10d with a restart, it is in launchers/test_torchrun.py.
        pytest.param("run before the launcher", "static", marks=pytest.mark.long),
        pytest.param("run behind the launcher", "c10d", marks=pytest.mark.long),
        pytest.param("import", "static", marks=pytest.mark.long),
        pytest.param("import", "c10d", marks=pytest.mark.long),
        pytest.param("run before the launcher", "c10d", marks=pytest.mark.long),
        pytest.param("run behind the launcher", "static", marks=pytest.mark.long),
        pytest.param("import, and no time", "static", marks=pytest.mark.long),
    ],
)
def test_two_nodes_are_one_run(way: str, rendezvous: str, tmp_path: Path) -> None:
    port = free_port()
    launchers = [static(node, port) if rendezvous == "static" else c10d(port, "--rdzv-id", "7") for node in range(2)]

    outputs = launch_nodes([command(way, launcher) for launcher in launchers], tmp_path)

    run = only_run(tmp_path)
    assert_is_one_run(run)
    if rendezvous == "c10d":
        assert run.any_metadata.run_id == "7"
    assert_recorded_here(outputs, run)


@pytest.mark.parametrize(
    ("way", "failing"),
    [
        # A restart of a job with `commtrace run` before the launcher is in launchers/test_torchrun.py.
        pytest.param("run behind the launcher", 3, marks=pytest.mark.long),
        pytest.param("import", 3, marks=pytest.mark.long),
        pytest.param("import", 0, marks=pytest.mark.long),
    ],
)
def test_a_restart_after_a_failure_of_one_node_is_the_next_attempt_of_all(
    way: str, failing: int, tmp_path: Path
) -> None:
    """Each attempt with a store of its own: in the one that torchrun keeps, gloo finds ranks that have ended."""
    launcher = c10d(free_port(), "--rdzv-id", "7", "--max-restarts", "2")
    restarted = command(way, launcher, "--steps", "20", "--fails", str(failing))

    outputs = launch_nodes([restarted] * 2, tmp_path, [{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}] * 2)

    run = only_run(tmp_path)
    metadata = [trace.metadata for trace in run.ranks.values()]
    assert len(metadata) == 4
    assert {one.attempt for one in metadata} == {1}
    assert {one.run_id for one in metadata} == {"7"}
    assert [one.local_rank for one in metadata] == [0, 1, 0, 1]
    assert sorted({one.node for one in metadata}) == ["node-0", "node-1"]
    assert_recorded_here(outputs, run)


def test_nodes_that_were_given_other_names_are_one_run_and_it_is_reported(tmp_path: Path) -> None:
    port = free_port()
    commands = [command("run behind the launcher", static(node, port)) for node in range(2)]

    outputs = launch_nodes(commands, tmp_path, [{"COMMTRACE_RUN_ID": "a"}, {"COMMTRACE_RUN_ID": "b"}])

    run = only_run(tmp_path)
    assert_is_one_run(run)
    assert run.any_metadata.run_id == "a"
    assert_recorded_here(outputs, run)
    assert "called" not in outputs[0]
    assert outputs[1].count("called b on this node and a on rank 0, and is recorded as a") == 1
