"""A real job whose ranks wait for each other at the end of evaluations, which lie between its steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.e2e.launch import REPOSITORY, fork
from tests.findings.reading import in_json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "uneven_evaluation.py"


def verdicts(tmp_path: Path, batches: tuple[int, int]) -> list[dict[str, Any]]:
    directory = tmp_path / "run"
    environment = {"COMMTRACE_DIR": str(directory), "PYTHONPATH": str(REPOSITORY)}
    completed = fork([PROGRAM, *map(str, batches)], 2, environment, timeout=120)
    assert completed.returncode == 0, completed.stdout
    summary = CliRunner().invoke(app, ["summary", str(directory), "--json"])
    assert summary.exit_code == 0, summary.output
    return in_json(json.loads(summary.stdout))


def test_a_rank_that_evaluates_more_holds_up_each_evaluation(tmp_path: Path) -> None:
    (verdict,) = [one for one in verdicts(tmp_path, (4, 28)) if one["cause"] == "evaluation"]

    # 24 batches of 10 ms more in each of four, one of them after the last step.
    assert verdict["ranks"] == [1]
    said = re.search(r"4 times, by (\d+) ms each \(median\), (\d+\.?\d*) (m?)s in all", verdict["evidence"])
    assert said is not None, verdict["evidence"]
    assert 230 <= int(said[1]) <= 500
    in_all_ns = float(said[2]) * (1e6 if said[3] else 1e9)
    assert verdict["cost_ns"] == pytest.approx(in_all_ns / 23, rel=0.2)


def test_equal_parts_name_nobody(tmp_path: Path) -> None:
    assert [one for one in verdicts(tmp_path, (6, 6)) if one["cause"] == "evaluation"] == []
