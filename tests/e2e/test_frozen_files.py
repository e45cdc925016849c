"""The file system of the trace stops answering, for ever: no step and no end of the training waits for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from commtrace.trace.files.reader import load_newest
from commtrace.trace.selection import make_request, write_request
from tests.e2e.launch import REPOSITORY, fork, run

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]

PROGRAM: Final = REPOSITORY / "tests" / "e2e" / "programs" / "frozen_files.py"
FUSE: Final = REPOSITORY / "tests" / "e2e" / "programs" / "frozen_fuse.py"
SOURCE: Final = REPOSITORY / "tests" / "e2e" / "frozen_files" / "frozen_files.c"

KINDS: Final = frozenset({"close", "list", "mkdir", "open", "read", "rename", "stat", "sync", "unlink", "write"})
"""Of the calls that a job makes below its run directory, as the library names them."""

LONGEST_SECONDS: Final = 10.0
"""Of a step, and of all that commtrace does as Python ends."""
TRAINED_SECONDS: Final = 14


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "frozen_files.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


class Frozen(NamedTuple):
    longest_step: float  # seconds, of all ranks
    longest_end: float  # seconds, from the end of training to that of commtrace, of all ranks
    output: str


def frozen(folder: Path, library: Path, kinds: str = "") -> dict[str, str]:
    """The environment of a job that records to ``folder/run``, which is frozen while there is ``folder/frozen``."""
    (folder / "notes").mkdir()
    return {
        "LD_PRELOAD": str(library),
        "FROZEN_BELOW": str(folder / "run"),
        "FROZEN_WHILE": str(folder / "frozen"),
        "FROZEN_CALLS": kinds,
        "FROZEN_NOTES": str(folder / "notes"),
        "COMMTRACE_DIR": str(folder / "run"),
        "COMMTRACE_HANG_SECONDS": "2",
        "COMMTRACE_STEPS_PER_SEGMENT": "20",
        "COMMTRACE_KEEP_STEPS": "160",
    }


def frozen_job(
    folder: Path, library: Path, kinds: str = "", *arguments: str, env: Mapping[str, str] | None = None
) -> Frozen:
    """Run the program until its end, with calls of these kinds frozen; in ``folder/notes`` are all kinds that came."""
    environment = {**frozen(folder, library, kinds), **(env or {})}
    seconds = arguments[:1] or (str(TRAINED_SECONDS),)
    return job_of([PROGRAM, folder / "frozen", *seconds, *arguments[1:]], environment, float(seconds[0]) + 90)


def job_of(command: Sequence[str | Path], environment: Mapping[str, str], timeout: float) -> Frozen:
    completed = fork(command, 2, environment, timeout=timeout)
    assert not completed.timed_out, completed.stdout
    assert completed.returncode == 0, completed.stdout
    longest = re.findall(r"rank \d: \d+ steps, the longest ([\d.]+) s", completed.stdout)
    ends = re.findall(r"the end took ([\d.]+) s", completed.stdout)
    assert (len(longest), len(ends)) == (2, 2), completed.stdout
    return Frozen(max(map(float, longest)), max(map(float, ends)), completed.stdout)


def check(job: Frozen) -> None:
    assert job.longest_step < LONGEST_SECONDS, job.output
    assert job.longest_end < LONGEST_SECONDS, job.output


def test_a_file_system_that_does_not_answer_holds_up_no_step_and_no_end(tmp_path: Path, library: Path) -> None:
    """Also where code in C keeps Python's lock meanwhile, whose stack a signal's handler writes on the main thread."""
    job = frozen_job(tmp_path, library, "", str(TRAINED_SECONDS), "holds-lock")
    check(job)
    assert "did not end within" in job.output
    assert {path.name for path in (tmp_path / "notes").iterdir()} <= KINDS


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_kind_of_call_holds_up_the_training(tmp_path: Path, library: Path, kind: str) -> None:
    """Each alone: frozen together, the first one would hide the others."""
    check(frozen_job(tmp_path, library, kind, str(TRAINED_SECONDS), "holds-lock"))
    assert (tmp_path / "notes" / kind).exists(), "the job makes no such call: leave it out of KINDS"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["", "mkdir", "open", "write"])
def test_a_file_system_that_never_answered_is_as_good(tmp_path: Path, library: Path, kind: str) -> None:
    (tmp_path / "frozen").touch()
    check(frozen_job(tmp_path, library, kind))


@pytest.mark.thorough
def test_nor_with_the_default_options_and_with_the_monitor(tmp_path: Path, library: Path) -> None:
    environment = {"COMMTRACE_HANG_SECONDS": "60", "COMMTRACE_EXPORT": "monitor", "COMMTRACE_KEEP_STEPS": "0"}
    check(frozen_job(tmp_path, library, "", "90", env=environment))


@pytest.mark.thorough
def test_nor_with_a_request_that_cannot_be_read_to_its_end(tmp_path: Path, library: Path) -> None:
    (tmp_path / "run").mkdir()
    write_request(tmp_path / "run", make_request("another", 0, 5, 10, by="test", modules="depth=1"))
    check(frozen_job(tmp_path, library, "read,list"))


NEVER_JOINS = """
import atexit, sys, time
from pathlib import Path
atexit.register(lambda: print(f"the end took {time.monotonic() - began:.1f} s"))
import commtrace.auto
folder, flag = Path(sys.argv[1]), Path(sys.argv[2])
deadline = time.monotonic() + 60
while not list(folder.glob("rank-00000/spans-*")) and time.monotonic() < deadline:
    time.sleep(0.2)
assert time.monotonic() < deadline
flag.touch()
began = time.monotonic()
"""


@pytest.mark.thorough
def test_nor_the_end_of_a_rank_that_has_not_joined_its_job(tmp_path: Path, library: Path) -> None:
    environment = {**frozen(tmp_path, library), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", NEVER_JOINS, str(tmp_path / "run"), str(tmp_path / "frozen")]
    completed = run(command, environment, timeout=150)
    assert not completed.timed_out, completed.stdout
    assert completed.returncode == 0, completed.stdout
    (seconds,) = re.findall(r"the end took ([\d.]+) s", completed.stdout)
    assert float(seconds) < LONGEST_SECONDS, completed.stdout


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system that the kernel waits for while there is ``tmp_path/frozen``."""
    reasons: Any = ImportError, OSError  # the second one without libfuse; pytest takes both
    pytest.importorskip("fuse", reason="fusepy is not installed", exc_type=reasons)
    mount, flag = tmp_path / "mount", tmp_path / "frozen"
    mount.mkdir()
    (tmp_path / "behind").mkdir()
    server = subprocess.Popen([sys.executable, str(FUSE), str(tmp_path / "behind"), str(mount), str(flag)])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(mount):
            if server.poll() is not None:
                pytest.skip("no file systems of FUSE can be mounted here")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield mount
    finally:
        flag.unlink(missing_ok=True)
        subprocess.run(["umount", "--lazy", str(mount)], check=False)
        server.terminate()
        server.wait(20)


def test_the_kernel_keeps_no_rank_because_of_a_file_system_that_does_not_answer(tmp_path: Path, mount: Path) -> None:
    """An exited process whose call is in FUSE stays until it is answered, and its launcher waits for it."""
    environment = {
        "COMMTRACE_DIR": str(mount / "run"),
        "COMMTRACE_HANG_SECONDS": "2",
        "COMMTRACE_STEPS_PER_SEGMENT": "20",
        "COMMTRACE_KEEP_STEPS": "160",
    }
    job = job_of([PROGRAM, tmp_path / "frozen", str(TRAINED_SECONDS), "holds-lock"], environment, TRAINED_SECONDS + 90)
    check(job)
    assert (tmp_path / "frozen").exists(), "it did not wait until it was thawed"
    assert "did not end within" in job.output
    (tmp_path / "frozen").unlink()
    run_directory = load_newest(mount / "run")
    assert sorted(run_directory.ranks) == [0, 1]
