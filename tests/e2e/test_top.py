"""``commtrace top`` beside a real job of four ranks: on its files, on a rank's endpoint, on a Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.cli.main import app
from tests.e2e import prometheus
from tests.e2e.launch import REPOSITORY, Completed, fork

pytestmark = pytest.mark.e2e

RANKS = 4
SECONDS = 90.0


class Job:
    """A job in the background that steps until it is told to end."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.run = directory / "run"
        self.targets = directory / "targets"
        self.targets.mkdir()
        self._stop = directory / "stop"
        program = REPOSITORY / "tests" / "e2e" / "programs" / "steps_until_told.py"
        variables = {
            "COMMTRACE_DIR": str(self.run),
            "COMMTRACE_RUN_ID": "shown",
            "COMMTRACE_EXPORT": "prometheus",
            "COMMTRACE_PROMETHEUS_TARGETS": str(self.targets),
            "COMMTRACE_PROMETHEUS_IDENTITY": "1",
            "COMMTRACE_STEPS_PER_SEGMENT": "20",  # so that segments end, and are compacted, under the reader's eyes
        }
        self._future: Future[Completed] = pool.submit(fork, [program, self._stop], RANKS, variables, SECONDS)

    def endpoint(self, rank: int) -> str:
        """Where a rank answers, as its target file says."""
        (target,) = [path for path in self.targets.glob("*.json") if path.name.endswith(f"rank-{rank:05d}.json")]
        return f"http://{json.loads(target.read_text())[0]['targets'][0]}/metrics"

    def is_running(self) -> bool:
        return not self._future.done()

    def end(self) -> None:
        self._stop.touch()
        completed = self._future.result()
        assert completed.returncode == 0, completed.stdout


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ThreadPoolExecutor(1) as pool:
        own = Job(tmp_path, pool)
        try:
            yield own
        finally:
            own.end()


def top(source: str | Path, *options: str) -> dict[str, Any]:
    """One frame; ``waiting`` in it where there is none yet."""
    result = CliRunner().invoke(app, ["top", str(source), "--once", "--json", "--last", "10", *options])
    assert result.exit_code in (0, 3), result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def until_it_steps(job: Job, source: str | Path, least: int) -> dict[str, Any]:
    """The first frame in which all ranks have ended so many steps."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and job.is_running():
        told = top(source)
        if len(told.get("ranks", ())) == RANKS and min(row["last_step"] for row in told["ranks"]) >= least:
            return told
        time.sleep(0.2)
    raise AssertionError(f"the job did not get there: {told}")


def test_a_running_job_is_shown_from_its_files_and_from_its_metrics(job: Job, tmp_path: Path) -> None:
    first = until_it_steps(job, job.run, 30)
    _check_files(first)
    later = until_it_steps(job, job.run, max(row["last_step"] for row in first["ranks"]) + 25)
    _check_files(later)
    assert later["first_step"] > first["last_step"]
    _check_endpoint(job)
    if prometheus.PROGRAM is not None:
        _check_prometheus(job, tmp_path)
    job.end()
    ended = top(job.run)
    assert ended["notes"][0] == "The run has ended: these are its last steps."
    assert {row["state"] for row in ended["ranks"]} == {"ended"}


def _check_files(told: dict[str, Any]) -> None:
    assert (told["run_id"], told["world_size"], told["num_steps"]) == ("shown", RANKS, 10)
    assert told["last_step"] - told["first_step"] == 9
    for row in told["ranks"]:
        assert row["state"] == "running"
        assert row["age_ns"] < 15e9
        assert sum(row["parts"].values()) == row["step_ns"] > 20e6
        exposed = sum(one["total_ns"] for one in row["exposed"].values())
        assert exposed == row["parts"]["exposed"] > 0
        assert all(one["wait_ns"] + one["transfer_ns"] == one["total_ns"] for one in row["exposed"].values())


def _check_endpoint(job: Job) -> None:
    told = top(job.endpoint(2))
    (row,) = told["ranks"]
    assert (told["run_id"], row["rank"], row["waits_for"]) == ("shown", 2, None)
    assert row["last_step"] > 30
    assert sum(row["parts"].values()) == pytest.approx(row["step_ns"], abs=50)


def _check_prometheus(job: Job, directory: Path) -> None:
    (directory / "rules").mkdir()
    with prometheus.running(directory, job.targets, directory / "rules") as server:
        prometheus.until(lambda: len(server.query("commtrace_last_step_timestamp_seconds")) == RANKS, 30)
        told = top(server.url)
        assert (told["run_id"], [row["rank"] for row in told["ranks"]]) == ("shown", [0, 1, 2, 3])
        for row in told["ranks"]:
            assert sum(row["parts"].values()) == pytest.approx(row["step_ns"], abs=50)
            assert row["exposed"]
        unknown = top(server.url, "--run-id", "another")
        assert "has no run another. Its runs: shown" in unknown["waiting"]
