"""Slurm: srun with one torchrun per node and with one task per rank, a requeue, and disks that are not shared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.launchers.recipes import FEW_STEPS, PATH, recipe
from tests.e2e.launchers.runs import Recorded, assert_live, live_environment, on_nodes, recorded
from tests.e2e.launchers.slurm import Slurm

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

RUNS = "/shared/runs/{run_id}"
SIZES = {"--nodes=4": "--nodes=2", "--gpus-per-node=8": ""}
TORCHRUN = {**SIZES, "--nnodes 4 --nproc-per-node 8": "--nnodes 2 --nproc-per-node 2"}
TASKS = {**SIZES, "--ntasks-per-node=8": "--ntasks-per-node=2"}
A_TASK_PER_NODE = {**SIZES, "--ntasks-per-node=8": "--ntasks-per-node=1"}


@pytest.mark.long
def test_one_torchrun_per_node(slurm_cluster: Slurm, tmp_path: Path) -> None:
    job = _submit(slurm_cluster, "slurm.md", "slurm-torchrun", tmp_path, TORCHRUN)

    run = recorded(tmp_path / "runs" / job)
    assert run == Recorded(job, 0, on_nodes(2, 2))
    assert_live(tmp_path, run)


def test_the_recipe_with_prometheus(slurm_cluster: Slurm, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("prometheus:secret\n")
    own = {
        **TORCHRUN,
        "COMMTRACE_EXPORT=prometheus": "COMMTRACE_EXPORT=prometheus,otlp",
        "/shared/prometheus-targets": tmp_path / "targets",
        "$HOME/.config/commtrace-scrape": credentials,
    }
    job = _submit(slurm_cluster, "prometheus.md", "slurm-prometheus", tmp_path, own)

    run = recorded(tmp_path / "runs" / job)
    assert run == Recorded(job, 0, on_nodes(2, 2))
    assert_live(tmp_path, run)


def test_a_task_per_rank_on_disks_of_their_own(slurm_cluster: Slurm, tmp_path: Path) -> None:
    local = slurm_cluster.nodes[0].disk / "tasks"
    shared = tmp_path / "parts"
    shared.mkdir()
    collect = recipe("slurm.md", "collect-srun", {"/local/runs/gpt": local, "/shared/parts": shared})
    job = _submit(slurm_cluster, "slurm.md", "slurm-tasks", tmp_path, {**TASKS, RUNS: local}, then=collect)

    run = recorded(tmp_path / "gpt")
    assert run == Recorded(f"slurm-{job}.0", 0, on_nodes(2, 2))
    assert_live(tmp_path, run)


def test_a_requeued_job_goes_on_in_an_attempt_of_its_run(slurm_cluster: Slurm, tmp_path: Path) -> None:
    requeue = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }\n'
    job = _submit(slurm_cluster, "slurm.md", "slurm-import", tmp_path, A_TASK_PER_NODE, "--auto", then=requeue)

    run = recorded(tmp_path / "runs" / f"slurm-{job}.0", earlier_attempts=True)
    assert run == Recorded(f"slurm-{job}.0", 1, on_nodes(1, 1))
    assert_live(tmp_path, run)


@pytest.mark.long
def test_commtrace_run_before_srun(slurm_cluster: Slurm, tmp_path: Path) -> None:
    job = _submit(slurm_cluster, "slurm.md", "slurm-before-srun", tmp_path, TASKS)

    run = recorded(tmp_path / "runs" / f"slurm-{job}.0")
    assert run == Recorded(f"slurm-{job}.0", 0, on_nodes(2, 2))
    assert_live(tmp_path, run)


def _submit(
    slurm: Slurm,
    page: str,
    name: str,
    tmp_path: Path,
    own: Mapping[str, object],
    option: str = "",
    then: str = "",
) -> str:
    """Submit a recipe, wait for its end, and return the number of the job."""
    training = {"train.py": f"{FEW_STEPS} {option} --targets {tmp_path / 'targets'}"}
    places = {} if RUNS in own else {RUNS: tmp_path / "runs" / "{run_id}"}
    script = tmp_path / "job.sh"
    done = tmp_path / "done"
    text = recipe(page, name, {**own, **training, **places, "#!/bin/bash": "#!/bin/bash -e"})
    script.write_text(f"{text}{then}touch {done}\n")
    environment = {"PATH": PATH, **live_environment(tmp_path)}
    output = tmp_path / "output"
    options = ["--parsable", f"--chdir={tmp_path}", f"--output={output}", "--open-mode=append"]
    submitted = slurm.run(["sbatch", *options, script], environment)
    assert submitted.returncode == 0, submitted.stdout
    job = submitted.stdout.strip()
    slurm.await_end(job, done)
    assert done.exists(), output.read_text()
    return job
