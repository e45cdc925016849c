"""A job that aborts its NCCL group sees what it would see without a recorder, goes on, and its spans are readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines import details, recorded_rows
from tests.gpu.jobs import BACKENDS, NEEDS_NCCL, run_program

STEPS = 5

pytestmark = NEEDS_NCCL


def outcome(output: Path, backend: str, **environment: str) -> dict[str, str]:
    variables = {"COMMTRACE_DIR": str(output / "run"), **environment}
    run_program(["aborts_nccl.py", output, backend], variables, ranks=2, timeout=60)
    told: dict[str, str] = json.loads((output / "rank-0.json").read_text())
    return told


@pytest.mark.answers("aborted group")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aborted_group_ends_as_without_and_leaves_readable_spans(
    tmp_path: Path, backend: str, figures: list[str]
) -> None:
    plain = outcome(tmp_path / "plain", backend, COMMTRACE_ENABLED="0")
    recorded = outcome(tmp_path / "recorded", backend)

    figures.append(f"training sees {plain['raised'] or 'nothing'} without, {recorded['raised'] or 'nothing'} with")
    assert recorded == plain
    for rank in range(2):
        rows = recorded_rows(tmp_path / "recorded" / "run", rank)
        assert details(rows, "end")
        assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(STEPS + 1))
        steps = sorted(row["step"] for row in rows if row["kind"] == "collective" and row["step"] >= 0)
        assert steps == list(range(STEPS))
        assert [row["name"] for row in rows if row["kind"] == "user"] == ["alone"]
