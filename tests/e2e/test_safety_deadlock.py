"""No hang: backends' threads call back into Python, and Python calls into backends, at the same time.

A hang that is rare needs more repetitions: `make test-long`, or ``pytest --long --repetitions 50`` of this file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "mixed_communication.py"
DESTROYING = PROGRAM.with_name("destroys_groups.py")
LIVES = 100
"""Without :mod:`commtrace.capture.collectives.group_lifecycle` one of about 340 hung, on two busy cores."""
SIZE, LIFE_CYCLES, ROUNDS = 4, 3, 20
COLLECTIVES = LIFE_CYCLES * (ROUNDS * (4 + 1 + 1 + 1 + 1) + len(range(0, ROUNDS, 3)))
POINT_TO_POINT = LIFE_CYCLES * ROUNDS * 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "repetition" in metafunc.fixturenames:
        again = range(1, metafunc.config.getoption("repetitions"))
        metafunc.parametrize("repetition", [0, *(pytest.param(number, marks=pytest.mark.long) for number in again)])


def test_a_job_that_mixes_all_kinds_of_communication_ends(repetition: int, tmp_path: Path) -> None:
    completed = fork([PROGRAM, str(LIFE_CYCLES), str(ROUNDS)], SIZE, {"COMMTRACE_DIR": str(tmp_path)}, timeout=120)

    assert completed.returncode == 0, completed.stdout
    run = load_run(tmp_path)
    assert run.problems == ()
    assert all(trace.closed and trace.dropped == {} for trace in run.ranks.values())
    for rank in range(SIZE):
        assert len(list(rows(run, rank, schema.COLLECTIVE))) == COLLECTIVES
        assert len(list(rows(run, rank, schema.P2P))) == POINT_TO_POINT
        assert len(run.ranks[rank].groups) == 2 * LIFE_CYCLES


def test_groups_are_destroyed_while_threads_of_the_backend_let_go(repetition: int, tmp_path: Path) -> None:
    completed = fork([DESTROYING, str(LIVES)], 1, {"COMMTRACE_DIR": str(tmp_path)}, timeout=120)

    assert completed.returncode == 0, completed.stdout
    assert f"lived {LIVES} times" in completed.stdout
    assert "switched off" not in completed.stdout, completed.stdout
