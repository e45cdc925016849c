"""A rank that sleeps in every forward is named, with what it costs; where nobody sleeps nobody is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import launch, run

pytestmark = pytest.mark.e2e
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

MICROBATCHES, SLEEP_MS = 8, 60
"""What the others need for a forward while ranks share few cores, a tenth to a half of this, makes it cost less."""


def stragglers(directory: Path, *options: str) -> list[dict[str, Any]]:
    # A small model: where four ranks share few cores, what they compute would make each other late.
    model = ["--microbatches", str(MICROBATCHES), "--hidden", "64", "--sequence", "32"]
    training = ["examples/train_megatron_gpt.py", "--pipeline", "2", "--data", "2", *model, *options]
    completed = launch(training, 4, {"COMMTRACE_DIR": str(directory)}, timeout=180)
    assert completed.returncode == 0, completed.stdout
    commtrace = Path(sys.executable).with_name("commtrace")
    summary = run([str(commtrace), "summary", str(directory), "--json"])
    assert summary.returncode == 0, summary.stdout
    found: list[dict[str, Any]] = json.loads(summary.stdout)["stragglers"]
    return found


def test_the_slow_rank_is_named_with_its_cost(tmp_path: Path) -> None:
    named = stragglers(tmp_path, "--slow-rank", "1", "--slow-ms", str(SLEEP_MS))

    assert [straggler["rank"] for straggler in named] == [1]
    assert named[0]["cause"] == "compute"
    # Every forward of the first stage is on the critical path of its pipeline, and the other replica waits for it.
    assert named[0]["cost_ms_per_step"] == pytest.approx(MICROBATCHES * SLEEP_MS, rel=0.3)


def test_nobody_is_named_where_nobody_is_slow(tmp_path: Path) -> None:
    assert stragglers(tmp_path) == []
