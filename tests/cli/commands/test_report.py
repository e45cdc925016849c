from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.cli.recorded import record
from tests.pipeline_factory import PipelineJob

runner = CliRunner()


def test_a_run_becomes_one_file(tmp_path: Path) -> None:
    recorded = record(PipelineJob(stages=2, microbatches=2, steps=4).run(), tmp_path / "run")
    output = tmp_path / "page.html"

    result = runner.invoke(app, ["report", str(recorded), "-o", str(output)])

    assert result.exit_code == 0, result.output
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"{output}: " in result.stdout
    assert "The timeline holds all 3 steps." in result.stdout
    assert f"commtrace export {recorded}" in result.stdout


def test_steps_are_chosen(tmp_path: Path) -> None:
    recorded = record(PipelineJob(stages=2, microbatches=2, steps=20).run(), tmp_path / "run")
    output = tmp_path / "page.html"

    result = runner.invoke(app, ["report", str(recorded), "-o", str(output), "--steps", "3:15"])

    assert "The timeline holds all 12 steps." in result.stdout


def test_a_directory_without_a_run_is_a_message(tmp_path: Path) -> None:
    result = runner.invoke(app, ["report", str(tmp_path)])

    assert result.exit_code == 2
    assert "holds no recorded run" in result.output
