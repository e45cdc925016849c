"""``commtrace merge``, and the commands that take several directories in its stead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.trace.files.nodes import write_node

runner = CliRunner()


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    write_node(tmp_path / "left", [0, 1], "job")
    write_node(tmp_path / "right", [2, 3], "job")
    return [str(tmp_path / "left"), str(tmp_path / "right")]


def test_it_says_what_it_made_and_what_to_do_next(tmp_path: Path, nodes: list[str]) -> None:
    result = runner.invoke(app, ["merge", *nodes, "-o", str(tmp_path / "run")])

    assert result.output == f"{tmp_path}/run: 4 ranks of 2 directories.\nNext: commtrace summary {tmp_path}/run\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"rank-{rank:05}" for rank in range(4)]


def test_what_is_not_one_job_is_a_user_error(tmp_path: Path, nodes: list[str]) -> None:
    write_node(tmp_path / "other", [3], "other")
    result = runner.invoke(app, ["merge", *nodes, str(tmp_path / "other"), "-o", str(tmp_path / "run")])

    assert result.exit_code == 2
    assert "are not of one job: both hold rank 3." in result.output


@pytest.mark.parametrize("command", ["summary", "straggler", "pipeline", "bandwidth", "doctor", "top"])
def test_a_command_takes_the_directories_of_several_nodes(nodes: list[str], command: str) -> None:
    result = runner.invoke(app, [command, *nodes, *(["--once"] if command == "top" else []), "--json"])
    answer = json.loads(result.output)

    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "no readable files" not in result.output
    if command in ("summary", "doctor"):
        assert answer["run"]["world_size"] == 4


def test_a_report_and_an_export_are_written_of_several_nodes(tmp_path: Path, nodes: list[str]) -> None:
    report = runner.invoke(app, ["report", *nodes, "-o", str(tmp_path / "report.html")])
    export = runner.invoke(app, ["export", *nodes, "-o", str(tmp_path / "trace.json")])

    assert (report.exit_code, export.exit_code) == (0, 0), report.output + export.output
    assert f"commtrace export {' '.join(nodes)}" in report.output
