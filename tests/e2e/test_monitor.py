"""A rank that becomes slow while a real job runs is named, and cleared when it recovers; the monitor may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, Completed, fork
from tests.free_ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "monitored.py"
WINDOW_SECONDS = 4.0  # the default
MOST_SECONDS_TO_NAME = 15.0
TOKEN = "the-token-of-this-test"


class Job(threading.Thread):
    """A job of four ranks that runs beside the test."""

    def __init__(self, directory: Path, seconds: float, **environment: str) -> None:
        super().__init__()
        self.directory = directory
        self.slow = directory.parent / "slow"
        self.completed: Completed | None = None
        self._seconds = seconds
        self._environment = {
            "COMMTRACE_DIR": str(directory),
            "COMMTRACE_EXPORT": "monitor",
            "PYTHONPATH": str(REPOSITORY),
            **environment,
        }
        self.start()

    def run(self) -> None:
        arguments: list[str | Path] = [PROGRAM, self.slow, str(self._seconds)]
        self.completed = fork(arguments, 4, self._environment, timeout=self._seconds + 90)

    def status(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads((self.directory / "monitor.json").read_text())
        except FileNotFoundError:
            return {}
        return told

    def events(self) -> list[dict[str, Any]]:
        path = self.directory / "monitor.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def lasting(self) -> list[dict[str, Any]]:
        """The events on what lasts: on a busy machine any rank may be held up in a few steps."""
        return [event for event in self.events() if event["finding"]["occurrence"] is None]

    def wait_for(self, kind: str, seconds: float, *, lasts: bool = True) -> dict[str, Any]:
        """The first such event; how long it took does not matter up to a limit that a busy machine keeps.

        Of faults of some steps it is the first one on rank 2.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.lasting() if lasts else self.events():
                if event["kind"] == kind and (lasts or event["finding"]["ranks"] == [2]):
                    return event
            time.sleep(0.1)
        raise AssertionError(f"no event {kind} after {seconds} s: {self.events()} {self.status()}")

    def cost_ms_of(self, rank: int) -> float:
        """What a slow rank costs in a step, as the monitor says now; 0 if it is not named."""
        named = [one for one in self.status().get("findings", ()) if one["kind"] == "slow" and one["ranks"] == [rank]]
        return float(named[0]["cost_ns"]) / 1e6 if named else 0.0

    def wait_until_it_trains(self) -> None:
        deadline = time.monotonic() + 60
        while self.status().get("last_step", -1) < 20:
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.1)


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook's URL, and what it was sent."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not on the test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", received
    server.shutdown()
    server.server_close()


def test_a_rank_that_becomes_slow_by_a_fifth_is_named_and_cleared(
    tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, received = hook
    spans = tmp_path / "spans"
    job = Job(
        tmp_path / "run",
        120,
        COMMTRACE_MONITOR_WEBHOOK=url,
        COMMTRACE_EXPORT="monitor,otlp",
        COMMTRACE_OTLP_LEVEL="steps",
        COMMTRACE_OTLP_FILE=str(spans),
    )
    try:
        job.wait_until_it_trains()
        assert job.lasting() == []
        job.slow.write_text("2 0.2")
        slowed_at = time.time()
        found = job.wait_for("found", 40)
        named = [
            one["ranks"] for one in job.status()["findings"] if one["kind"] == "slow" and one["occurrence"] is None
        ]
        # 16 ms in each step. The windows that name it may hold steps from before the fault; a later one does not.
        until(lambda: 0.5 * 16 < job.cost_ms_of(2) < 1.5 * 16, 20, job.status)
        job.slow.unlink()
        recovered = job.wait_for("recovered", 40)
    finally:
        job.slow.with_name("stop").touch()
        job.join()
    slow = found["finding"]
    assert (slow["kind"], slow["ranks"], slow["cause"]) == ("slow", [2], "unknown")  # this program names no forward
    assert named == [[2]]
    # Told at the third end of a window after the fault, at the latest.
    assert found["time_ns"] / 1e9 - slowed_at < MOST_SECONDS_TO_NAME
    assert found["time_ns"] / 1e9 // WINDOW_SECONDS - slowed_at // WINDOW_SECONDS <= 3
    assert slow["cost_ns"] / 1e6 < 1.5 * 16
    assert recovered["finding"]["ranks"] == [2]
    assert job.completed is not None
    assert job.completed.returncode == 0, job.completed.stdout
    assert "commtrace: Rank 2 on" in job.completed.stdout
    assert "rank-hours per day" in job.completed.stdout
    assert "is as fast as its peers again" in job.completed.stdout
    assert [event["kind"] for event in job.lasting()] == ["found", "recovered"], job.events()
    assert [event["kind"] for event in received] == [event["kind"] for event in job.events()]
    _job_steps_hold_the_steps_of_all_ranks(spans)


def _job_steps_hold_the_steps_of_all_ranks(directory: Path) -> None:
    """Each that says that it rests on all of them; the others are too new, or of the job's end."""
    of_trace: dict[str, list[dict[str, Any]]] = {}
    for path in directory.glob("*-traces-*"):
        for line in path.read_text().splitlines():
            for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]:
                of_trace.setdefault(span["traceId"], []).append(span)
    num_complete = 0
    for spans in of_trace.values():
        (job_step,) = (span for span in spans if span["name"] == "job step")
        steps = [span for span in spans if span["name"] == "step"]
        if {"key": "commtrace.step.ranks_seen", "value": {"intValue": "4"}} in job_step["attributes"]:
            num_complete += 1
            assert int(job_step["startTimeUnixNano"]) == min(int(span["startTimeUnixNano"]) for span in steps)
            assert int(job_step["endTimeUnixNano"]) == max(int(span["endTimeUnixNano"]) for span in steps)
    assert num_complete >= 20


def test_a_rank_that_is_slow_in_a_few_steps_is_named_once_with_these_steps(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", 120, COMMTRACE_MONITOR_SECONDS="2")
    try:
        job.wait_until_it_trains()
        time.sleep(2)
        job.slow.write_text("2 3.0")
        time.sleep(1.0)  # about three steps, of 320 ms
        job.slow.unlink()
        found = job.wait_for("found", 40, lasts=False)["finding"]
        stands = [one["id"] for one in job.status()["findings"] if one["ranks"] == [2]]
    finally:
        job.slow.with_name("stop").touch()
        job.join()
    assert job.completed is not None
    assert job.completed.returncode == 0, job.completed.stdout
    assert (found["ranks"], found["cause"], stands) == ([2], "unknown", [found["id"]])
    assert set(found["occurrence"]["steps"]) == _steps_in_which_it_sleeps_longer(tmp_path / "run", 2)
    assert found["who"].startswith("rank 2 on ")
    assert [event["kind"] for event in job.events() if event["finding"]["ranks"] == [2]] == ["found"]


def _steps_in_which_it_sleeps_longer(directory: Path, rank: int) -> set[int]:
    """Those in which it begins to reduce after more than 240 ms; it sleeps for 80 or for 320."""
    spans = load_run(directory).ranks[rank].spans
    steps, calls = (spans.take(spans.kind == kind) for kind in (schema.STEP, schema.COLLECTIVE))
    begins = dict(zip(steps.step.tolist(), steps.start.tolist(), strict=True))
    times = zip(calls.step.tolist(), calls.start.tolist(), strict=True)
    return {step for step, start in times if step in begins and start - begins[step] > 240_000_000}


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_monitor_outside_of_the_job_may_die_or_freeze_while_ranks_train(tmp_path: Path, fate: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "commtrace", "monitor", "--serve", f"127.0.0.1:{port}", "-o", str(tmp_path)]
    log = (tmp_path / "log").open("w")
    environment = {**os.environ, "PYTHONPATH": ".", "COMMTRACE_MONITOR_TOKEN": TOKEN}
    monitor = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, env=environment)
    store = {
        "COMMTRACE_MONITOR_STORE": f"127.0.0.1:{port}",
        "COMMTRACE_MONITOR_TOKEN": TOKEN,
        "COMMTRACE_MONITOR_SECONDS": "1",
    }
    job = Job(tmp_path / "run", 120, **store)
    try:
        deadline = time.monotonic() + 60
        status = tmp_path / "monitor.json"
        while not (status.exists() and json.loads(status.read_text())["last_step"] > 20):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        monitor.send_signal(fate)
        time.sleep(6)  # ranks go on reporting to nobody: requests fail, or end by their timeout
    finally:
        job.slow.with_name("stop").touch()
        job.join()
        monitor.kill()
        monitor.wait()
        log.close()
    assert job.completed is not None
    assert job.completed.returncode == 0, job.completed.stdout
    assert job.completed.stdout.count("trained") == 4
    assert "Traceback" not in job.completed.stdout, job.completed.stdout
    run = load_run(tmp_path / "run")
    assert run.problems == ()
    for trace in run.ranks.values():
        steps = sorted(trace.spans.step[trace.spans.kind == schema.STEP].tolist())
        assert steps == list(range(len(steps)))
        assert len(steps) > 60
        durations = (trace.spans.end - trace.spans.start)[trace.spans.kind == schema.STEP]
        assert durations.max() < 5_000_000_000, "no step has waited for the monitor"
        assert trace.dropped == {}
