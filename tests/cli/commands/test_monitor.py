"""``commtrace monitor``, with a job that nobody reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.exporters.monitor import store
from commtrace.exporters.monitor.messages import WatchedJob
from commtrace.live.monitoring.standing import found
from commtrace.trace.json_values import fields_to_json
from tests.history.factory import write_monitor, write_run
from tests.live.findings import SECOND, slow_finding


def watch(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in a directory for one window of a job."""
    known = store.MonitorStore(WatchedJob("r1", 0, 2, 0.02))
    monkeypatch.setattr(store, "MonitorStore", lambda: known)
    command = ["monitor", "--serve", "127.0.0.1:0", "--windows", "1", "-o", str(output)]
    watched = CliRunner().invoke(app, command, env={"COMMTRACE_MONITOR_TOKEN": 32 * "a"})
    assert watched.exit_code == 0, watched.output


def test_findings_of_the_monitor_outlive_a_deleted_run_for_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs" / "r1", hosts=("alpha", "beta"))
    write_run(tmp_path / "runs" / "other")
    write_monitor(run, fields_to_json(found(slow_finding(1, hosts=("beta",)), 1_700_000_002 * SECOND, "GPU")))
    watch(run, monkeypatch)
    shutil.rmtree(run)

    printed = CliRunner().invoke(app, ["hosts", str(tmp_path / "runs"), "--json"])

    assert printed.exit_code == 0, printed.output
    report = json.loads(printed.stdout)
    worst = report["hosts"][0]
    assert (worst["host"], worst["named"], worst["judged"]) == ("beta", 1, 1)
    assert worst["namings"][0]["sources"] == ["monitor"]


def test_outside_of_a_run_directory_it_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(tmp_path, monkeypatch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monitor.json"]


def test_its_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(tmp_path / "new" / "folder", monkeypatch)
    assert (tmp_path / "new" / "folder" / "monitor.json").exists()


def test_a_directory_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["monitor", "127.0.0.1:0", "-o", str(tmp_path / "file" / "folder")]
    result = CliRunner().invoke(app, command, env={"COMMTRACE_MONITOR_TOKEN": 32 * "a"})
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr
