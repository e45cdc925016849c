"""A job that hangs before its first step: every rank has files, and the doctor says where each of them is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import REPOSITORY, descendants, run

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "hangs_in_setup.py"
LIMIT_SECONDS = 100.0

CALLS = {"new_group": "new_group", "new_subgroups": "new_subgroups", "one_prepares_first": "init_process_group"}


def diagnosis_of_hung_job(directory: Path, how: str) -> dict[str, Any]:
    """The doctor's report as soon as it finds something. The job is killed after that."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")}
    environment = {
        **inherited, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COMMTRACE_DIR": str(directory),
        "COMMTRACE_HANG_SECONDS": "2",
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (directory.parent / "log").open("w") as log:
        job = subprocess.Popen([*torchrun, str(PROGRAM), how], env=environment, stdout=log, stderr=log)
        try:
            return _first_findings(directory)
        finally:
            for pid in [*descendants(job.pid), job.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()


def _first_findings(directory: Path) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_SECONDS
    diagnosis: dict[str, Any] = {}
    while time.monotonic() < deadline:
        time.sleep(2)
        completed = run([sys.executable, "-m", "commtrace", "doctor", str(directory), "--json"])
        if completed.returncode == 2:
            continue  # nothing has been written yet
        diagnosis = json.loads(completed.stdout)
        if diagnosis["setup_hang"] is not None:
            return diagnosis
    raise AssertionError(f"nothing was found: {diagnosis}")


def line_of(text: str) -> int:
    return PROGRAM.read_text().splitlines().index(text) + 1


@pytest.mark.parametrize("how", CALLS)
def test_ranks_that_wait_in_a_call_and_the_one_that_has_not_come_are_reported_with_their_places(
    tmp_path: Path, how: str
) -> None:
    diagnosis = diagnosis_of_hung_job(tmp_path / "run", how)

    (call,) = diagnosis["setup_hang"]["calls"]
    assert (call["call"], call["ranks"]) == (CALLS[how], [0])
    assert "hangs_in_setup.py" in call["at"]
    prepares = f"{PROGRAM}:{line_of('    time.sleep(600)')} prepare"
    assert diagnosis["setup_hang"]["elsewhere"] == [{"at": prepares, "ranks": [1]}]
    assert diagnosis["findings"][-1]["evidence"].endswith(f" Not come: rank 1 at {prepares}.")


def test_a_rank_that_calls_os_exit_before_it_has_joined_is_the_one_that_failed(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*torchrun, str(PROGRAM), "one_leaves"], {"COMMTRACE_DIR": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"})

    completed = run([sys.executable, "-m", "commtrace", "doctor", str(tmp_path / "run"), "--json"])

    diagnosis = json.loads(completed.stdout)
    assert diagnosis["ranks"][1]["exit"]["status"] == 5
    assert diagnosis["findings"][0]["evidence"].startswith("Failed first: rank 1 on ")
    assert (
        f"which called os._exit(5) at {PROGRAM}:{line_of('    os._exit(5)')} <module>"
        in diagnosis["findings"][0]["evidence"]
    )


@pytest.mark.parametrize("how", ["no_rank_comes", "all_prepare"])
def test_ranks_of_which_none_begins_a_step_are_reported_with_their_places(tmp_path: Path, how: str) -> None:
    diagnosis = diagnosis_of_hung_job(tmp_path / "run", how)

    assert diagnosis["setup_hang"]["calls"] == []
    assert diagnosis["findings"][0]["evidence"].startswith("No rank has begun a step or communicated: no progress for ")
    assert f"ranks 0–1 at {PROGRAM}:" in diagnosis["findings"][0]["evidence"]
