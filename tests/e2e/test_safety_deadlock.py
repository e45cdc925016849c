"""No hang: backends' threads call back into Python, and Python calls into backends, at the same time.

A hang that is rare needs more repetitions: ``pytest tests/e2e/test_safety_deadlock.py --repetitions 50``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.reader import load_run
from tests.e2e.launch import REPOSITORY, launch
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "mixed_communication.py"
SIZE, LIFE_CYCLES, ROUNDS = 4, 3, 20
COLLECTIVES = LIFE_CYCLES * (ROUNDS * (4 + 1 + 1 + 1 + 1) + len(range(0, ROUNDS, 3)))
POINT_TO_POINT = LIFE_CYCLES * ROUNDS * 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "repetition" in metafunc.fixturenames:
        metafunc.parametrize("repetition", range(metafunc.config.getoption("repetitions")))


def test_a_job_that_mixes_all_kinds_of_communication_ends(repetition: int, tmp_path: Path) -> None:
    completed = launch([PROGRAM, str(LIFE_CYCLES), str(ROUNDS)], SIZE, {"COMMTRACE_DIR": str(tmp_path)}, timeout=120)

    assert completed.returncode == 0, completed.stdout
    run = load_run(tmp_path)
    assert run.problems == ()
    assert all(trace.closed and trace.dropped == {} for trace in run.ranks.values())
    for rank in range(SIZE):
        assert len(list(rows(run, rank, schema.COLLECTIVE))) == COLLECTIVES
        assert len(list(rows(run, rank, schema.P2P))) == POINT_TO_POINT
        assert len(run.ranks[rank].groups) == 2 * LIFE_CYCLES
