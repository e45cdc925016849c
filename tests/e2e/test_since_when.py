"""What is said of a running job and afterwards is one moment: the step, and the time of day of that step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.e2e.launch import REPOSITORY, Completed, fork
from tests.findings.reading import in_json

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "slow_from_step.py"
RANKS = 3


class Job(threading.Thread):
    def __init__(self, directory: Path, seconds: float, *faults: str) -> None:
        super().__init__()
        self.directory = directory
        self.completed: Completed | None = None
        self._arguments: list[str | Path] = [PROGRAM, str(seconds), *faults]
        self._timeout = seconds + 90
        self._variables = {
            "COMMTRACE_DIR": str(directory),
            "COMMTRACE_EXPORT": "monitor",
            "COMMTRACE_MONITOR_SECONDS": "2",
            "PYTHONPATH": str(REPOSITORY),
        }
        self.start()

    def run(self) -> None:
        self.completed = fork(self._arguments, RANKS, self._variables, timeout=self._timeout)

    def named(self, rank: int) -> dict[str, Any]:
        """The rank's finding in the monitor's state, once it holds."""
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and self.is_alive():
            path = self.directory / "monitor.json"
            for finding in json.loads(path.read_text())["findings"] if path.exists() else ():
                if finding["kind"] == "slow" and finding["ranks"] == [rank]:
                    found: dict[str, Any] = finding
                    return found
            time.sleep(0.1)
        raise AssertionError(f"rank {rank} was not named: {self.completed and self.completed.stdout}")


def printed(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_the_monitor_top_and_the_summary_name_the_step_in_which_a_rank_became_slow(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, 24, "1:30:99999")
    try:
        named = job.named(1)
        shown = printed("top", str(run), "--once", "--last", "10")
    finally:
        job.join()
    assert job.completed is not None
    assert job.completed.returncode == 0, job.completed.stdout
    assert abs(named["since_step"] - 30) <= named["since_within_steps"] <= 2
    assert f"since step {named['since_step']}, " in job.completed.stdout or named["since_within_steps"]
    (slow,) = [finding for finding in shown["findings"] if finding["id"] == named["id"]]
    assert (slow["kind"], slow["since_ns"], slow["since_step"]) == ("slow", named["since_ns"], named["since_step"])

    # Of a busy machine a rank may besides have lost its core in a few steps.
    (found,) = [finding for finding in in_json(printed("summary", str(run))) if finding["occurrence"] is None]
    assert found["ranks"] == [1]
    assert abs(found["since_step"] - named["since_step"]) <= named["since_within_steps"]
    since_ns = found["stretches"][0]["since_ns"] if found["stretches"] else found["since_ns"]
    if found["since_step"] == named["since_step"]:
        assert since_ns == pytest.approx(named["since_ns"], abs=2_000_000), "the same step began at the same time"
    (event, *_) = [json.loads(line) for line in (run / "monitor.jsonl").read_text().splitlines()]
    assert (event["kind"], event["finding"]["id"]) == ("found", named["id"])


def test_a_fault_that_moves_between_ranks_gives_findings_with_the_steps_of_the_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, 36, "1:30:129", "2:130:99999")
    try:
        live = {rank: job.named(rank) for rank in (1, 2)}
    finally:
        job.join()
    found = in_json(printed("summary", str(run)))
    # What strikes in a few steps, as garbage collection after the start, is no part of the fault.
    verdicts = {finding["ranks"][0]: finding for finding in found if finding["occurrence"] is None}
    assert verdicts.keys() == live.keys()
    for rank, begin in ((1, 30), (2, 130)):
        within = live[rank]["since_within_steps"]
        assert abs(live[rank]["since_step"] - begin) <= within <= 2
        assert abs(verdicts[rank]["stretches"][0]["first"] - live[rank]["since_step"]) <= within
