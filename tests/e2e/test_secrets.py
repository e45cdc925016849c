"""What a job is given to keep to itself is in none of its files, no line that it prints, and no command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.launch import REPOSITORY

pytestmark = pytest.mark.e2e

SECRET = "s3cret-0123456789abcdef"
NOBODY = "127.0.0.1:9"
"""The port of the discard service, which nobody runs."""
SECONDS = 60.0


def test_secrets_of_a_job_are_written_nowhere(tmp_path: Path) -> None:
    stop = tmp_path / "slow"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("COMMTRACE_", "OTEL_"))},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "COMMTRACE_DIR": str(tmp_path / "run"),
        "COMMTRACE_EXPORT": "otlp,prometheus,monitor",
        "COMMTRACE_OTLP_LEVEL": "communication",
        "COMMTRACE_OTLP_METRICS": "1",
        "COMMTRACE_MONITOR_TOKEN": SECRET,
        "COMMTRACE_MONITOR_WEBHOOK": f"http://me:{SECRET}@{NOBODY}/{SECRET}?token={SECRET}",
        "COMMTRACE_MONITOR_WEBHOOK_FORMAT": "pagerduty",
        "COMMTRACE_MONITOR_WEBHOOK_KEY": SECRET,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://me:{SECRET}@{NOBODY}/{SECRET}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={SECRET},{SECRET}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET_PLUGIN_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
    }
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, "tests/e2e/programs/monitored.py", str(stop), str(SECONDS)],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            commands = until_spans_are_refused(job, tmp_path / "log")
            (tmp_path / "stop").touch()
            assert job.wait(SECONDS) == 0, (tmp_path / "log").read_text()
        finally:
            job.kill()
            job.wait()

    assert any("otlp.process_sender" in command for command in commands), commands
    assert SECRET not in "".join(commands)
    assert SECRET not in (tmp_path / "log").read_text()
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"spans-0000.arrows"}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def until_spans_are_refused(job: subprocess.Popen[bytes], log: Path) -> set[str]:
    """The command lines of the job's processes until it says that spans are lost."""
    commands: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while "the OpenTelemetry receiver does not get all spans" not in log.read_text():
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        commands.add(command_line(str(job.pid)))
        for thread in Path(f"/proc/{job.pid}/task").iterdir():
            commands.update(command_line(child) for child in read(thread / "children").split())
        time.sleep(0.05)
    return commands


def command_line(pid: str) -> str:
    return read(Path(f"/proc/{pid}/cmdline"))


def read(path: Path) -> str:
    """What is in a file of a process or thread; nothing if that has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
