"""The oracle: torch.profiler's own record of the same run lists every communication that was issued, whoever issued it.

What commtrace recorded must be the same, each operation once, on every rank; and what the ranks recorded must fit
together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e import oracle
from tests.e2e.launch import REPOSITORY, WAYS, fork
from tests.e2e.traces import rows

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not hasattr(dist, "all_gather_single"),
        reason="the programs call functions that this torch lacks; tests/matrix asks older versions",
    ),
]

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "every_origin.py"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_every_communication_is_recorded_once_with_its_size(size: int, way: tuple[Path, ...], tmp_path: Path) -> None:
    completed = fork([*way, PROGRAM, tmp_path], size, {"COMMTRACE_DIR": str(tmp_path / "run")}, timeout=150)

    assert completed.returncode == 0, completed.stdout
    run = load_run(tmp_path / "run")
    assert sorted(run.ranks) == list(range(size))
    found = oracle.differences(run, tmp_path, size)
    assert not found, "\n".join(found)
    oracle.assert_consistent(run)
    assert_stalls_belong_to_communications(run)


def assert_stalls_belong_to_communications(run: Run) -> None:
    """Everything in the program was waited for, once."""
    for rank in run.ranks:
        ids = sorted(row["id"] for row in rows(run, rank, schema.COLLECTIVE, schema.P2P))
        assert sorted(row["stalled_on"] for row in rows(run, rank, schema.STALL)) == ids
        assert len(set(ids)) == len(ids)
