"""The table itself, with made-up figures: needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.launch import REPOSITORY, run
from tests.gpu.table import FAILS, HOLDS, QUESTIONS, Row, markdown, microseconds


def test_rows_stand_in_the_order_of_the_questions_and_what_is_missing_is_reported() -> None:
    rows = [
        Row("memory", "nccl2", FAILS, "allocated 1 | 2 MB"),
        Row("spans against kernels", "nccl2", HOLDS, "20 of 24 timed"),
        Row("spans against kernels", "nccl-legacy", "not run: time is up"),
    ]

    assert markdown(rows, {"date": "2026-01-02", "GPU": "made up"}).splitlines()[:8] == [
        "date 2026-01-02, GPU made up:",
        "",
        "| question | backend | verdict | figures |",
        "|---|---|---|---|",
        "| spans against kernels | nccl-legacy | not run: time is up |  |",
        "| spans against kernels | nccl2 | holds | 20 of 24 timed |",
        "| barriers |  | not run: no test came to it |  |",
        "| training: spans against kernels |  | not run: no test came to it |  |",
    ]
    assert "| memory | nccl2 | FAILS | allocated 1 \\| 2 MB |" in markdown(rows, {})
    assert len(markdown([], {}).splitlines()) == 4 + len(QUESTIONS)


def test_differences_are_told_by_their_median_and_the_largest() -> None:
    assert microseconds([1_000, -9_000, 2_000]) == "median 2.0 µs, largest 9.0 µs"
    assert microseconds([]) == "none"
    assert microseconds(np.array([2_000.0, -1_000.0])) == "median 2.0 µs, largest 2.0 µs"


TESTS = """
import pytest

@pytest.mark.answers("memory")
@pytest.mark.parametrize("backend", ["nccl2"])
def test_that_passes(backend, figures):
    figures += ["1 MiB", "2 MiB"]

@pytest.mark.answers("synchronisations")
def test_that_fails(figures):
    figures.append("3 without, 4 with")
    assert 3 == 4

@pytest.mark.answers("graph capture")
def test_that_is_skipped():
    pytest.skip("time is up")

@pytest.fixture
def broken():
    raise RuntimeError("no end after 9 s")

@pytest.mark.answers("aborted group")
def test_whose_job_fails(broken):
    pass
"""


@pytest.mark.thorough
def test_the_table_is_printed_whatever_becomes_of_the_tests(tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.gpu.conftest import *\nfrom tests.gpu.conftest import _ROWS\n")
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    completed = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)], {"PYTHONPATH": str(REPOSITORY)}, 100
    )

    assert completed.returncode == 1, completed.stdout
    answered = [line for line in completed.stdout.splitlines() if line.startswith("| ") and "no test came" not in line]
    assert answered == [
        "| question | backend | verdict | figures |",
        "| synchronisations |  | FAILS: assert 3 == 4 | 3 without, 4 with |",
        "| memory | nccl2 | holds | 1 MiB; 2 MiB |",
        "| graph capture |  | not run: time is up |  |",
        "| aborted group |  | FAILS: no end after 9 s |  |",
    ]
    assert completed.stdout.count("no test came to it") == 10
