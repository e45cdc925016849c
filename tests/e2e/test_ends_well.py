"""A job that ended well is not called killed, in whatever way its processes end; one that failed still is."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, Completed, launch, run
from tests.free_ports import free_port

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "ends_well.py"
STEPS = 20
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def below_commtrace_run(directory: Path, how: str) -> Completed:
    command = [sys.executable, "-m", "commtrace", "run", "-o", str(directory), "--", *TORCHRUN, str(PROGRAM), how]
    return run(command, {"OMP_NUM_THREADS": "1"})


def diagnosis_of(directory: Path) -> tuple[int, dict[str, Any]]:
    completed = run([sys.executable, "-m", "commtrace", "doctor", str(directory), "--json"])
    diagnosis: dict[str, Any] = json.loads(completed.stdout)
    return completed.returncode, diagnosis


def steps_of(directory: Path) -> list[int]:
    return [int((trace.spans.kind == schema.STEP).sum()) for trace in load_run(directory).ranks.values()]


@pytest.mark.parametrize("how", ["os_exit", "os_exit_without_destruction"])
def test_os_exit_with_0_is_a_clean_end_and_loses_nothing(tmp_path: Path, how: str) -> None:
    completed = launch([PROGRAM, how], 2, {"COMMTRACE_DIR": str(tmp_path / "run")})
    assert completed.returncode == 0, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert (status, diagnosis["findings"], diagnosis["run"]["states"]) == (0, [], {"ended": 2})
    assert steps_of(tmp_path / "run") == [STEPS, STEPS]


def test_a_rank_that_is_killed_after_its_default_group_was_destroyed_has_ended(tmp_path: Path) -> None:
    """As workers of Ray are. Nothing is known of the launcher."""
    launch([PROGRAM, "killed_after_destruction"], 2, {"COMMTRACE_DIR": str(tmp_path / "run")})

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert (status, diagnosis["findings"], diagnosis["run"]["states"]) == (0, [], {"ended": 2})
    assert steps_of(tmp_path / "run") == [STEPS, STEPS]


def test_deaths_that_python_cannot_see_are_known_from_the_exit_code(tmp_path: Path) -> None:
    completed = below_commtrace_run(tmp_path / "run", "exits_in_c")
    assert completed.returncode == 0, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")
    listed = run([sys.executable, "-m", "commtrace", "list", str(tmp_path), "--json"])

    assert (status, diagnosis["findings"], diagnosis["run"]["states"]) == (0, [], {"ended": 2})
    assert '"ended"' in listed.stdout
    assert '"cut_off"' not in listed.stdout


@pytest.mark.parametrize("how", ["killed", "killed_alone"])
def test_a_shell_that_hides_the_exit_code_does_not_make_a_killed_rank_one_that_ended_well(
    tmp_path: Path, how: str
) -> None:
    shell = ["sh", "-c", f"{shlex.join([*TORCHRUN, str(PROGRAM), how])} || true"]
    command = [sys.executable, "-m", "commtrace", "run", "-o", str(tmp_path / "run"), "--", *shell]
    completed = run(command, {"OMP_NUM_THREADS": "1"})
    assert completed.returncode == 0, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert status == 1
    assert "ended" not in {one["state"] for one in diagnosis["ranks"] if one["exception"] is None}
    assert "rank 1" in diagnosis["findings"][0]["evidence"]
    said = [note for note in diagnosis["notes"] if "ended with exit code 0, but a shell had started" in note]
    # An exception of another rank, where the launcher leaves it the time to raise one, says it all.
    assert len(said) == all(one["exception"] is None for one in diagnosis["ranks"])


def test_below_a_shell_a_job_that_ends_well_is_read_so(tmp_path: Path) -> None:
    shell = ["sh", "-c", f"{shlex.join([*TORCHRUN, str(PROGRAM), 'os_exit'])}; true"]
    completed = run([sys.executable, "-m", "commtrace", "run", "-o", str(tmp_path / "run"), "--", *shell], {})
    assert completed.returncode == 0, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert (status, diagnosis["findings"], diagnosis["run"]["states"]) == (0, [], {"ended": 2})


@pytest.mark.parametrize("how", ["os_exit_1", "killed", "segmentation_fault", "aborted", "destroyed_and_os_exit_1"])
def test_a_rank_that_fails_is_named(tmp_path: Path, how: str) -> None:
    completed = below_commtrace_run(tmp_path / "run", how)
    assert completed.returncode == 1, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert status == 1
    assert "Failed first: rank 1" in diagnosis["findings"][0]["evidence"]


@pytest.mark.parametrize(
    ("how", "called"),
    [
        ("os_exit_1", (1, None, None)),
        ("destroyed_and_os_exit_1", (1, None, None)),
        ("os_exit_in_except", (3, None, "KeyError")),
    ],
)
def test_os_exit_with_another_status_than_0_says_what_led_to_it(
    tmp_path: Path, how: str, called: tuple[object, ...]
) -> None:
    below_commtrace_run(tmp_path / "run", how)

    _, diagnosis = diagnosis_of(tmp_path / "run")
    listed = run([sys.executable, "-m", "commtrace", "list", str(tmp_path), "--json"])

    exit_ = diagnosis["ranks"][1]["exit"]
    assert (exit_["status"], exit_["signal"], exit_["exception"]) == called
    assert "ends_well.py" in exit_["at"]
    assert f"which called os._exit({called[0]})" in diagnosis["findings"][0]["evidence"]
    assert f"os._exit({called[0]}) on rank 1" in listed.stdout


def test_a_rank_that_calls_os_exit_as_the_launcher_ends_it_was_not_the_first(tmp_path: Path) -> None:
    below_commtrace_run(tmp_path / "run", "os_exit_at_sigterm")

    _, diagnosis = diagnosis_of(tmp_path / "run")

    assert "Failed first: rank 1" in diagnosis["findings"][0]["evidence"]
    assert [one["exit"] and one["exit"]["signal"] for one in diagnosis["ranks"]] == ["SIGTERM", None]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_multiprocessing_are_recorded_to_their_end(tmp_path: Path, method: str) -> None:
    completed = run(
        [sys.executable, str(PROGRAM), "returns", method, str(free_port())], {"COMMTRACE_DIR": str(tmp_path / "run")}
    )
    assert completed.returncode == 0, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert (status, diagnosis["findings"], diagnosis["run"]["states"]) == (0, [], {"ended": 2})
    assert steps_of(tmp_path / "run") == [STEPS, STEPS]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_exception_of_a_worker_of_multiprocessing_is_reported(tmp_path: Path, method: str) -> None:
    completed = run(
        [sys.executable, str(PROGRAM), "raises", method, str(free_port())], {"COMMTRACE_DIR": str(tmp_path / "run")}
    )
    assert completed.returncode == 1, completed.stdout

    status, diagnosis = diagnosis_of(tmp_path / "run")

    assert status == 1
    assert diagnosis["ranks"][1]["exception"] == "ValueError"
    assert "ends_well.py" in diagnosis["ranks"][1]["exception_at"]
