"""A test that ends its process, as each one does that takes too long, costs no more than itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDS_ITS_PROCESS = """
import os
import pytest

@pytest.mark.parametrize("number", range(12))
def test_of(number):
    if number in (0, 11):
        os._exit(1)
"""


def test_the_others_are_run_and_the_session_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_some.py").write_text(ENDS_ITS_PROCESS)
    (options,) = re.findall(r"^SIDE_BY_SIDE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    command = [
        sys.executable,
        "-m",
        "pytest",
        *options.replace("$(WORKERS)", "2").split(),
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
    ]
    completed = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "2 failed, 10 passed" in completed.stdout
