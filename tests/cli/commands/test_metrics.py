"""The critical path of a recorded run as metrics: in a file, at an endpoint, to a receiver of OTLP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.breakdown.critical_path import CriticalPath
from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from tests.exporters.otlp.receiver import attributes, receiving
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run
from tests.waiting import until

runner = CliRunner()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", PipelineJob(2, 4, steps=6, transfer_ns=10_000).run())


def critical_path_of(run: Path) -> CriticalPath:
    path = summarise(run, "0:").critical_path
    assert path
    return path


def test_the_parts_are_those_of_the_summary_and_add_up_to_the_steps(recorded: Path) -> None:
    result = runner.invoke(app, ["metrics", str(recorded)])
    assert result.exit_code == 0, result.output
    samples = re.findall(r"^commtrace_critical_path_seconds_total\{(.*)\} (.*)$", result.stdout, re.MULTILINE)
    path = critical_path_of(recorded)

    assert sum(float(value) for _, value in samples) == pytest.approx(path.ns / 1e9)
    first = path.shares[0]
    assert samples[0][0] == f'kind="{first.kind}",node="node0",rank="{first.rank}",role="",run_id="made-run"'
    assert 'commtrace_critical_path_steps_total{run_id="made-run"} 6.0' in result.stdout
    assert 'commtrace_critical_path_last_step{run_id="made-run"} 5.0' in result.stdout


def test_the_lost_time_adds_up_to_the_steps(recorded: Path) -> None:
    printed = runner.invoke(app, ["metrics", str(recorded)]).stdout
    parts = dict(re.findall(r'^commtrace_lost_seconds\{part="(\w+)",run_id="made-run"\} (.*)$', printed, re.MULTILINE))
    lost = summarise(recorded, "0:").lost_time
    assert lost

    assert set(parts) == {
        *("ideal", "stragglers", "imbalance", "exposed_communication", "bubble", "input", "rest"),
    }
    assert sum(map(float, parts.values())) == pytest.approx(lost.steps_ns / 1e9)
    assert float(parts["bubble"]) == pytest.approx(lost.bubble_ns / 1e9)


def test_json_has_the_times_in_nanoseconds(recorded: Path) -> None:
    printed = json.loads(runner.invoke(app, ["metrics", str(recorded), "--json"]).stdout)
    summary = summarise(recorded, "0:")
    assert summary.critical_path
    assert summary.lost_time

    assert printed["critical_path"] == summary.critical_path.to_json()
    assert printed["lost_time"] == summary.lost_time.to_json()
    assert (printed["run"], printed["last_step"], printed["has_ended"]) == ("made-run", 5, False)


def test_a_file_for_node_exporter_is_written_whole(recorded: Path, tmp_path: Path) -> None:
    printed = runner.invoke(app, ["metrics", str(recorded)]).stdout

    result = runner.invoke(app, ["metrics", str(recorded), "-o", str(tmp_path / "path.prom")])

    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "path.prom").read_text() == printed


def test_they_are_sent_as_otlp(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        result = runner.invoke(app, ["metrics", str(recorded), "--otlp"])
    assert (result.exit_code, result.output) == (0, "")
    (of_run,) = receiver.metrics[0].resource_metrics
    metrics = {metric.name: metric for metric in of_run.scope_metrics[0].metrics}
    points = metrics["commtrace.critical.path"].sum.data_points

    assert sorted(metrics) == [
        "commtrace.critical.path",
        "commtrace.critical.path.last.step",
        "commtrace.critical.path.steps",
        "commtrace.critical.path.uncertain",
        "commtrace.lost",
    ]
    assert sum(point.as_double for point in points) == pytest.approx(critical_path_of(recorded).ns / 1e9)
    assert {"rank", "kind", "role", "node", "run_id"} == set(attributes(points[0]))
    assert attributes(of_run.resource)["commtrace.run.id"] == "made-run"


def test_prometheus_is_told_where_they_are_served(recorded: Path, tmp_path: Path) -> None:
    """Until the command is interrupted; then the target file is gone."""
    command = [sys.executable, "-m", "commtrace", "metrics", str(recorded), "--serve", "127.0.0.1:0", "--every", "0.2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr is not None
            line = serving.stderr.readline()
            target = Path(line.rpartition(", by ")[2].strip())
            (address,) = json.loads(target.read_text())[0]["targets"]
            assert f"http://{address}" in line

            def is_told() -> bool:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
                    return 'commtrace_critical_path_steps_total{run_id="made-run"} 5.0' in answer.read().decode()

            until(is_told)  # its first look at the files is under way
        finally:
            serving.send_signal(2)
            serving.wait(30)
    assert (serving.returncode, list(target.parent.iterdir())) == (0, [])
