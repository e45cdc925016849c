"""Modules, data, clipping and checkpoints of a real job, which computes the same bits with and without them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from commtrace.analysis.summary import summarise
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "phases_training.py"
STEPS = 4


def digests(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d computed \w{64}", output))


def test_modules_and_phases_of_a_job_that_computes_the_same_bits(tmp_path: Path) -> None:
    plain = fork([PROGRAM, tmp_path / "plain"], 2, {"COMMTRACE_ENABLED": "0"}, timeout=120)
    assert plain.returncode == 0, plain.stdout

    options = {"COMMTRACE_DIR": str(tmp_path / "run"), "COMMTRACE_MODULES": "depth=2"}
    recorded = fork([PROGRAM, tmp_path / "recorded"], 2, options, timeout=120)

    assert recorded.returncode == 0, recorded.stdout
    assert len(digests(plain.stdout)) == 2
    assert digests(recorded.stdout) == digests(plain.stdout)
    run = load_run(tmp_path / "run")
    assert run.problems == ()
    for rank in run.ranks:
        names = Counter(row["name"] for row in rows(run, rank, schema.MODULE))
        parts = [f"layers.{layer}{part}" for layer in (0, 1) for part in ("", ".attention", ".mlp")]
        # The first forward of the last operation is not repeated: nothing of it is needed.
        expected = {f"{part}{way}" for part in ("Model", *parts) for way in ("", " backward")}
        assert {name: names[name] for name in expected} == dict.fromkeys(expected, STEPS)
        assert [row["name"] for row in rows(run, rank, schema.RECOMPUTE)] == ["recompute"] * 2 * STEPS
        assert names["layers.0 recompute"] == names["layers.1 recompute"] == STEPS
        phases = [(row["kind"], row["name"], row["step"]) for row in rows(run, rank, schema.DATA, schema.CHECKPOINT)]
        assert [phase for phase in phases if phase[2] >= 0] == [
            *(("data", "next batch", step) for step in range(STEPS)),
            ("checkpoint", "distributed.checkpoint.save", STEPS - 1),
        ]
        clipped = [row["step"] for row in rows(run, rank, schema.OPTIMIZER) if row["name"] == "clip_grad_norm"]
        assert clipped == list(range(STEPS))
    told = summarise(tmp_path / "run")
    assert {row.name for row in told.modules} == {"Model", "layers.*", "layers.*.attention", "layers.*.mlp"}
    assert all(rank.part("checkpoint") > 0 and rank.part("data") > 0 for rank in told.ranks)
