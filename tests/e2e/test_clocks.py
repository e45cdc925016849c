"""Ranks on clocks that really differ: half of a job runs in a time namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.clocks.align import COLLECTIVE_ENDS, align
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "steps_of_all_reduce.py"
AHEAD_SECONDS = 4321
MILLISECOND = 1_000_000


def has_time_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--time", "--monotonic=1", "--fork", "true"], capture_output=True, timeout=10, check=False
    )
    return tried.returncode == 0


@pytest.mark.skipif(not has_time_namespaces(), reason="a time namespace needs Linux 5.6, util-linux 2.36 and root")
def test_a_job_on_two_clocks_is_put_on_one(tmp_path: Path) -> None:
    done = fork([PROGRAM, "40", str(AHEAD_SECONDS)], 4, {"COMMTRACE_DIR": str(tmp_path / "run")})
    assert done.returncode == 0, done.stdout
    run = load_run(tmp_path / "run")
    begins = {rank: int(trace.spans.start.min()) for rank, trace in run.ranks.items()}
    assert min(begins[2], begins[3]) - max(begins[0], begins[1]) > (AHEAD_SECONDS - 60) * 1_000 * MILLISECOND

    alignment = align(run)
    assert alignment.method == COLLECTIVE_ENDS
    assert alignment.observations >= 40
    first, second = alignment.hosts
    sign = 1 if first.host == "reference" else -1
    error = abs(second.offset_ns - sign * AHEAD_SECONDS * 1_000 * MILLISECOND)
    # The namespace's offset is exact. How far the fit is from it, the published residual must say.
    assert error <= max(alignment.residual_ns["p99"], MILLISECOND), alignment.to_json()

    analysis = analyse(tmp_path / "run")
    walls = analysis.partition.wall_ns
    assert analysis.partition.ns.sum() == walls.sum()
    complete = analysis.matches.ranks[0].complete[analysis.run.ranks[0].spans.kind == schema.COLLECTIVE]
    assert complete.all()
