"""The helpers that start the jobs must themselves never hang and must say where a job hung."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import launch as launching
from tests.e2e.launch import Starter, fork, launch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("start", [pytest.param(launch, marks=pytest.mark.thorough), fork]),
]


def test_output_and_exit_code_of_a_job(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "colours.py").write_text("import os\nGIVEN = os.environ.get('COLOUR')\n")
    script = tmp_path / "hello.py"
    script.write_text(
        "import os, sys\n"
        "from colours import GIVEN\n"
        "text = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {GIVEN} {sys.argv[1:]} {__name__}\\n\"\n"
        "os.write(1, text.encode())\n"
    )

    completed = start([script, "--loud"], nproc=2, env={"COLOUR": "red"}, timeout=60)

    assert completed.returncode == 0
    assert "rank 0 of 2 red ['--loud'] __main__" in completed.stdout
    assert "rank 1 of 2 red ['--loud'] __main__" in completed.stdout


def test_a_rank_that_fails_ends_the_others_and_the_job(start: Starter, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nassert os.environ['RANK'] != '1', 'no such data'\ntime.sleep(1000)\n")

    completed = start([script], nproc=2, timeout=60)

    assert not completed.timed_out
    assert completed.returncode == 1
    assert "no such data" in completed.stdout


def test_a_job_that_hangs_is_aborted_with_its_stacks(start: Starter, tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    hanging = tmp_path / "hanging"
    script.write_text(
        f"import pathlib, time\ndef where_it_hangs():\n    pathlib.Path({str(hanging)!r}).touch()\n"
        "    time.sleep(1000)\nwhere_it_hangs()\n"
    )

    completed = start([script], nproc=2, timeout=5 if start is fork else 20)
    if not hanging.exists():  # a busy machine needs longer to import torch
        completed = start([script], nproc=2, timeout=150)

    assert completed.timed_out
    assert completed.returncode != 0
    assert "in where_it_hangs" in completed.stdout


def test_a_job_starts_after_what_forks_jobs_has_died(start: Starter, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os\nos.write(1, b'hello\\n')\n")
    assert start([script], nproc=1, timeout=60).stdout == "hello\n"
    for server in launching._servers:
        server.stop()

    completed = start([script], nproc=2, timeout=60)

    assert (completed.stdout, completed.returncode) == ("hello\n" * 2, 0)
