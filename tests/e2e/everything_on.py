"""Jobs with everything recorded: how they are started, and what must be true of them."""

from __future__ import annotations

from pathlib import Path

from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.e2e.traces import rows

EVERYTHING = {
    "COMMTRACE_MODULES": "depth=2",
    "COMMTRACE_EXPORT": "monitor,prometheus,otlp",
    "COMMTRACE_OTLP_LEVEL": "modules",
    "COMMTRACE_OTLP_METRICS": "1",
    "COMMTRACE_SAMPLE": "2",
    "COMMTRACE_TRIGGER_SIGNAL": "SIGUSR2",
    "COMMTRACE_HANG_SECONDS": "1",
    "COMMTRACE_MONITOR_SECONDS": "0.5",
}
NOTHING = {"COMMTRACE_ENABLED": "0"}


def places(directory: Path) -> dict[str, str]:
    """Where files go: those of OpenTelemetry instead of to a collector."""
    return {"COMMTRACE_DIR": str(directory), "COMMTRACE_OTLP_FILE": str(directory / "otlp")}


def assert_nobody_complained(output: str) -> None:
    """No part of commtrace gave up: it would leave training alone all the more."""
    for words in ("switched off", "no export to", "commtrace is off", "Traceback"):
        assert words not in output, output


def assert_everything_was_on(run: Run, directory: Path, *, first_step: int) -> None:
    assert run.problems == ()
    for rank, trace in run.ranks.items():
        assert trace.closed
        assert trace.topology["recording"]["sample"] == 2
        steps = sorted({row["step"] for row in rows(run, rank, schema.STEP)})
        assert steps == list(range(first_step, first_step + len(steps)))
        assert len(steps) >= 3
        modules = list(rows(run, rank, schema.MODULE))
        assert {row["name"].endswith(" backward") for row in modules} == {False, True}
        assert trace.aggregates is not None
    assert len(list((directory / "otlp").iterdir())) >= len(run.ranks)
