"""A rank that does not come any more: all ranks write down what they are in, and the monitor says who is missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import REPOSITORY, descendants

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "hangs_later.py"
HANG_SECONDS = 3.0
MOST_SECONDS_TO_TELL = 15.0
"""Between the notice of a rank and the event of the monitor; the machine may be busy."""
LIMIT_SECONDS = 60.0


def hung_job(directory: Path, *arguments: str) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The monitor's last event and the dumps of the ranks."""
    events = _events_of_a_hung_job(directory, arguments, HANG_SECONDS)
    dumps = {
        int(path.parent.name.removeprefix("rank-")): json.loads(path.read_text())
        for path in directory.glob("rank-*/hang-*-001.json")
    }
    noticed = min(dump["time"] for dump in dumps.values())
    assert events[0]["time_ns"] / 1e9 - noticed < MOST_SECONDS_TO_TELL
    return events[-1], dumps


def _events_of_a_hung_job(directory: Path, arguments: Sequence[str], hang_seconds: float) -> list[dict[str, Any]]:
    """The monitor's events about the hang, after which the job is killed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")}
    environment = {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "COMMTRACE_DIR": str(directory),
        "COMMTRACE_EXPORT": "monitor",
        "COMMTRACE_MONITOR_SECONDS": "2",
        "COMMTRACE_HANG_SECONDS": str(hang_seconds),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    command = [sys.executable, str(PROGRAM), *arguments]
    with (directory.parent / "log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            events = _wait_for_events(directory, directory.parent / "log")
            alive = job.poll() is None
        finally:
            for pid in [*descendants(job.pid), job.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
    assert alive, "the watch must never end the job"
    return events


def _wait_for_events(directory: Path, log: Path) -> list[dict[str, Any]]:
    """The events about the hang, once there have been no more for a while."""
    deadline = time.monotonic() + LIMIT_SECONDS
    path, found, since = directory / "monitor.jsonl", list[dict[str, Any]](), 0.0
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        hangs = [event for event in map(json.loads, lines) if event["finding"]["kind"] == "hang"]
        if len(hangs) > len(found):
            found, since = hangs, time.monotonic()
        if found and time.monotonic() - since > 5:
            return found
        time.sleep(0.2)
    raise AssertionError(f"no event about a hang after {LIMIT_SECONDS} s:\n{log.read_text()[-3000:]}")


def test_the_rank_that_does_not_come_is_named_with_its_place(tmp_path: Path) -> None:
    event, dumps = hung_job(tmp_path / "run", "2", "sleeps")
    assert event["finding"]["ranks"] == [2], event
    assert "Hung at seq 100 of the" in event["sentence"]
    assert "Root: rank 2" in event["sentence"]
    assert "inside data" in event["sentence"]
    assert "__getitem__" in event["sentence"]
    assert sorted(dumps) == [0, 1, 2, 3]
    (main_thread,) = [one for one in dumps[2]["threads"] if one["thread"] == "MainThread"]
    assert any("stay_away" in frame for frame in main_thread["frames"])
    # Blocked inside the collective, and nevertheless able to say so.
    (blocked,) = dumps[0]["in_flight"]
    assert (blocked["operation"], blocked["seq"], blocked["blocking"]) == ("all_reduce", 100, True)


def test_that_no_step_ends_is_told_long_before_ranks_count_as_hung(tmp_path: Path) -> None:
    run = tmp_path / "run"
    event, *_ = _events_of_a_hung_job(run, ("2", "sleeps"), 600.0)
    assert (event["kind"], event["finding"]["id"]) == ("found", "hang")
    assert re.search(r"No step has ended for \d+ s \(a step takes ", event["sentence"]), event
    assert event["sentence"].endswith(f"commtrace doctor {run}")
    assert event["time_ns"] - event["finding"]["since_ns"] >= 15 * 10**9


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    event, dumps = hung_job(tmp_path / "run", "3", "dies")
    assert sorted(dumps) == [0, 1, 2]
    assert event["finding"]["ranks"] == [3], event
    assert "Rank 3 gave its last sign of life" in event["sentence"]
    assert " is gone." in event["sentence"]
