"""Real jobs whose parallelism is written by hand: the same peers everywhere, and no healthy stage named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.cli.main import app
from tests.e2e.launch import REPOSITORY, fork
from tests.findings.reading import in_json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "handmade_pipeline.py"

JOBS: dict[str, tuple[int, dict[str, Any], list[int | None]]] = {
    "pipeline": (4, {"pp": 4}, [0, 1, 2, 3]),
    "replicas": (4, {"pp": 2, "dp": 2, "schedule": "1f1b"}, [0, 1, 0, 1]),
    "chunks": (4, {"pp": 2, "dp": 2, "chunks": 2, "schedule": "interleaved"}, [0, 1, 0, 1]),
    "both directions": (4, {"pp": 4, "schedule": "bidirectional"}, [0, 1, 1, 0]),
    "tensor parallel": (4, {"pp": 2, "tp": 2}, [0, 0, 1, 1]),
    "shared embedding": (3, {"pp": 3, "tied": True}, [0, 1, 2]),
    "loss sent back": (4, {"pp": 2, "dp": 2, "reports_loss": True}, [1, 0, 1, 0]),
    "ring": (4, {"ring": "at once", "microbatches": 1}, [None] * 4),
    "ring in turns": (2, {"ring": "in turns", "microbatches": 1}, [None] * 2),
}


def recorded(tmp_path: Path, number: int, options: dict[str, Any]) -> Path:
    directory = tmp_path / "run"
    environment = {"COMMTRACE_DIR": str(directory), "PYTHONPATH": str(REPOSITORY)}
    completed = fork([PROGRAM, json.dumps({**options, "records": True})], number, environment, timeout=150)
    assert completed.returncode == 0, completed.stdout
    return directory


def told(*command: str) -> dict[str, Any]:
    completed = CliRunner().invoke(app, [*command, "--json"])
    assert completed.exit_code == 0, completed.output
    answer: dict[str, Any] = json.loads(completed.stdout)
    return answer


@pytest.mark.parametrize("job", JOBS)
def test_ranks_that_do_the_same_work_are_found(job: str, tmp_path: Path) -> None:
    number, options, expected = JOBS[job]
    run = recorded(tmp_path, number, {**options, "steps": 4})

    assert [trace.work_class for trace in analyse(run).run.ranks.values()] == expected


def test_a_healthy_last_stage_is_not_named_and_it_is_said_what_to_set(tmp_path: Path) -> None:
    run = str(recorded(tmp_path, 4, {"pp": 4, "head": 3.0}))

    summary, straggler = told("summary", run), told("straggler", run)

    assert (in_json(summary), in_json(straggler), straggler["waited_for"]) == ([], [], "")
    assert "COMMTRACE_LAYOUT" in " ".join(one["evidence"] for one in in_json(straggler, "not_judged"))


def test_a_slow_rank_among_those_of_its_stage_is_named(tmp_path: Path) -> None:
    run = str(recorded(tmp_path, 4, {"pp": 2, "dp": 2, "slow": 0, "microbatches": 6}))

    costliest, *_ = in_json(told("summary", run))

    assert costliest["ranks"][0] == 0
    assert in_json(told("straggler", run))[0]["ranks"][0] == 0
