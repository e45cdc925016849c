"""What ``commtrace pipeline`` reads and prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.windows.run import OpenedRun, open_run
from commtrace.cli.main import app
from commtrace.synth import Fault, Job, synthesize, write
from tests.findings.reading import in_json


def test_the_run_is_read_once_for_what_is_measured_and_for_the_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(pp=2, dp=4, microbatches=4, steps=12, faults=(Fault("slow-forward", (3,), 1.6),))
    write(synthesize(job), tmp_path / "run")
    expected = find_pipeline(open_run(tmp_path / "run"))
    measured: list[Callable[..., Any]] = []
    measure = OpenedRun.measure

    def counted(run: OpenedRun, measure_steps: Callable[..., Any]) -> Any:
        measured.append(measure_steps)
        return measure(run, measure_steps)

    monkeypatch.setattr(OpenedRun, "measure", counted)
    answer = json.loads(CliRunner().invoke(app, ["pipeline", str(tmp_path / "run"), "--json"]).stdout)

    assert len(measured) == 1
    assert expected is not None
    assert {name: answer[name] for name in expected.to_json()} == json.loads(json.dumps(expected.to_json()))
    assert [finding["ranks"] for finding in in_json(answer)] == [[3]]
