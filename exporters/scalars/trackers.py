"""Runs of W&B and MLflow that the script has open. Neither is ever imported or started here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from commtrace.exporters.scalars.series import PREFIX, DatedEvent, Point

_STEP: Final = "step"
_MOST_FINDINGS: Final = 100


class _WandbRun(Protocol):
    """The part of ``wandb.Run`` that is used."""

    @property
    def step(self) -> int: ...

    @property
    def summary(self) -> MutableMapping[str, object]: ...

    def define_metric(self, name: str, *, step_metric: str) -> object: ...

    def log(self, data: Mapping[str, float], *, commit: bool) -> None: ...


class _MlflowRunInfo(Protocol):
    @property
    def run_id(self) -> str: ...


class _MlflowRun(Protocol):
    """The part of ``mlflow.ActiveRun`` that is used."""

    @property
    def info(self) -> _MlflowRunInfo: ...


class _TrackerLog:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, findings: Sequence[DatedEvent]) -> str:
        """Return the newest findings as text, the newest first."""
        new = [f"After step {step}: {event.sentence}" for step, event in findings]
        self._lines = [*reversed(new), *self._lines][:_MOST_FINDINGS]
        return "\n".join(self._lines)


class WandbRuns:
    """Adds scalars to the rows of the W&B run that is open, and findings to its summary.

    Only the script's own ``wandb.log`` ends a row; values with ``commit=False`` go into the open one. So W&B's steps
    stay those of the script, and a row holds at most one point. The x axis of the scalars is the job's step.
    """

    def __init__(self) -> None:
        self._run: _WandbRun | None = None
        self._row = -1
        self._axes: set[str] = set()
        self._log = _TrackerLog()

    def is_open(self) -> bool:
        return _open_wandb_run() is not None

    def is_ready(self) -> bool:
        """Return True if the row of the last point is complete."""
        run = _open_wandb_run()
        if run is not None and run is self._run:
            with _until_finished(run):
                return run.step != self._row
        return True  # steps while no run is open are in no row

    def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        run = _open_wandb_run()
        if run is not None:
            with _until_finished(run):
                self._write(run, points, findings)

    def close(self) -> None:
        """Leave the run to the script."""

    def _write(self, run: _WandbRun, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        if run is not self._run:
            self._run, self._log = run, _TrackerLog()
            self._axes.clear()
        for point in points:
            axis = f"{PREFIX}/{point.scope}/{_STEP}"
            if axis not in self._axes:
                self._axes.add(axis)
                run.define_metric(f"{PREFIX}/{point.scope}/*", step_metric=axis)
            run.log({**point.tagged, axis: point.step}, commit=False)
        if points:
            self._row = run.step
        if findings:
            run.summary[f"{PREFIX}/findings"] = self._log.add(findings)


def _open_wandb_run() -> _WandbRun | None:
    run: _WandbRun | None = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is None or getattr(run, "disabled", False) else run


@contextmanager
def _until_finished(run: _WandbRun) -> Iterator[None]:
    """Ignore exceptions of a run that the script has finished meanwhile."""
    try:
        yield
    except Exception:
        if _open_wandb_run() is run:
            raise


class MlflowRuns:
    """Adds scalars to the MLflow run that is open, at the job's steps, and findings as ``commtrace/findings.txt``."""

    def __init__(self) -> None:
        self._run_id = ""
        self._log = _TrackerLog()

    def is_open(self) -> bool:
        return _open_mlflow_run() is not None

    def is_ready(self) -> bool:
        return True

    def write(self, points: Sequence[Point], findings: Sequence[DatedEvent]) -> None:
        run = _open_mlflow_run()
        if run is None:
            return
        mlflow = sys.modules["mlflow"]
        if run.info.run_id != self._run_id:
            self._run_id, self._log = run.info.run_id, _TrackerLog()
        client = mlflow.MlflowClient()
        metrics = [
            mlflow.entities.Metric(tag, value, round(point.time * 1e3), point.step)
            for point in points
            for tag, value in point.tagged.items()
        ]
        if metrics:
            client.log_batch(self._run_id, metrics=metrics)
        if findings:
            client.log_text(self._run_id, self._log.add(findings), f"{PREFIX}/findings.txt")

    def close(self) -> None:
        """Leave the run to the script."""


def _open_mlflow_run() -> _MlflowRun | None:
    """Return the newest run that any thread has open, None if there is none.

    Raises:
        RuntimeError: this version of MLflow does not show the runs of other threads.
    """
    fluent = sys.modules.get("mlflow.tracking.fluent")
    if fluent is None:
        return None
    # The public active_run() knows only runs of the calling thread, but before MLflow 2.14, those of all threads.
    of_any_thread = getattr(fluent, "_get_latest_active_run", None)
    run: _MlflowRun | None
    if of_any_thread is not None:
        run = of_any_thread()
        return run
    run = fluent.active_run()
    if run is None:
        version = getattr(sys.modules.get("mlflow"), "__version__", "?")
        raise RuntimeError(f"no run is open, or MLflow {version} does not show other threads that one is")
    return run
