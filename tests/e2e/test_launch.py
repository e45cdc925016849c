"""The helper that starts the jobs must itself never hang and must say where a job hung."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import launch

pytestmark = pytest.mark.e2e


def test_output_and_exit_code_of_a_job(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os; os.write(1, f\"rank {os.environ['RANK']} {os.environ.get('COLOUR')}\\n\".encode())")

    completed = launch([script], nproc=2, env={"COLOUR": "red"}, timeout=60)

    assert completed.returncode == 0
    assert "rank 0 red" in completed.stdout
    assert "rank 1 red" in completed.stdout


def test_a_job_that_hangs_is_aborted_with_its_stacks(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\ndef where_it_hangs():\n    time.sleep(1000)\nwhere_it_hangs()\n")

    completed = launch([script], nproc=2, timeout=15)

    assert completed.timed_out
    assert completed.returncode != 0
    assert "in where_it_hangs" in completed.stdout
