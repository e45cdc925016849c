"""A skip whose reason is not listed fails the session, wherever it happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.skips import expected_skips

ROOT = Path(__file__).resolve().parents[1]
LISTED = """
import pytest

def test_listed():
    pytest.skip("needs a CUDA device: there is none")

@pytest.mark.xfail
def test_known():
    assert False
"""
IN_A_TEST = """
import pytest

@pytest.mark.skipif(True, reason="no browser")
def test_other():
    assert True
"""
OF_A_MODULE = """
import pytest

pytest.importorskip("no_such_module", reason="no such module")
"""


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "listed").write_text("# why\nno GPU:*\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    return subprocess.run(
        [*command, "--expected-skips", "test", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_expected_skips_and_failures_are_fine(tmp_path: Path) -> None:
    (tmp_path / "test_listed.py").write_text(LISTED)

    completed = run_pytest(tmp_path)

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "unexpected skips" not in completed.stdout


def test_other_skips_fail_the_session_and_are_named(tmp_path: Path) -> None:
    for name, text in {"listed": LISTED, "other": IN_A_TEST, "module": OF_A_MODULE}.items():
        (tmp_path / f"test_{name}.py").write_text(text)

    completed = run_pytest(tmp_path)

    assert completed.returncode == 1, completed.stdout + completed.stderr
    _, _, told = completed.stdout.partition("unexpected skips")
    assert sorted(told.splitlines()[1:3]) == ["test_module.py: no such module", "test_other.py::test_other: no browser"]


def test_expected_skips_depend_on_the_target() -> None:
    of_all, of_test, of_newest = (expected_skips(target) for target in ("none", "test", "test-newest"))

    assert "needs a CUDA device: *" in of_all
    assert set(of_all) < set(of_test)
    assert set(of_newest) - set(of_all) == {"deepspeed is not installed: *"}
