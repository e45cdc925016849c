from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.exporters import perfetto
from tests.cli.recorded import record
from tests.pipeline_factory import PipelineJob

runner = CliRunner()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(PipelineJob(stages=2, microbatches=2, steps=3).run(), tmp_path / "run")


def test_chrome_json_can_always_be_written(recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"

    result = runner.invoke(app, ["export", str(recorded), "--format", "chrome", "-o", str(output)])

    assert result.exit_code == 0, result.output
    slices = [event for event in json.loads(output.read_text("utf-8"))["traceEvents"] if event["ph"] == "X"]
    assert f"{output}: 3 steps, {len(slices)} slices." in result.stdout


@pytest.mark.skipif(not perfetto.is_available(), reason="needs the perfetto package")
def test_perfetto_is_native_where_its_package_is_installed(recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.pftrace"

    result = runner.invoke(app, ["export", str(recorded), "-o", str(output)])

    assert result.exit_code == 0, result.output
    assert not output.read_bytes().startswith(b"{")
    assert "https://ui.perfetto.dev" in result.stdout


def test_without_the_package_chrome_json_is_written_and_said(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    result = runner.invoke(app, ["export", str(recorded)])

    assert result.exit_code == 0, result.output
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text("utf-8"))
    assert "pip install 'perfetto" in result.output


def test_steps_are_chosen(recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"

    result = runner.invoke(app, ["export", str(recorded), "--format", "chrome", "-o", str(output), "--steps", "1"])

    assert f"{output}: 1 step," in result.stdout


def test_an_unknown_format_is_an_error(recorded: Path) -> None:
    result = runner.invoke(app, ["export", str(recorded), "--format", "xml"])

    assert result.exit_code == 2
