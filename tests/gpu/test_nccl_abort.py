"""A job that aborts its NCCL group sees what it would see without a recorder, goes on, and its spans are readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commtrace.trace import schema
from commtrace.trace.reader import load_run
from tests.e2e.launch import REPOSITORY, launch
from tests.e2e.traces import rows

PROGRAM = REPOSITORY / "tests" / "gpu" / "programs" / "aborts_nccl.py"
STEPS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL: this build has none"),
]


def outcome(output: Path, **environment: str) -> dict[str, str]:
    variables = {"COMMTRACE_DIR": str(output / "run"), "PYTHONPATH": str(REPOSITORY), **environment}
    completed = launch([PROGRAM, output], 2, variables, timeout=180)
    assert not completed.timed_out, completed.stdout
    assert completed.returncode == 0, completed.stdout
    assert "switched off" not in completed.stdout, completed.stdout
    told: dict[str, str] = json.loads((output / "rank-0.json").read_text())
    return told


def test_an_aborted_group_ends_as_without_and_leaves_readable_spans(tmp_path: Path) -> None:
    plain = outcome(tmp_path / "plain", COMMTRACE_ENABLED="0")
    recorded = outcome(tmp_path / "recorded")

    assert recorded == plain
    run = load_run(tmp_path / "recorded" / "run")
    assert run.problems == ()
    for rank, trace in run.ranks.items():
        assert trace.closed
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(STEPS + 1))
        steps = [row["step"] for row in rows(run, rank, schema.COLLECTIVE) if row["step"] >= 0]
        assert steps == list(range(STEPS))
        assert [row["name"] for row in rows(run, rank, schema.USER)] == ["alone"]
