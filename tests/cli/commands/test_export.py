from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import commtrace
from commtrace.cli.main import app
from commtrace.exporters import perfetto
from commtrace.python.sql import TABLES
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run
from tests.two_ranks import write_two_ranks

runner = CliRunner()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", PipelineJob(stages=2, microbatches=2, steps=3).run())


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


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_every_table_is_a_file(suffix: str, tmp_path: Path) -> None:
    run, tables = write_two_ranks(tmp_path / "run"), tmp_path / "tables"

    result = runner.invoke(app, ["export", str(run), "--format", suffix, "-o", str(tables)])

    assert result.exit_code == 0, result.output
    assert {path.name for path in tables.iterdir()} == {f"{name}.{suffix}" for name in TABLES if name != "files"}
    read = pyarrow.csv.read_csv if suffix == "csv" else pyarrow.parquet.read_table
    opened = commtrace.open(run)
    spans, steps = read(tables / f"spans.{suffix}"), read(tables / f"steps.{suffix}")
    assert f"{tables / f'spans.{suffix}'}: {len(spans)} rows" in result.stdout
    for name in ("rank", "start_ns", "end_ns", "kind", "bytes"):
        assert spans[name].to_pylist() == opened.spans()[name].to_pylist()
    assert steps["compute_ns"].to_pylist() == opened.steps()["compute_ns"].to_pylist()


def test_lists_of_ranks_are_text_in_csv(tmp_path: Path) -> None:
    run = write_two_ranks(tmp_path / "run")

    runner.invoke(app, ["export", str(run), "--format", "csv", "-o", str(tmp_path)])

    with (tmp_path / "communication_by_group.csv").open(newline="") as file:
        assert {row["ranks"] for row in csv.DictReader(file)} == {"[0, 1]"}


def test_without_the_package_chrome_json_is_written_and_reported(
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


def test_aicb_has_a_log_and_two_tables(tmp_path: Path) -> None:
    run, target = write_two_ranks(tmp_path / "run"), tmp_path / "aicb"

    result = runner.invoke(app, ["export", str(run), "--format", "aicb", "-o", str(target), "--rank", "1"])

    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in target.iterdir()) == ["communication.csv", "iterations.csv", "log.csv"]
    assert "rank 1, 0 calls before the first step and 3 in 3 steps, 6 lines" in result.stdout
    assert "AICB's analyser takes that step for the init phase" in result.output


def test_simai_has_a_workload_and_what_was_measured(tmp_path: Path) -> None:
    run, target = write_two_ranks(tmp_path / "run"), tmp_path / "simai"

    result = runner.invoke(app, ["export", str(run), "--format", "simai", "-o", str(target)])

    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in target.iterdir()) == ["overlap.txt", "result.csv", "workload.txt"]
    assert (target / "overlap.txt").read_text() == "-dp_o 0.0000\n"
    assert "ALLREDUCE\t1024" in (target / "workload.txt").read_text()
    assert "no compute file: record with COMMTRACE_MODULES=depth=4" in result.output


def test_a_rank_belongs_to_the_simulators(recorded: Path) -> None:
    result = runner.invoke(app, ["export", str(recorded), "--rank", "1"])

    assert result.exit_code == 2
    assert "--rank belongs to --format aicb and simai" in result.output
