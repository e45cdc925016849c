"""The page of runs that nobody made up: a job that was recorded, and a recording of kernels that was imported.

Numbers of the page are those of ``commtrace summary --json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.browser.page_texts import cells, duration, milliseconds
from tests.browser.reader import Reader
from tests.e2e.launch import fork
from tests.reference import reference_data

PROGRAM = "tests/e2e/programs/pipelining.py"
MICROBATCHES = 8


def invoke(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def opened(reader: Reader, run: Path, directory: Path) -> dict[str, Any]:
    """Open the report of a run, and return its summary."""
    summary: dict[str, Any] = json.loads(invoke("summary", run, "--json"))
    page = directory / "report.html"
    invoke("report", run, "-o", page)
    reader.load(page)
    return summary


def assert_numbers_are_those_of(summary: dict[str, Any], reader: Reader) -> None:
    assert reader.page.locator("#found .what").first.inner_text() == summary["findings"][0]["words"]
    by_rank = {row[0].split(" · ")[0]: row for row in cells(reader, "#breakdown-table")}
    assert {name: row[1:3] for name, row in by_rank.items()} == {
        f"rank {rank['rank']}": [milliseconds(rank["wall_ns"]), milliseconds(rank["compute_ns"])]
        for rank in summary["ranks"]
    }
    assert [[row[0], row[1], row[-1]] for row in cells(reader, "#communication")] == [
        [row["role"], row["operation"], duration(row["wait_ns"])] for row in summary["communication"]
    ]
    assert reader.errors == []
    assert [url for url in reader.requests if not url.startswith("file:")] == []


@pytest.mark.e2e
def test_a_recorded_job(reader: Reader, tmp_path: Path) -> None:
    completed = fork([PROGRAM, tmp_path, "ScheduleInterleaved1F1B:sgd"], 2, timeout=120)
    assert completed.returncode == 0, completed.stdout

    summary = opened(reader, tmp_path / "ScheduleInterleaved1F1B:sgd", tmp_path)

    assert_numbers_are_those_of(summary, reader)
    for rank in (0, 1):
        forwards = reader.boxes(rank=rank, kind="forward")
        assert sorted((box["chunk"], box["microbatch"]) for box in forwards) == [
            (chunk, microbatch) for chunk in (0, 1) for microbatch in range(MICROBATCHES)
        ]


def test_an_imported_recording_of_kernels(reader: Reader, tmp_path: Path) -> None:
    files = sorted(reference_data("kineto", "dlrm_8ranks").glob("*.json.gz"))
    invoke("import", "kineto", *files, "-o", tmp_path / "run")

    summary = opened(reader, tmp_path / "run", tmp_path)

    assert_numbers_are_those_of(summary, reader)
    assert {box["rank"] for box in reader.boxes(table="communication")} == set(range(8))
    assert [row[2] for row in cells(reader, "#communication")] == ["8", "8"]
    longest = max(reader.boxes(table="communication", rank=1), key=lambda box: float(box["width"]))
    reader.point_at(longest)
    assert "all_to_all · world" in reader.tooltip()
