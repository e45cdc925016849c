from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.cli.main import app


def test_a_run_is_made_with_the_truth_beside_it(tmp_path: Path) -> None:
    words = "--tp 2 --pp 2 --dp 2 --chunks 2 --microbatches 4 --num-steps 3 --gpus-per-host 4 --fault slow-rank=3:1.2"
    clocks = (
        "--clock-offset 5 --clock-offset 1=2 --clock-drift 0=10 --clock-step 1=250@0.2 --outliers 0.1 --missing 0.1"
    )
    result = CliRunner().invoke(app, ["synth", "-o", str(tmp_path / "made"), *words.split(), *clocks.split()])

    assert result.exit_code == 0, result.output
    assert "8 ranks" in result.output
    truth = json.loads((tmp_path / "made" / "truth.json").read_text())
    assert truth["faults"][0]["cost_ns_per_step"] > 0
    first, second = (host["clock"] for host in truth["hosts"])
    assert (first["drift_ppm"], first["step_ns"]) == (10.0, 0)
    assert (second["wall_error_ns"], second["step_ns"], second["step_at_ns"]) == (2_000_000, 250_000_000, 1_200_000_000)
    assert len(analyse(tmp_path / "made").run.ranks) == 8


def test_a_host_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["synth", "-o", str(tmp_path / "made"), "--clock-offset", "3=5"])

    assert result.exit_code == 2
    assert "host 3" in result.output
