"""Runs of W&B and MLflow: those that the script has open, and no other one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.exporters.scalars.series import DatedEvent, Point
from commtrace.exporters.scalars.trackers import MlflowRuns, WandbRuns
from commtrace.findings.status import LiveEvent
from tests.live.findings import SECOND, silent_finding

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120


def point(step: int) -> Point:
    return Point("rank_0", step, 1_000.0 + step, {"step_seconds": step / 10})


def found(step: int, sentence: str) -> DatedEvent:
    return DatedEvent(step, LiveEvent("found", SECOND, silent_finding(2), sentence))


class WandbRun:
    """A run of W&B: its script logs rows, ``commit=False`` adds to the open one."""

    disabled = False

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, float]] = {}
        self.summary: dict[str, str] = {}
        self.axes: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float], commit: bool = True) -> None:
        if self.error is not None:
            raise self.error
        self.rows.setdefault(self.step, {}).update(values)
        self.step += commit


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_row_of_wandb_holds_one_point_and_ends_when_the_script_says_so(wandb: SimpleNamespace) -> None:
    sink, run = WandbRuns(), WandbRun()
    wandb.run = run
    assert sink.is_ready()
    sink.write([point(3), Point("job", 2, 1.0, {"stragglers": 1.0})], [])
    assert not sink.is_ready()
    assert run.step == 0
    run.log({"loss": 0.5})
    assert sink.is_ready()
    sink.write([point(5)], [])
    assert run.rows == {
        0: {
            "commtrace/rank_0/step_seconds": 0.3,
            "commtrace/rank_0/step": 3,
            "commtrace/job/stragglers": 1.0,
            "commtrace/job/step": 2,
            "loss": 0.5,
        },
        1: {"commtrace/rank_0/step_seconds": 0.5, "commtrace/rank_0/step": 5},
    }
    assert run.axes == [
        ("commtrace/rank_0/*", "commtrace/rank_0/step"),
        ("commtrace/job/*", "commtrace/job/step"),
    ]


def test_findings_are_in_the_summary_of_a_wandb_run_the_newest_first(wandb: SimpleNamespace) -> None:
    sink, run = WandbRuns(), WandbRun()
    wandb.run = run
    sink.write([], [found(7, "Rank 2 is silent.")])
    sink.write([], [found(9, "Rank 2 reports again.")])
    assert run.rows == {}
    assert run.summary == {"commtrace/findings": "After step 9: Rank 2 reports again.\nAfter step 7: Rank 2 is silent."}


def test_a_second_wandb_run_begins_anew(wandb: SimpleNamespace) -> None:
    sink, first, second = WandbRuns(), WandbRun(), WandbRun()
    wandb.run = first
    sink.write([point(1)], [found(1, "Rank 2 is silent.")])
    wandb.run = second
    assert sink.is_ready()
    sink.write([point(2)], [found(2, "Rank 2 reports again.")])
    assert second.axes == first.axes
    assert second.summary == {"commtrace/findings": "After step 2: Rank 2 reports again."}


def test_a_wandb_run_that_is_finished_meanwhile_is_no_failure(
    wandb: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, run = WandbRuns(), WandbRun()
    run.error = RuntimeError("the run is finished")
    wandb.run = run
    with pytest.raises(RuntimeError):
        sink.write([point(1)], [])

    def define_metric(name: str, step_metric: str) -> None:
        wandb.run = None  # another thread calls wandb.finish()

    monkeypatch.setattr(run, "define_metric", define_metric)
    sink = WandbRuns()
    sink.write([point(1)], [])
    assert sink.is_ready()
    sink.write([point(2)], [])


@pytest.mark.parametrize("sink", [WandbRuns(), MlflowRuns()])
def test_a_tracker_that_the_script_has_not_imported_is_not_imported(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "mlflow.tracking.fluent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert sink.is_ready()
    sink.write([point(1)], [found(1, "Rank 2 is silent.")])
    assert not {"wandb", "mlflow"} & set(sys.modules)


def test_a_disabled_wandb_run_is_none(wandb: SimpleNamespace) -> None:
    wandb.run = SimpleNamespace(disabled=True)
    WandbRuns().write([point(1)], [found(1, "Rank 2 is silent.")])


def test_mlflow_has_the_steps_of_the_job_and_all_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    client = SimpleNamespace(
        log_batch=lambda run, metrics: logged.append((run, metrics)), log_text=lambda *given: logged.append(given)
    )
    metric = SimpleNamespace(Metric=lambda *given: given)
    runs: list[Any] = []
    fluent = SimpleNamespace(_get_latest_active_run=lambda: runs[-1] if runs else None)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client, entities=metric))
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)
    sink = MlflowRuns()
    sink.write([point(1)], [])
    assert logged == []
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="a")))
    sink.write([point(2)], [found(2, "Rank 2 is silent.")])
    sink.write([], [found(3, "Rank 2 reports again.")])
    both = "After step 3: Rank 2 reports again.\nAfter step 2: Rank 2 is silent."
    assert logged == [
        ("a", [("commtrace/rank_0/step_seconds", 0.2, 1_002_000, 2)]),
        ("a", "After step 2: Rank 2 is silent.", "commtrace/findings.txt"),
        ("a", both, "commtrace/findings.txt"),
    ]


def test_an_mlflow_that_shows_no_runs_of_other_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter reports the error once. Old versions show all runs to every thread."""
    runs: list[Any] = [None]
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__version__="9.1"))
    fluent = SimpleNamespace(active_run=lambda: runs[-1])
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)
    with pytest.raises(RuntimeError, match=r"^no run is open, or MLflow 9\.1 does not show other threads that one is$"):
        MlflowRuns().is_open()
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="a")))
    assert MlflowRuns().is_open()


def logged_by(tracker: str, directory: Path) -> Any:
    """What a program has in its run at the end."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.exporters.scalars.programs", tracker]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_rows_of_a_real_wandb_run_stay_those_of_the_script(tmp_path: Path) -> None:
    seconds, step = "commtrace/rank_0/step_seconds", "commtrace/rank_0/step"
    assert logged_by("wandb", tmp_path) == {
        "rows": [
            {"_step": 0, seconds: 0.2, step: 2, "loss": 0.1},
            {"_step": 1, seconds: 0.4, step: 4},
            {"_step": 50, seconds: 0.5, step: 5, "loss": 0.2, "accuracy": 0.5},
            {"_step": 60, seconds: 0.6, step: 6, "loss": 0.3},
        ],
        "axes": {"commtrace/rank_0/*": step},
        "findings": "After step 6: Training has stopped.",
    }


def test_a_real_mlflow_run_is_found_from_another_thread(tmp_path: Path) -> None:
    assert logged_by("mlflow", tmp_path) == {
        "points": [[1_002_000, 2, 0.2], [1_003_000, 3, 0.3]],
        "findings": "After step 3: Training has stopped.",
    }
