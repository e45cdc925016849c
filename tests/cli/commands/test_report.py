from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.windows.run import open_run
from commtrace.cli.main import app
from tests.analysis.comparison.two_rank_jobs import job
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()


def test_a_run_becomes_one_file(tmp_path: Path) -> None:
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=4).run())
    output = tmp_path / "page.html"

    result = runner.invoke(app, ["report", str(recorded), "-o", str(output)])

    assert result.exit_code == 0, result.output
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"{output}: " in result.stdout
    assert "The timeline holds all 3 steps." in result.stdout
    assert f"commtrace export {recorded}" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines() if str(tmp_path) not in line)


def test_steps_are_chosen(tmp_path: Path) -> None:
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=20).run())
    output = tmp_path / "page.html"

    result = runner.invoke(app, ["report", str(recorded), "-o", str(output), "--steps", "3:15"])

    assert "The timeline holds all 12 steps." in result.stdout


def test_only_the_drawn_steps_of_a_large_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=30).run())
    pages = [tmp_path / "whole.html", tmp_path / "windows.html"]

    whole = runner.invoke(app, ["report", str(recorded), "-o", str(pages[0])])
    monkeypatch.setattr("commtrace.cli.commands.report.open_run", partial(open_run, most_bytes=0, most_rows=50))
    windows = runner.invoke(app, ["report", str(recorded), "-o", str(pages[1])])

    assert windows.exit_code == 0, windows.output
    assert "The timeline holds 10 of the 29 steps: the typical one (" in windows.stdout
    assert windows.stdout.replace("windows.html", "whole.html") == whole.stdout
    of_whole, of_windows = map(_resources, pages)
    assert of_whole.keys() - of_windows.keys() == {"slowdown.json"}  # it reads the run again
    assert of_windows.keys() <= of_whole.keys()
    maps = ("map.json", "map", "groups.json", "links.json", "messages", "health.json")
    for name in ("run.json", "summary.json", "plan.json", "plan/work", *maps):
        assert of_windows[name] == of_whole[name]


def _resources(page: Path) -> dict[str, str]:
    return dict(re.findall(r'<script[^>]* id="resource:([^"]+)">(.*?)</script', page.read_text("utf-8"), re.DOTALL))


def test_a_directory_without_a_run_is_a_message(tmp_path: Path) -> None:
    result = runner.invoke(app, ["report", str(tmp_path)])

    assert result.exit_code == 2
    assert "holds no recorded run" in result.output


def test_a_report_against_another_run_has_the_differences_and_a_step_of_it(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job(transfer=80))
    compared = json.loads(runner.invoke(app, ["compare", str(before), str(after), "--json"]).output)

    result = runner.invoke(app, ["report", str(after), "--against", str(before), "-o", str(tmp_path / "report.html")])

    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text("utf-8")
    embedded = re.search(r'id="resource:comparison.json">(.*?)</script>', page)
    assert embedded is not None
    assert json.loads(embedded[1])["parts_ns"] == compared["parts_ns"]
    assert 'id="resource:other/work"' in page
