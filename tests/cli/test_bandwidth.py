"""``commtrace bandwidth``: what a terminal of a hundred columns shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app

runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "run"
    result = runner.invoke(app, ["synth", "-o", str(directory), "--pp", "2", "--dp", "4", "--steps", "3"])
    assert result.exit_code == 0, result.output
    return directory


@pytest.mark.parametrize("by", ["operation", "size", "group"])
def test_no_line_is_longer_than_a_hundred_columns(made: Path, by: str) -> None:
    lines = runner.invoke(app, ["bandwidth", str(made), "--by", by]).output.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line.startswith("dp ")]


def test_sizes_and_groups_have_a_column(made: Path) -> None:
    assert "MiB" in runner.invoke(app, ["bandwidth", str(made), "--by", "size"]).output
    assert " 4–7 " in runner.invoke(app, ["bandwidth", str(made), "--by", "group"]).output
